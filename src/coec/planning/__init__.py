"""The plan: what pruning will do and take, from the configuration alone, in seconds."""

from coec.planning.memory import ComputeConfig
from coec.planning.plan import Plan
from coec.planning.run import Forecast

__all__ = ["ComputeConfig", "Forecast", "Plan"]
