"""Counts floating-point operations as torch runs them; a multiplication and an addition are two.

Decompositions are counted by divide-and-conquer algorithms with full accumulation of vectors, in
leading order. Elementwise work is not counted.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Rates = dict[torch.dtype, float]
"""Operations per second of a product."""
_aten = torch.ops.aten


class Counter(TorchDispatchMode):
    """Adds up the operations of products, attention and decompositions.

    About 10 μs per operator: a millisecond per step, less than `torch.utils.flop_counter` takes.

    Args:
        rates: operations per second of a product in every dtype, for `floor`.
        operators: operations of an operator, from its arguments.
    """

    def __init__(
        self,
        rates: Rates | None = None,
        operators: Mapping[Any, Callable[..., float]] | None = None,
    ) -> None:
        super().__init__()
        self.rates = rates or {}
        self.operators = OPERATORS if operators is None else operators
        self.operations = 0.0
        self.floor = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count, and run the operator."""
        if count := self.operators.get(func):
            self.add(count(*args), args[0].dtype)
        return func(*args, **(kwargs or {}))

    def add(self, operations: float, dtype: torch.dtype) -> None:
        """Add operations in one dtype, and the seconds that they take at its rate."""
        self.operations += operations
        self.floor += operations / self.rates.get(dtype, math.inf)


def _product(A: Tensor, B: Tensor) -> float:
    return 2.0 * A.numel() * B.shape[-1]


def _attention(q: Tensor, k: Tensor, *_: object, **__: object) -> float:
    """Half of the map, since no token sees later ones."""
    return 2.0 * q.numel() * k.shape[-2]


def _solve(A: Tensor, B: Tensor) -> float:
    """One triangle, for all columns of B."""
    return float(len(A) * B.numel())


def _svd(A: Tensor) -> float:
    """By a QR factorisation of the long side: 6 m n² + 20/3 n³."""
    n = min(A.shape)
    return 6.0 * A.numel() * n + 20 / 3 * n**3


OPERATORS: dict[Any, Callable[..., float]] = {
    _aten.mm.default: _product,
    _aten.mm.out: _product,
    _aten.mm.dtype: _product,
    _aten.addmm.default: lambda C, A, B: _product(A, B),
    _aten.addmm_.default: lambda C, A, B: _product(A, B),
    _aten.bmm.default: _product,
    _aten.baddbmm.default: lambda C, A, B: _product(A, B),
    _aten.mv.default: lambda A, x: 2.0 * A.numel(),
    _aten.linalg_cholesky_ex.default: lambda A, *_: len(A) ** 3 / 3,
    _aten.cholesky_inverse.default: lambda L, *_: 2 / 3 * len(L) ** 3,
    _aten.cholesky_solve.default: lambda B, L, *_: 2 * _solve(L, B),
    _aten.linalg_solve_triangular.default: lambda A, B, *_: _solve(A, B),
    _aten._linalg_eigh.default: lambda A, *_: 14 / 3 * len(A) ** 3,
    _aten._linalg_svd.default: lambda A, *_: _svd(A),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    # Five products backward, where there are two forward
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda _, q, k, *__: 5 / 2 * _attention(q, k)
    ),
}
