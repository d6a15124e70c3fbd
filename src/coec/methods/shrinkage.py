"""Compensations drawn back to the slice, where tokens are few for what is fitted (METHODS §4)."""

import math
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from coec.methods.objective import kept_columns, relative_errors
from coec.types import Gram, KeptSet, SiteResult

FEW = 8
"""Tokens for every fitted column from which on a compensation is taken as it is
(docs/lab/LOG.md)."""

PLENTY = 64
"""Tokens for every fitted column up to which a doubling of the text took 2 to 5 % off the error of
a real model's consumer on other windows (docs/lab/LOG.md)."""


def few(tokens: float, columns: int) -> bool:
    """True where there are fewer than `FEW` tokens for every column."""
    return tokens < FEW * columns


def enough(windows: int, tokens: float, columns: int, each: int = FEW) -> int:
    """Return the windows that have `each` tokens for every column, if `windows` have `tokens`."""
    return math.ceil(windows * each * columns / tokens)


@dataclass(frozen=True)
class Followed:
    """The θ of lowest validation error of `W_K + θ (W̃ − W_K)`.

    Attributes:
        value: θ, from 0, the slice, to 1, the compensation.
        before: the slice's relative error on the validation windows.
        after: that at θ.
    """

    value: float
    before: float
    after: float


def best_share(
    weight: Float[Tensor, "m d"],
    kept: KeptSet,
    result: SiteResult,
    validation: Gram,
    target: Float[Tensor, "m d"] | None = None,
) -> Followed:
    """Return how far a compensation is to be followed: the minimum of a parabola in θ.

    `min 𝓛(W_K + θ (W̃ − W_K))  s.t.  0 ≤ θ ≤ 1`, 𝓛 on validation windows; a bias is scaled alike.
    Three values of 𝓛 give the parabola. A compensation that is the slice is followed.

    Args:
        weight: `W₀`.
        kept: the columns that stay.
        result: the compensation, fitted on other statistics.
        validation: statistics of the same inputs over the validation windows.
        target: what the outputs should be on those, where that is not W₀ (`SiteProblem.aim`).
    """
    # 𝓛(θ) = before + slope θ + curvature θ², from its values at 0, ½ and 1
    midpoint = drawn_back(weight, kept, result, 0.5)
    before, middle = relative_errors(weight, validation, kept, midpoint, target=target)
    _, after = relative_errors(weight, validation, kept, result, target=target)
    slope, curvature = 4 * middle - 3 * before - after, 2 * (before + after - 2 * middle)
    # Its minimum within [0, 1]; a straight line has it at an end.
    share = 1.0
    if curvature > 0:
        share = min(max(-slope / (2 * curvature), 0.0), 1.0)
    elif after > before:
        share = 0.0
    return Followed(share, before, before + share * (slope + share * curvature))


def drawn_back(
    weight: Float[Tensor, "m d"], kept: KeptSet, result: SiteResult, share: float
) -> SiteResult:
    """Return `W_K + θ (W̃ − W_K)`, and θ times the bias; diagnostics as they are."""
    W_K = kept_columns(weight, kept).to(result.weight)
    bias = None if result.bias is None else share * result.bias
    return replace(result, weight=W_K + share * (result.weight - W_K), bias=bias)
