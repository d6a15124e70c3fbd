"""The Stiefel manifold St(b, k) of b×k matrices with orthonormal rows: tangents and retractions."""

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.linalg.products import lower_gram


def tangent(R: Float[Tensor, "b k"], Z: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """The orthogonal projection of Z on the tangent space at R: `Z − sym(Z Rᵀ) R`."""
    return project(R, Z.clone())


def symmetric(S: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The symmetric part, `(S + Sᵀ)/2`."""
    return 0.5 * (S + S.T)


def project(R: Float[Tensor, "b k"], Z: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """`tangent` in place."""
    return Z.addmm_(symmetric(Z @ R.T), R, alpha=-1)


def retract_cholesky(
    R: Float[Tensor, "b k"], xi: Float[Tensor, "b k"], step: float = 1.0
) -> Float[Tensor, "b k"]:
    """The LQ retraction `L⁻¹ (R + step ξ)`, `L Lᵀ` its Gram matrix, by Cholesky.

    For a tangent ξ the Gram matrix is `I + step² ξ ξᵀ`: rows are orthonormal to rounding times
    `1 + ‖step ξ‖²`.

    Raises:
        NumericalError: the step is not finite, or so long that digits would be lost.
    """
    # Rows lose digits by 1 + ‖step ξ‖² (above): this bound leaves three quarters of them.
    longest = torch.finfo(R.dtype).eps ** -0.25
    if step * step * float(xi.square().sum()) <= longest * len(R):
        # R + step ξ → L of its Gram matrix → L⁻¹ (R + step ξ), whose rows are orthonormal
        A = torch.add(R, xi, alpha=step)
        L, info = torch.linalg.cholesky_ex(lower_gram(A))
        if int(info) == 0:
            return torch.linalg.solve_triangular(L, A, upper=False)
    raise NumericalError("retraction of a step that is not finite, or far too long")


def retract_cayley(R: Float[Tensor, "k k"], step: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """The Cayley retraction of a square frame: `(I + W/2)⁻¹ (I − W/2) R`, `W = −skew(ξ Rᵀ)`.

    The inverse is Newton-Schulz iterated from I, which converges quadratically while ‖W‖ < 2
    (the source's retraction for attention output projections).

    Raises:
        NumericalError: the iteration does not converge (a step of norm 2 or more).
    """
    # W/2 = −skew(ξ Rᵀ)/2; I + W/2 is never singular, as W is skew.
    S = step @ R.T
    half = 0.25 * (S.T - S)
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    return newton_schulz_inverse(eye + half) @ (R - half @ R)


def newton_schulz_inverse(A: Float[Tensor, "n n"], iterations: int = 30) -> Float[Tensor, "n n"]:
    """`A⁻¹` by `X ← X (2 I − A X)` from `X = I`; converges when `‖I − A‖₂ < 1`.

    Raises:
        NumericalError: no convergence in `iterations` steps.
    """
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    tolerance = 10 * len(A) * torch.finfo(A.dtype).eps
    X = eye
    for _ in range(iterations + 1):
        # X ← X (2I − A X) = X + X (I − A X)
        gap = eye - A @ X
        if float(gap.norm()) <= tolerance:
            return X
        X = X + X @ gap
    raise NumericalError("Newton-Schulz inverse did not converge")
