"""The plan: what pruning will do and take, from the configuration alone, in seconds."""

from coec.planning.memory import ComputeConfig, disk
from coec.planning.plan import Plan
from coec.planning.run import Forecast, check_room, close_fits, within

__all__ = [
    "ComputeConfig",
    "Forecast",
    "Plan",
    "check_room",
    "close_fits",
    "disk",
    "within",
]
