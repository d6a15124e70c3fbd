"""Units: a power of two about the size of some numbers, so that measuring them in it is exact."""

import math

from jaxtyping import Float
from torch import Tensor


def power_of_two(values: Float[Tensor, "..."]) -> float:
    """A power of two about the largest magnitude, so that dividing by it is exact; 1 for zeros.

    The largest magnitude, divided by it, lies in [1, 2).
    """
    low, high = values.aminmax()
    largest = max(-float(low), float(high))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > 0 else 1.0
