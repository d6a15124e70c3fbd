"""The plan: what pruning will do and take, from the configuration alone, in seconds."""

from coec.devices import FreeMemory
from coec.planning.compute import ComputeConfig
from coec.planning.forecast import Forecast, disk
from coec.planning.machines import machine_named
from coec.planning.plan import Plan
from coec.planning.room import check_room, close_fits, within

__all__ = [
    "ComputeConfig",
    "Forecast",
    "FreeMemory",
    "Plan",
    "check_room",
    "close_fits",
    "disk",
    "machine_named",
    "within",
]
