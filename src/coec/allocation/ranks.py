"""Ranks of the matrices that low rank replaces, within a number of parameters (METHODS §11)."""

from bisect import bisect_right
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

Ranks = dict[str, int]
"""By the names of weights."""
Shapes = Mapping[str, torch.Size]
_HALVINGS = 100
"""Halvings of the range in which the price of a parameter lies, on a logarithmic scale."""
_LEAST_PRICE, _MOST_PRICE = 1e-20, 1e3


def stored(shape: torch.Size, rank: int) -> int:
    """Parameters of an m×n matrix of rank r: r rows, and the others as combinations of these."""
    return rank * (sum(shape) - rank)


def largest_rank(shape: torch.Size, share: float) -> int:
    """Return the largest rank that stores no more than a share of a matrix, at least 1."""
    ranks = range(1, min(shape) + 1)
    fitting = bisect_right(ranks, share * shape.numel(), key=lambda rank: stored(shape, rank))
    return max(fitting, 1)


def uniform_ranks(shapes: Shapes, budget: int) -> Ranks:
    """Return the ranks at which all matrices keep the same share of their parameters.

    Rank 1 everywhere may be more than the budget.
    """
    share = budget / sum(shape.numel() for shape in shapes.values())
    return _filled(shapes, budget, {name: largest_rank(s, share) for name, s in shapes.items()})


def ranks_by_cost(shapes: Shapes, budget: int, costs: Mapping[str, Float[Tensor, " r"]]) -> Ranks:
    """Return the ranks of least cost in sum within the budget.

    Args:
        shapes: of the matrices, by name.
        budget: parameters that may be stored of all of them.
        costs: what rank 1, 2, … of every matrix costs, down to 0 at its full rank.
    """
    sizes = {
        name: torch.tensor([stored(shapes[name], n + 1) for n in range(len(cost))])
        for name, cost in costs.items()
    }

    def at(price: float) -> Ranks:
        return {n: int((cost + price * sizes[n]).argmin()) + 1 for n, cost in costs.items()}

    low, high = _LEAST_PRICE, _MOST_PRICE
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _total(shapes, at(middle)) <= budget else (middle, high)
    return _filled(shapes, budget, at(high))


def _total(shapes: Shapes, ranks: Ranks) -> int:
    return sum(stored(shapes[name], rank) for name, rank in ranks.items())


def _filled(shapes: Shapes, budget: int, ranks: Ranks) -> Ranks:
    """Add one to the rank of each matrix, in order, where that still fits into the budget."""
    unused, filled = budget - _total(shapes, ranks), dict(ranks)
    for name, shape in shapes.items():
        cost = stored(shape, ranks[name] + 1) - stored(shape, ranks[name])
        if ranks[name] < min(shape) and cost <= unused:
            filled[name], unused = ranks[name] + 1, unused - cost
    return filled
