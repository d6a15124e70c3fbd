"""The plan: what pruning will do, from the configuration alone, in seconds."""

from coec.planning.costs import SHARD_BYTES
from coec.planning.plan import Plan

__all__ = ["SHARD_BYTES", "Plan"]
