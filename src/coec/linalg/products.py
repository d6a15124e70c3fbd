"""Matrix products: only what is needed of one, in as many digits as are needed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

STRIP = 256
"""Rows that a product is cut into: enough to keep its rate."""


@contextmanager
def rounded_products(device: torch.device) -> Iterator[None]:
    """Lets tensor cores of a CUDA device round the factors of float32 products to TF32.

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
