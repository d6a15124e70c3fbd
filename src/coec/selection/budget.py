"""How many units stay, and which: uniform allocation (METHODS §§1, 3)."""

import math
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.settings.parts import check_sparsity
from coec.types import KeptSet


def kept_count(units: int, sparsity: float) -> int:
    """`⌈(1 − ρ) n⌉` in exact arithmetic on the decimal number written, at least 1.

    Binary arithmetic makes ⌈(1 − 0.7) · 10⌉ = 4; it is 3.
    """
    check_sparsity(sparsity)
    return max(1, math.ceil((1 - Fraction(repr(float(sparsity)))) * units))


def keep_highest(scores: Float[Tensor, " u"], count: int) -> KeptSet:
    """The `count` units of highest score; ties break toward the lower index.

    Raises:
        NumericalError: a score is NaN.
    """
    if torch.isnan(scores).any():
        raise NumericalError("a selection score is NaN")
    order = torch.argsort(scores, descending=True, stable=True)
    return KeptSet(order[:count].sort().values, len(scores))
