"""Training-free structured pruning of large language models.

`prune` works on checkpoints, `compensate` on plain tensors, and `compensate_pruned` on what another
program pruned; `recover` trains a pruned model a little. `plan` looks ahead, and `collect` keeps
the statistics of a dense pass for many prunings; `export` writes what other programs read.
`perplexity` measures.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coec.errors import CoecError
from coec.version import __version__ as __version__

if TYPE_CHECKING:
    from coec.compensation import Method, compensate
    from coec.evaluation.perplexity import perplexity
    from coec.exporting.export import Export, export
    from coec.pipeline.collect import collect
    from coec.pipeline.compensate import compensate_pruned, infer_kept
    from coec.pipeline.prune import plan, prune
    from coec.pipeline.report import Report
    from coec.planning import Plan
    from coec.planning.recipe import Recipe
    from coec.recovery import recover
    from coec.streaming.statistics import Statistics
    from coec.types import Gram, KeptSet, SiteProblem, SiteResult

__all__ = [
    "CoecError",
    "Export",
    "Gram",
    "KeptSet",
    "Method",
    "Plan",
    "Recipe",
    "Report",
    "SiteProblem",
    "SiteResult",
    "Statistics",
    "collect",
    "compensate",
    "compensate_pruned",
    "export",
    "infer_kept",
    "perplexity",
    "plan",
    "prune",
    "recover",
]

_MODULES = {
    "coec.compensation": ("Method", "compensate"),
    "coec.evaluation.perplexity": ("perplexity",),
    "coec.exporting.export": ("Export", "export"),
    "coec.pipeline.collect": ("collect",),
    "coec.pipeline.compensate": ("compensate_pruned", "infer_kept"),
    "coec.pipeline.prune": ("plan", "prune"),
    "coec.pipeline.report": ("Report",),
    "coec.planning": ("Plan",),
    "coec.planning.recipe": ("Recipe",),
    "coec.recovery": ("recover",),
    "coec.streaming.statistics": ("Statistics",),
    "coec.types": ("Gram", "KeptSet", "SiteProblem", "SiteResult"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}
"""Modules of the names that are imported when they are used."""


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when something that needs them is used."""
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'coec' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
