"""The orthogonal polar factor: the orthogonal Procrustes solution."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.events import record
from coec.linalg.decompose import by_products, svd
from coec.linalg.qdwh import qdwh
from coec.linalg.spd import rounding_level


def polar(
    A: Float[Tensor, "m b"], nearest: Float[Tensor, "m b"] | None = None
) -> Float[Tensor, "m b"]:
    """`argmax ⟨U, A⟩ s.t. UᵀU = I`, which is `P Qᵀ` of the thin SVD `A = P Σ Qᵀ` (m ≥ b).

    Where A is rank-deficient the maximiser is not unique: among all of them the one closest to
    `nearest` is returned, so that directions without information do not turn.

    `qdwh` is tried first where an SVD costs dozens of products.

    Args:
        nearest: orthonormal columns; None leaves the choice to the SVD.
    """
    if nearest is not None and by_products(A):
        U = _near_polar(A, nearest)
        if U is not None:
            return U
    # A → thin SVD P Σ Qᵀ → P Qᵀ, unique where no singular value is rounding
    P, sigma, Qt = svd(A)
    informative = sigma > rounding_level(sigma)
    rank = int(informative.sum())
    if nearest is None or rank == len(sigma):
        return P @ Qt
    record("polar factor of a singular matrix: directions without information kept as they were")
    # Split off the null space: there the same problem is solved for `nearest` in place of A.
    P, Q = P[:, :rank], Qt[:rank].T
    null = Qt[rank:].T
    # In a basis of what P leaves, every factor is orthogonal to P, even where `nearest` lies in P.
    remainder = torch.linalg.qr(P, mode="complete").Q[:, rank:]
    return P @ Q.T + remainder @ polar(remainder.T @ nearest @ null) @ null.T


def _near_polar(
    A: Float[Tensor, "m b"], nearest: Float[Tensor, "m b"]
) -> Float[Tensor, "m b"] | None:
    """The polar factor of `A/‖A‖_F + ε · nearest` by products, or None where that is no use.

    ε, a hundredth of the root of the rounding unit, keeps directions without information where they
    were, and bounds the condition. The result is never worse for A than `nearest`:
    `⟨U, A⟩ + ε ‖A‖_F ⟨U, nearest⟩` is largest at U and `⟨U, nearest⟩` at `nearest`.
    """
    size = float(A.norm())
    if not size > 0:
        return nearest
    epsilon = 0.01 * math.sqrt(torch.finfo(A.dtype).eps)
    try:
        return qdwh(torch.add(A / size, nearest, alpha=epsilon), epsilon)
    except NumericalError as error:
        record(f"{error}: decomposed instead")
        return None


def newton_schulz_polar(A: Float[Tensor, "b k"], iterations: int = 30) -> Float[Tensor, "b k"]:
    """The polar factor of a full-rank wide matrix by `X ← 1.5 X − 0.5 X Xᵀ X`: products only.

    Converges quadratically for singular values in (0, √3), which a retraction's argument meets:
    a tangent step of norm at most 1 from orthonormal rows leaves them in [1, √2].

    Raises:
        NumericalError: no convergence in `iterations` steps (A is rank-deficient or far from
            orthonormal).
    """
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    tolerance = 10 * len(A) * torch.finfo(A.dtype).eps
    X = A
    for _ in range(iterations + 1):
        # X ← X + ½ (I − X Xᵀ) X = 1.5 X − 0.5 X Xᵀ X
        gap = eye - X @ X.T
        if float(gap.norm()) <= tolerance:
            return X
        X = X + 0.5 * (gap @ X)
    raise NumericalError("Newton-Schulz polar iteration did not converge")
