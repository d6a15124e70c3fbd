"""Training-free structured pruning of large language models.

`prune`, `perplexity` and `zero_shot` work on checkpoints, `compensate` on plain tensors; `plan`
looks ahead, and `collect` keeps the statistics of a dense pass for many prunings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coec.errors import CoecError
from coec.types import Compensation, Gram, KeptSet

if TYPE_CHECKING:
    from coec.collecting import collect
    from coec.compensation import compensate
    from coec.evaluation.perplexity import perplexity
    from coec.evaluation.zero_shot import zero_shot
    from coec.pruning import plan, prune

__all__ = [
    "CoecError",
    "Compensation",
    "Gram",
    "KeptSet",
    "collect",
    "compensate",
    "perplexity",
    "plan",
    "prune",
    "zero_shot",
]
__version__ = "0.1.0"

_LAZY = {
    "collect": "coec.collecting",
    "compensate": "coec.compensation",
    "perplexity": "coec.evaluation.perplexity",
    "plan": "coec.pruning",
    "prune": "coec.pruning",
    "zero_shot": "coec.evaluation.zero_shot",
}


def __getattr__(name: str) -> Any:
    """Imports transformers only when a function that needs it is used."""
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'coec' has no attribute '{name}'")
