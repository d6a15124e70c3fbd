"""Rules that share the kept units among blocks, by name (METHODS §10)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.selection import error_saved, removal_path, standardised
from coec.settings.parts import Allocation
from coec.types import Gram, KeptSet

Importance = Callable[[Tensor, Gram, int, int], tuple[Float[Tensor, " u"], KeptSet | None]]
"""`(weight, gram, units, keep)` of a site that keeps so many units where all blocks are alike → the
importance of every unit, that of the last one to be removed first; and the units that are left of
a path of removals, where there is one."""


@dataclass(frozen=True)
class Rule:
    """Rule that shares the kept units among blocks.

    Attributes:
        importance: of one site's units; None where every block keeps the same fraction.
        runs_models: True where what a site costs is measured by running pruned models over text.
    """

    importance: Importance | None = None
    runs_models: bool = False


def by_score(
    weight: Float[Tensor, "m d"], gram: Gram, units: int, keep: int
) -> tuple[Float[Tensor, " u"], None]:
    """Return FLAP's standardised scores, by which sites are compared as they are."""
    return standardised(weight, gram, units), None


def by_error(
    weight: Float[Tensor, "m d"], gram: Gram, units: int, keep: int
) -> tuple[Float[Tensor, " u"], KeptSet]:
    """Return by how much the error falls for each unit, and the units at the uniform width."""
    # Gram → removals down to the last unit → shape of the curve, and the units kept at `keep`
    path = removal_path(weight, gram.xx, units, 1)
    gone = {unit for unit, _ in path[: units - keep]}
    staying = torch.tensor([unit for unit in range(units) if unit not in gone])
    return error_saved([cost for _, cost in path], keep), KeptSet(staying, units)


ALLOCATIONS: dict[Allocation, Rule] = {
    "uniform": Rule(),
    "adaptive": Rule(by_score),
    "error": Rule(by_error, runs_models=True),
}
