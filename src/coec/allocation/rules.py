"""How much the output error falls for every unit, by which sites are compared (METHODS §10)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from coec.selection.elimination import removal_path
from coec.types import Gram, KeptSet


def by_error(
    weight: Float[Tensor, "m d"], gram: Gram, units: int, keep: int, ranges: int
) -> tuple[Float[Tensor, " u"], KeptSet]:
    """Return by how much the error falls for each unit, and the units at the uniform width."""
    # Gram → removals down to the last units → shape of the curve, and the units kept at `keep`
    path = removal_path(weight, gram.xx, units, ranges, ranges=ranges)
    gone = {unit for unit, _ in path[: units - keep]}
    staying = torch.tensor([unit for unit in range(units) if unit not in gone])
    return error_saved([cost for _, cost in path], keep, ranges), KeptSet(staying, units)


def error_saved(costs: Sequence[float], keep: int, last: int = 1) -> Float[Tensor, " u"]:
    """Return by how much every unit that stays lowers the output error, the best unit first.

    The unit is the error at the width `keep`; where that is 0, a unit is worth 0 too, or ∞ if its
    own removal costs anything. Where a removal costs less than one before it, those between count
    at their mean cost: the path is replaced by its convex hull. The last units, which always stay,
    are worth ∞. float64, on the CPU.

    Args:
        costs: of every removal down to the last units, as `removal_path` returns them.
        keep: how many units are left when the error is 1.
        last: how many always stay.
    """
    # Costs in the order of removal → their convex hull → shares of the error at `keep` units
    rising = torch.tensor(_rising(costs), dtype=torch.float64)
    error = float(rising[: len(costs) + last - keep].sum())
    # Over an error of 0 anything is ∞; 0 over it counts as 0.
    # Removal order is worst unit first; reversed, the last unit to go is the best.
    saved = (rising / error if error > 0 else torch.where(rising > 0, torch.inf, 0.0)).flip(0)
    return torch.cat([torch.full((last,), torch.inf, dtype=torch.float64), saved])


def _rising(costs: Sequence[float]) -> list[float]:
    """The slopes of the convex hull below the sums of costs: isotonic regression, by pooling."""
    runs: list[tuple[float, int]] = []
    for cost in costs:
        total, count = cost, 1
        # Pool adjacent violators: a run whose mean is no less than the next one's joins it. The
        # means are compared by products, so that nothing is divided.
        while runs and runs[-1][0] * count >= total * runs[-1][1]:
            before, number = runs.pop()
            total, count = total + before, count + number
        runs.append((total, count))
    return [total / count for total, count in runs for _ in range(count)]
