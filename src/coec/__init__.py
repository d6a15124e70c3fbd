"""Training-free structured pruning of large language models.

`prune` works on checkpoints, `compensate` on plain tensors; `recover` trains a pruned model a
little. `plan` looks ahead, `perplexity` measures, and `export` writes what other programs read.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coec.errors import CoecError
from coec.version import __version__ as __version__

if TYPE_CHECKING:
    from coec.checkpoint.report import Report
    from coec.config.recipe import Recipe
    from coec.evaluation import perplexity
    from coec.exporting.export import Export, export
    from coec.methods import Method, compensate
    from coec.planning.plan import Plan
    from coec.pruning import plan, prune
    from coec.recovery import recover
    from coec.types import Gram, KeptSet, SiteProblem, SiteResult

_MODULES = {
    "coec.checkpoint.report": ("Report",),
    "coec.methods": ("Method", "compensate"),
    "coec.config.recipe": ("Recipe",),
    "coec.evaluation": ("perplexity",),
    "coec.exporting.export": ("Export", "export"),
    "coec.planning.plan": ("Plan",),
    "coec.pruning": ("plan", "prune"),
    "coec.recovery": ("recover",),
    "coec.types": ("Gram", "KeptSet", "SiteProblem", "SiteResult"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}
"""Modules of the names that are imported when they are used."""
__all__ = [
    "CoecError", "Export", "Gram", "KeptSet", "Method", "Plan", "Recipe", "Report", "SiteProblem",
    "SiteResult", "compensate", "export", "perplexity", "plan", "prune", "recover",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import torch and transformers only if something that needs them is used."""
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'coec' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__"])
