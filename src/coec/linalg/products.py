"""Matrix products: only what is needed of one, in as many digits as are needed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

STRIP = 256
"""Rows that a product is cut into: enough to keep its rate."""


@contextmanager
def rounded_products(device: torch.device) -> Iterator[None]:
    """Let tensor cores of a CUDA device round the factors of float32 products to TF32.

    For preconditioners, which few digits do. Nothing else changes how a processor multiplies, and
    what was chosen before is chosen again.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def lower_gram(A: Float[Tensor, "b k"]) -> Float[Tensor, "b b"]:
    """The lower triangle of `A Aᵀ`, which is all that Cholesky reads, in strips of rows.

    What lies right of a strip's last column is not computed, and 0: for many rows nearly half the
    product.
    """
    b = len(A)
    if b <= STRIP:
        return A @ A.T
    G = A.new_zeros(b, b)
    for first in range(0, b, STRIP):
        last = min(first + STRIP, b)
        torch.mm(A[first:last], A[:last].T, out=G[first:last, :last])
    return G


def power_of_two(values: Float[Tensor, "..."]) -> float:
    """A power of two about the largest magnitude, so that dividing by it is exact; 1 for zeros.

    The largest magnitude, divided by it, lies in [1, 2).
    """
    # frexp gives a mantissa in [½, 1), so that the exponent is one above that of [1, 2).
    low, high = values.aminmax()
    largest = max(-float(low), float(high))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > 0 else 1.0
