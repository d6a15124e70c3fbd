"""The plan: what pruning will do, from the configuration alone, in seconds."""

from coec.free_memory import Room
from coec.planning.forecast import Forecast, disk
from coec.planning.how import How
from coec.planning.machines import GPUS, named
from coec.planning.memory import SHARD_BYTES
from coec.planning.plan import Plan
from coec.planning.room import check_room, close, within

__all__ = [
    "GPUS", "SHARD_BYTES", "Forecast", "How", "Plan", "Room", "check_room", "close", "disk",
    "named", "within",
]  # fmt: skip
