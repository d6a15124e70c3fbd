"""The plan: what pruning will do, from the configuration alone, in seconds."""

from coec.devices import FreeMemory
from coec.planning.forecast import Forecast, disk
from coec.planning.how import ComputeConfig
from coec.planning.machines import GPUS, named
from coec.planning.memory import SHARD_BYTES
from coec.planning.plan import Plan
from coec.planning.room import check_room, close, within

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
