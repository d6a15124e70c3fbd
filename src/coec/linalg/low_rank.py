"""The matrix of a rank whose outputs are nearest, and that matrix as some rows and the others.

Everything is float64 (METHODS §11).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.events import record
from coec.linalg.decompose import eigh, svd


class Spectrum(NamedTuple):
    """A thin singular value decomposition of `W L`, without its right factor.

    The nearest matrix of rank r in the metric `L Lᵀ` is `U_r U_rᵀ W`; its squared error is the sum
    of the squares of the values beyond r.
    """

    basis: Float[Tensor, "m b"]
    values: Float[Tensor, " b"]

    def truncated(self, W: Float[Tensor, "m n"], rank: int) -> Float[Tensor, "m n"]:
        """The nearest matrix of a rank."""
        basis = self.basis[:, :rank]
        return basis @ (basis.T @ W)

    @property
    def errors(self) -> Float[Tensor, " b"]:
        """Squared errors that rank 1, 2, … leave."""
        sums = self.values.square().flip(0).cumsum(0).flip(0)
        return torch.cat([sums[1:], sums.new_zeros(1)])


def spectrum(W: Float[Tensor, "m n"], G: Float[Tensor, "n n"], ridge: float) -> Spectrum:
    """Decompose `W L`, where `L Lᵀ = G + λ I` and `λ = ridge · mean(diag G)`.

    `min ‖(W − W_r) L‖` over matrices of rank r is `Σ w |(W − W_r) x|²` over inputs of Gram G, but
    for the ridge.

    Args:
        W: the matrix.
        G: Gram of its inputs.
        ridge: relative to the mean diagonal, above 0.
    """
    shifted = G.clone()
    shifted.diagonal().add_(ridge * float(G.diagonal().mean()))
    L, info = torch.linalg.cholesky_ex(shifted)
    if int(info):
        record("the regularised Gram is not positive definite: factored by its eigenvectors")
        mu, Q = eigh(shifted)
        L = Q * mu.clamp_min(0).sqrt()
    basis, values, _ = svd(W @ L)
    return Spectrum(basis, values)


class PivotRows(NamedTuple):
    """A matrix of rank r as r of its rows, and the others as combinations of these.

    `order` lists the pivots' rows, then the others'.
    """

    pivots: Float[Tensor, "r n"]
    coefficients: Float[Tensor, "_ r"]
    order: Int[Tensor, " m"]

    def matrix(self) -> Float[Tensor, "m n"]:
        """The matrix, its rows in their places."""
        rows = torch.cat([self.pivots, self.coefficients @ self.pivots])
        return rows[self.order.argsort()]


def pivot_rows(W: Float[Tensor, "m n"], basis: Float[Tensor, "m r"]) -> PivotRows:
    """Split a matrix whose columns `basis` spans into rows that span it, and coefficients.

    Gaussian elimination of `basis` takes the largest remaining entry for each pivot, so that the
    coefficients `U_o U_p⁻¹` stay small (the form of PIFA: Zhao et al., arXiv 2501.19090).
    """
    factors, swaps = torch.linalg.lu_factor(basis)
    rows = list(range(len(basis)))
    for row, swapped in enumerate(swaps.tolist()):
        rows[row], rows[swapped - 1] = rows[swapped - 1], rows[row]
    rank = basis.shape[1]
    coefficients = torch.linalg.solve_triangular(
        factors[:rank], factors[rank:], upper=False, left=False, unitriangular=True
    )
    order = torch.tensor(rows, device=W.device)
    return PivotRows(W[order[:rank]], coefficients, order)
