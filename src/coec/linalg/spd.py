"""Symmetric positive semidefinite matrices: powers, inverses and solves."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from coec.events import record
from coec.linalg.decompose import eigh, rounding_level

NEGATIVE = 1e-6
"""Eigenvalues this far below 0, relative to the largest, are rounding; beyond it G is indefinite.

Statistics sum float32 products.
"""


def semidefinite(G: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """G itself, or the nearest positive semidefinite matrix where G is indefinite, and an event.

    No error is bounded below under an indefinite matrix, which no true Gram is.
    """
    if _is_semidefinite(G):
        return G
    mu, E = eigh(G)
    if not _is_indefinite(mu):
        return G
    return (E * mu.clamp_min(0)) @ E.T


def root(
    G: Float[Tensor, "d d"], alpha: float, unit: float = 1.0, precision: float = 0.0
) -> Float[Tensor, "d d"] | None:
    """A factor F of `(G/u)^α = F Fᵀ`, `F = E diag(max(μ/u, 0)^(α/2))`; None where it is G/u itself.

    The tempered Gram (METHODS §5.1), over the full spectrum.

    Negative eigenvalues are clamped at 0; beyond what float32 products explain, an event says that
    the Gram is indefinite. Eigenvalues that are noise are 0 too: a power below 1 would magnify it.

    Args:
        G: symmetric.
        alpha: the exponent, in (0, 1].
        unit: u, what G is measured in; no scaled copy of G is made.
        precision: of the entries of G, see `noise`.
    """
    if alpha == 1 and _is_semidefinite(G):
        return None
    mu, E = eigh(G)
    indefinite = _is_indefinite(mu)
    if alpha == 1 and not indefinite:
        return None
    # G → E, μ → μ without noise → F = E diag((μ/u)^(α/2))
    mu = torch.where(mu > noise(mu, E, G.diagonal(), precision), mu, 0.0)
    return E.mul_((mu / unit).pow(alpha / 2))


def _is_indefinite(mu: Float[Tensor, " n"]) -> bool:
    """Return whether ascending eigenvalues go below 0 by more than rounding; an event says so."""
    if not float(mu[0]) < -max(rounding_level(mu), NEGATIVE * float(mu[-1])):
        return False
    record(
        f"indefinite Gram: smallest eigenvalue {float(mu[0] / mu.abs().max()):.1e} of the "
        "largest, clamped at 0"
    )
    return True


def _is_semidefinite(G: Float[Tensor, "d d"]) -> bool:
    """Return whether Cholesky proves, cheaper than eigenvalues, that none is clearly negative."""
    # Cholesky exists if no eigenvalue is below −NEGATIVE · max diag G ≥ −NEGATIVE · λ_max.
    return _cholesky(G, NEGATIVE * float(G.diagonal().max())) is not None


def _cholesky(A: Float[Tensor, "n n"], shift: float) -> Float[Tensor, "n n"] | None:
    """Return the Cholesky factor of `A + λ I`; None where that is not positive definite."""
    shifted = A.clone()
    shifted.diagonal().add_(shift)
    L, info = torch.linalg.cholesky_ex(shifted)
    return L if int(info) == 0 else None


def noise(
    mu: Float[Tensor, " n"],
    E: Float[Tensor, "n n"],
    diagonal: Float[Tensor, " n"],
    precision: float,
) -> Float[Tensor, " n"]:
    """The size below which each eigenvalue of a Gram says nothing.

    Where entry (i, j) is off by up to `precision · √(G_ii G_jj)`, independently, an eigenvalue is
    off by about `precision · √n · Σ_j E_ji² G_jj`: a share of the energy of the channels in its
    eigenvector, not of the largest eigenvalue, relative to which every ordinary channel of a model
    with a few huge ones would be noise. Never below the rounding of the dtype.

    Args:
        mu: eigenvalues.
        E: eigenvectors, columns.
        diagonal: of the Gram.
        precision: of its entries, beyond the rounding of their dtype.
    """
    level = torch.full_like(mu, rounding_level(mu))
    if precision > 0:
        # Σ_j E_ji² G_jj: the energy of the channels in eigenvector i, each by its part in it.
        scale = E.square().T @ diagonal.clamp_min(0)
        level = level.maximum(scale.mul_(precision * math.sqrt(len(mu))))
    return level


def channel_scale(G: Float[Tensor, "d d"]) -> Float[Tensor, " d"]:
    """Root of every channel's energy in float64, a unit in which that is 1; 1 if it has none."""
    energy = G.diagonal().double()
    return torch.where(energy > 0, energy.sqrt(), 1.0)


def regularized_inverse(
    G: Float[Tensor, "d d"],
    ridge: float,
    damping: float = 0.0,
    scale: Float[Tensor, " d"] | None = None,
) -> tuple[Float[Tensor, "d d"], float]:
    """`((G + δ diag G)/u + λ I)⁻¹` and `λ = ridge · mean(diag G/u)`, in float64.

    The unit u, a power of two about the largest channel energy, keeps every number moderate.
    Eigenvalues of the inverse lie between `1/((1 + δ) d λ/ridge + λ)` and `1/λ`, since none of G
    exceeds its trace. Their ratio may be d/ridge, 1.4e7 at d = 14336 and ridge = 1e-3: float32, of
    seven digits, would return noise, and is not used whatever the dtype of G. Negative eigenvalues
    of G are clamped at 0 where they are large enough to break that bound; an event says so unless
    rounding explains them. λ is 1 where G = 0.

    Three d×d matrices at the peak, G included; four where eigenvalues are clamped.

    Args:
        G: symmetric, of any floating-point dtype.
        ridge: relative to the mean diagonal, above 0.
        damping: δ, by which correlations of channels shrink: to `1/(1 + δ)` of what G has.
        scale: units of the channels, in which G is measured first: `G_ij / (s_i s_j)`.
    """
    shifted, shift = _shifted(G, ridge, damping, scale)
    L, info = torch.linalg.cholesky_ex(shifted)
    del shifted
    if int(info) == 0:
        # Where G is positive semidefinite, no entry of (G + λI)⁻¹ exceeds 1/λ: above 2/λ, G has
        # negative eigenvalues that λ hid from Cholesky.
        inverse = torch.cholesky_inverse(L)
        if float(inverse.diagonal().max()) <= 2 / shift:
            # Symmetric, and column-major as LAPACK leaves it.
            return inverse if inverse.is_contiguous() else inverse.T, shift
        del inverse
    del L
    # Built again, so that only G, L and the inverse are in memory until here.
    mu, E = eigh(_shifted(G, ridge, damping, scale)[0])
    _is_indefinite(mu - shift)
    # E diag(max(μ, 0) + λ)^(−½), whose product with its transpose is the inverse
    E *= (mu - shift).clamp_min_(0).add_(shift).rsqrt_()
    return E @ E.T, shift


def _shifted(
    G: Float[Tensor, "d d"], ridge: float, damping: float, scale: Float[Tensor, " d"] | None
) -> tuple[Float[Tensor, "d d"], float]:
    """`(G + δ diag G)/u + λ I` and λ, of `regularized_inverse`."""
    shifted = G.to(torch.float64, copy=True)
    if scale is not None:
        shifted /= scale
        shifted /= scale[:, None]
    shifted /= power_of_two(shifted.diagonal())
    shift = ridge * float(shifted.diagonal().mean())
    if not shift > 0:
        shift = 1.0
    shifted.diagonal().mul_(1 + damping).add_(shift)
    return shifted, shift


def solve_right(
    B: Float[Tensor, "m k"], A: Float[Tensor, "k k"], ridge: float, precision: float = 0.0
) -> Float[Tensor, "m k"]:
    """`B (A + λ I)⁻¹` with `λ = ridge · mean(diag A)`.

    With `ridge = 0`, or where Cholesky finds A + λ I not positive definite, the answer is the
    minimum-norm one, `B (A + λ I)⁺`: directions that are noise are left out.

    Args:
        ridge: relative to the mean diagonal, at least 0.
        precision: of the entries of A, see `noise`.
    """
    # λ > 0: B (A + λI)⁻¹ by Cholesky
    shift = ridge * float(A.diagonal().mean())
    if shift > 0:
        if (L := _cholesky(A, shift)) is not None:
            return torch.cholesky_solve(B.T, L).T
        record("the regularised Gram is not positive definite: solved through its eigenvectors")
    # Otherwise A + λI → Q, μ → pseudo-inverse over the directions that are not noise
    mu, Q = eigh(A)
    mu = mu + max(shift, 0.0)
    inverse = torch.where(mu > noise(mu, Q, A.diagonal(), precision), 1 / mu, 0.0)
    return (B @ Q * inverse) @ Q.T


def power_of_two(values: Float[Tensor, "..."]) -> float:
    """A power of two about the largest magnitude, so that dividing by it is exact; 1 for zeros.

    The largest magnitude, divided by it, lies in [1, 2).
    """
    # frexp gives a mantissa in [½, 1), so that the exponent is one above that of [1, 2).
    low, high = values.aminmax()
    largest = max(-float(low), float(high))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > 0 else 1.0
