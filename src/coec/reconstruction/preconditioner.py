"""The preconditioner: every matrix's block of the Gauss–Newton matrix as a Kronecker product."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.linalg.decompose import eigh
from coec.linalg.products import rounded_products
from coec.reconstruction.least_squares import Factor, Theta

SAME = 1e-5
"""Rows of a factor that differ by less, relatively, differ by rounding."""


@dataclass(frozen=True, eq=False)
class _Inverse:
    """`(diag(rows) ⊗ columns + μ I)⁻¹` in the eigenbasis of the columns."""

    basis: Float[Tensor, "inp inp"]
    denominator: Float[Tensor, "out inp"]

    def __call__(self, R: Float[Tensor, "out inp"]) -> Float[Tensor, "out inp"]:
        return (R @ self.basis / self.denominator) @ self.basis.T


@dataclass(frozen=True, eq=False)
class _SameRows:
    """`(M ⊗ (columns + μ I))⁻¹`: one inverse for all rows, far cheaper than eigenvectors.

    M is `SᵀS` where there is a root S, else the identity.
    """

    inverse: Float[Tensor, "inp inp"]
    root: Float[Tensor, "out out"] | None

    def __call__(self, R: Float[Tensor, "out inp"]) -> Float[Tensor, "out inp"]:
        if self.root is not None:
            R = torch.cholesky_solve(R, self.root.to(R), upper=True)
        return R @ self.inverse


def _inverted(factor: Factor, damped: float) -> _Inverse | _SameRows:
    rows, columns = factor.rows, factor.columns
    if damped > 0 and float(rows.max() - rows.min()) < SAME * float(rows.max()):
        shifted = columns + damped * torch.eye(len(columns), dtype=rows.dtype, device=rows.device)
        L, failed = torch.linalg.cholesky_ex(shifted)
        if not failed:
            return _SameRows(torch.cholesky_inverse(L), factor.root)
    mu, basis = eigh(columns)
    # Where nothing depends on a matrix it stays as it is: its gradient is 0 as well.
    floor = damped or torch.finfo(mu.dtype).eps * float(mu.abs().max()) or 1.0
    return _Inverse(basis, rows[:, None] * mu.clamp_min(0) + floor)


class Preconditioner:
    """`(P + μ)⁻¹`, P block-diagonal over the matrices of θ, and the damping μ of each.

    Where a factor has a root S, its matrix is damped by `μ SᵀS`.

    Args:
        factors: of every matrix.
        damping: λ; `μ = λ · mean(diag P)`, matrix by matrix.

    Raises:
        NumericalError: a factor is not finite.
    """

    def __init__(self, factors: dict[str, Factor], damping: float) -> None:
        self._damping: dict[str, float] = {}
        self._roots = {name: factor.root for name, factor in factors.items()}
        self._inverses: dict[str, _Inverse | _SameRows] = {}
        for name, factor in factors.items():
            mean = float(factor.columns.diagonal().mean())
            self._damping[name] = damping * mean
            self._inverses[name] = _inverted(factor, damping * mean)

    def __call__(self, residual: Theta) -> Theta:
        with rounded_products(next(iter(residual.values())).device):
            return {name: inverse(residual[name]) for name, inverse in self._inverses.items()}

    def damped(self, direction: Theta) -> Theta:
        """`μ δ`."""
        return {
            name: self._damping[name] * (d if (S := self._roots[name]) is None else S.mT @ (S @ d))
            for name, d in direction.items()
        }
