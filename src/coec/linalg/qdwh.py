"""QDWH: the polar decomposition, and singular values through it, by matrix products."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.linalg.stiefel import symmetric


def qdwh(A: Float[Tensor, "m b"], smallest: float, iterations: int = 30) -> Float[Tensor, "m b"]:
    """The polar factor by the dynamically weighted Halley iteration: products and Cholesky only.

    `X ← (β/γ) X + (a − β/γ) X (I + γ XᵀX)⁻¹` with the weights of Nakatsukasa, Bai and Gygi (2010)
    for singular values in [l, 1]; about six steps. γ is capped so that the Cholesky factor keeps
    half the digits, which costs a step or two for the smallest singular values.

    Args:
        A: full rank, singular values at most about 1.
        smallest: an estimate of the smallest singular value; too large costs steps, no accuracy.
        iterations: at most so many steps.

    Raises:
        NumericalError: no convergence (A is singular).
    """
    eps = torch.finfo(A.dtype).eps
    eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
    near = nearly_orthogonal(A.dtype, A.shape[1])
    # The floor under l is the cap on γ.
    X, lower = A, max(smallest, eps**0.45)
    for _ in range(iterations):
        a, beta, gamma = _halley_weights(min(lower, 1.0))
        square = X.T @ X
        if float((square - eye).norm()) <= near:
            # A Newton-Schulz step squares what is left.
            return torch.addmm(X, X, square, beta=1.5, alpha=-0.5)
        # X (I + γ XᵀX)⁻¹ by Cholesky; the matrix has no eigenvalue below 1.
        L, info = torch.linalg.cholesky_ex(eye + gamma * square)
        if int(info) != 0:
            break
        solved = torch.cholesky_solve(X.T, L).T
        X = (beta / gamma) * X + (a - beta / gamma) * solved
        # Singular values move as x (a + β x²)/(1 + γ x²); so does their lower bound.
        lower = lower * (a + beta * lower**2) / (1 + gamma * lower**2)
    raise NumericalError("the polar iteration did not converge")


def nearly_orthogonal(dtype: torch.dtype, columns: int) -> float:
    """Return the `‖XᵀX − I‖_F` from which one Newton-Schulz step makes X orthonormal to rounding.

    Rounding alone leaves 3 eps √columns, which in float32 is more than √eps/10 from 8,000 columns
    on: the bound is at least 8 eps √columns.
    """
    eps = torch.finfo(dtype).eps
    return max(0.1 * math.sqrt(eps), 8 * eps * math.sqrt(columns))


def _halley_weights(lower: float) -> tuple[float, float, float]:
    """(a, β, γ) that are optimal for singular values in [lower, 1]; (3, 1, 3) at 1."""
    square = lower * lower
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    a = math.sqrt(1 + d) + 0.5 * math.sqrt(
        8 - 4 * d + 8 * (2 - square) / (square * math.sqrt(1 + d))
    )
    beta = (a - 1) ** 2 / 4
    return a, beta, a + beta - 1


def svd_by_polar(
    A: Float[Tensor, "m n"],
) -> tuple[Float[Tensor, "m r"], Float[Tensor, " r"], Float[Tensor, "r n"]]:
    """The thin SVD of a full-rank matrix: `A = U_p H`, `H = V diag(s) Vᵀ`, so `U = U_p V`.

    At the price of a symmetric eigenproblem of the smaller side (Higham and Papadimitriou 1994).
    Frames are orthonormal to rounding; `U diag(s) Vᵀ` is A to 1e-9 of its norm in float64 and 1e-4
    in float32, at any condition, since `qdwh` caps its weights.

    Raises:
        NumericalError: A is singular.
    """
    if A.shape[0] < A.shape[1]:
        V, s, Ut = svd_by_polar(A.T)
        return Ut.T, s, V.T
    size = float(A.norm())
    if not size > 0:
        raise NumericalError("the polar factor of a zero matrix is not unique")
    # A → polar factor U_p → H = U_pᵀ A, symmetric up to rounding → its eigenvectors V, s ascending
    U = qdwh(A / size, 0.0)
    s, V = torch.linalg.eigh(symmetric(U.T @ A))
    return U @ V.flip(1), s.flip(0).clamp_min(0), V.flip(1).T
