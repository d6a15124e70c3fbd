"""Training-free structured pruning of large language models.

`prune` works on checkpoints, `compensate` on plain tensors, and `compensate_pruned` on what another
program pruned; `recover` trains a pruned model a little. `plan` looks ahead, and `collect` keeps
the statistics of a dense pass for many prunings; `export` writes what other programs read.
`perplexity`, `zero_shot`, `geometry`, `speed` and `efficiency` measure.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coec.errors import CoecError
from coec.version import __version__ as __version__

if TYPE_CHECKING:
    from coec.compensation import Method, compensate
    from coec.evaluation.efficiency import efficiency, speed
    from coec.evaluation.geometry import geometry
    from coec.evaluation.perplexity import perplexity
    from coec.evaluation.zero_shot import zero_shot
    from coec.exporting.export import Export, export
    from coec.pipeline.collect import collect
    from coec.pipeline.compensate import compensate_pruned, infer_kept
    from coec.pipeline.prune import plan, prune
    from coec.pipeline.report import Report
    from coec.planning import Plan
    from coec.planning.recipe import Recipe
    from coec.recovery.recover import recover
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
    "efficiency",
    "export",
    "geometry",
    "infer_kept",
    "perplexity",
    "plan",
    "prune",
    "recover",
    "speed",
    "zero_shot",
]

_LAZY = {
    "Export": "coec.exporting.export",
    "Gram": "coec.types",
    "KeptSet": "coec.types",
    "Method": "coec.compensation",
    "Plan": "coec.planning",
    "Recipe": "coec.planning.recipe",
    "Report": "coec.pipeline.report",
    "SiteProblem": "coec.types",
    "SiteResult": "coec.types",
    "Statistics": "coec.streaming.statistics",
    "collect": "coec.pipeline.collect",
    "compensate": "coec.compensation",
    "compensate_pruned": "coec.pipeline.compensate",
    "efficiency": "coec.evaluation.efficiency",
    "export": "coec.exporting.export",
    "geometry": "coec.evaluation.geometry",
    "infer_kept": "coec.pipeline.compensate",
    "perplexity": "coec.evaluation.perplexity",
    "plan": "coec.pipeline.prune",
    "prune": "coec.pipeline.prune",
    "recover": "coec.recovery.recover",
    "speed": "coec.evaluation.efficiency",
    "zero_shot": "coec.evaluation.zero_shot",
}


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when something that needs them is used."""
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'coec' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
