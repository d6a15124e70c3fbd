"""The plan: what pruning will do, from the configuration alone, in seconds."""

from coec.free_memory import FreeMemory
from coec.plan.forecast import Forecast, disk
from coec.plan.how import ComputeConfig
from coec.plan.machines import GPUS, named
from coec.plan.memory import SHARD_BYTES
from coec.plan.plan import Plan
from coec.plan.room import check_room, close, within

__all__ = [
    "GPUS",
    "SHARD_BYTES",
    "ComputeConfig",
    "Forecast",
    "FreeMemory",
    "Plan",
    "check_room",
    "close",
    "disk",
    "named",
    "within",
]  # fmt: skip
