"""Symmetric positive semidefinite matrices: powers and solves."""

import torch
from jaxtyping import Float
from torch import Tensor

from coec.events import record
from coec.linalg.decompose import eigh

PRODUCT_ROUNDING = 1e-6
"""Statistics sum float32 products: eigenvalues this far below 0, relative to the largest, are 0."""


def power(G: Float[Tensor, "d d"], alpha: float) -> Float[Tensor, "d d"]:
    """Gram tempering: `G^α = E diag(max(μ, 0)^α) Eᵀ` over the full spectrum (METHODS §5.1).

    `α = 1` returns G itself, unless it is indefinite: no error is bounded below under such a
    matrix. See `root`.
    """
    factor = root(G, alpha)
    return G if factor is None else factor @ factor.T


def root(G: Float[Tensor, "d d"], alpha: float, unit: float = 1.0) -> Float[Tensor, "d d"] | None:
    """A factor F of `(G/u)^α = F Fᵀ`, `F = E diag(max(μ/u, 0)^(α/2))`; None where it is G/u itself.

    Negative eigenvalues are clamped at 0; beyond what float32 products explain, an event says that
    the Gram is indefinite.

    Args:
        G: symmetric.
        alpha: the exponent, in (0, 1].
        unit: u, what G is measured in; no scaled copy of G is made.
    """
    if alpha == 1 and _is_semidefinite(G):
        return None
    mu, E = eigh(G)
    floor = rounding_level(mu)
    indefinite = float(mu[0]) < -max(floor, PRODUCT_ROUNDING * float(mu[-1]))
    if alpha == 1 and not indefinite:
        return None
    if indefinite:
        record(
            f"indefinite Gram: smallest eigenvalue {float(mu[0] / mu.abs().max()):.1e} of the "
            "largest, clamped at 0"
        )
    # An eigenvalue at rounding level is noise, and a power below 1 would magnify it.
    mu = torch.where(mu > floor, mu, 0.0)
    return E.mul_((mu / unit).pow(alpha / 2))


def _is_semidefinite(G: Float[Tensor, "d d"]) -> bool:
    """Whether Cholesky proves, far cheaper than eigenvalues, that none is clearly negative."""
    shift = PRODUCT_ROUNDING * float(G.diagonal().max())
    shifted = G + shift * torch.eye(len(G), dtype=G.dtype, device=G.device)
    return int(torch.linalg.cholesky_ex(shifted)[1]) == 0


def rounding_level(values: Float[Tensor, " n"]) -> float:
    """The size below which entries of a spectrum cannot be told from rounding: n · eps · max."""
    if len(values) == 0:
        return 0.0
    largest = float(values.abs().max())
    return len(values) * torch.finfo(values.dtype).eps * largest


def solve_right(
    B: Float[Tensor, "m k"], A: Float[Tensor, "k k"], ridge: float
) -> Float[Tensor, "m k"]:
    """`B (A + λ I)⁻¹` with `λ = ridge · mean(diag A)`.

    With `ridge = 0`, or where Cholesky finds A + λ I not positive definite, the answer is the
    minimum-norm one, `B (A + λ I)⁺`: directions at rounding level are left out.

    Args:
        ridge: relative to the mean diagonal, at least 0.
    """
    shift = ridge * float(A.diagonal().mean())
    if shift > 0:
        shifted = A + shift * torch.eye(len(A), dtype=A.dtype, device=A.device)
        L, info = torch.linalg.cholesky_ex(shifted)
        if int(info) == 0:
            return torch.cholesky_solve(B.T, L).T
        record("the regularised Gram is not positive definite: solved through its eigenvectors")
    mu, Q = eigh(A)
    mu = mu + max(shift, 0.0)
    inverse = torch.where(mu > rounding_level(mu), 1 / mu, 0.0)
    return (B @ Q * inverse) @ Q.T
