"""Rotation of one weight's frames by pruning and compensation (docs/lab/ANALYSIS.md)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.linalg.alignment import Alignment
from coec.linalg.decompose import rounding_level, svd
from coec.types import KeptSet


@dataclass(frozen=True)
class Angles:
    """Principal angles between two subspaces, in degrees."""

    mean: float
    least: float
    greatest: float


@dataclass(frozen=True)
class Penalties:
    """The alignment penalty `𝒜 = ‖U_vᵀ (V_r V_rᵀ − Π_anchor) U_v‖_F² / r²` (METHODS §5.6).

    The s²-weighted variant is `‖U_vᵀ (V_r D V_rᵀ − V₀ D₀ V₀ᵀ) U_v‖_F²` with
    `D = diag(s_i² / Σ_{j≤r} s_j²)` of the weight and D₀ of the dense one; the same as `𝒜` where all
    s are equal.
    """

    pruned: float
    compensated: float
    weighted_pruned: float
    weighted_compensated: float


@dataclass(frozen=True)
class Frames:
    """Changes of one weight's leading singular frames by pruning and compensation.

    Attributes:
        r: size of the frames: as requested, or the smallest rank of the three weights if less.
        discrepancy: `‖Q_u − Q_v‖_F / ‖Q_u‖_F`, `Q_u = U_Pᵀ U_C`, `Q_v = V_Pᵀ V_C`; None where
            `Q_u` is 0.
        scale_change: median of `|log(s_C / s_P)|` over all modes above rounding.
        gap_dense, gap_pruned, gap_compensated: `σ_r / σ_{r+1}`; None where the rank is r.
        penalty: None without a value projection.
    """

    r: int
    original_pruned: Angles
    original_compensated: Angles
    pruned_compensated: Angles
    discrepancy: float | None
    scale_change: float
    gap_dense: float | None
    gap_pruned: float | None
    gap_compensated: float | None
    penalty: Penalties | None = None


@dataclass(frozen=True, eq=False)
class _Modes:
    """The singular triplets above rounding, largest first: `W = U diag(s) Vᵀ`."""

    U: Float[Tensor, "m b"]
    s: Float[Tensor, " b"]
    V: Float[Tensor, "k b"]

    @classmethod
    def of(cls, W: Float[Tensor, "m k"]) -> "_Modes":
        U, s, Vt = svd(W)
        rank = int((s > rounding_level(s)).sum())
        return cls(U[:, :rank], s[:rank], Vt[:rank].T)

    def top(self, r: int) -> "_Modes":
        return _Modes(self.U[:, :r], self.s[:r], self.V[:, :r])

    def gap(self, r: int) -> float | None:
        return float(self.s[r - 1] / self.s[r]) if r < len(self.s) else None


def compare_frames(
    W0: Float[Tensor, "m d"],
    kept: KeptSet,
    W_tilde: Float[Tensor, "m k"],
    r: int,
    *,
    value_weight: Float[Tensor, "rows h"] | None = None,
) -> Frames:
    """Compare the frames of a dense weight (O), of its slice (P) and of the compensated weight (C).

    O is `orth(V_full[K, :r])`, V_full the right singular vectors of W₀; P and C are the leading r
    right singular vectors of `W₀[:, K]` and of W̃. Paper, Geometric Measurements.

    The signs of singular vectors, and any rotation within equal singular values, act on u and v
    alike and leave every number here as it is.

    Args:
        W0: the dense consumer; its dtype is the working precision.
        kept: the columns that stay.
        r: size of the frames, at least 1.
        value_weight: the pruned value projection as the consumer sees it, for the penalties.

    Raises:
        NumericalError: a weight is not finite, or has no frame.
    """
    # W₀, W₀[:, K], W̃ → their modes → frames O, P, C of r directions each
    dense, pruned, compensated = (_Modes.of(W) for W in (W0, W0[:, kept.indices], W_tilde))
    r = min(r, len(dense.s), len(pruned.s), len(compensated.s))
    P, C = pruned.top(r), compensated.top(r)
    basis, V0 = _restricted(dense.V[kept.indices, :r])
    if basis.shape[1] == 0:
        raise NumericalError(
            "the weight, its slice or the compensated weight is 0, or the dense weight's leading "
            "directions vanish on the kept columns: there are no frames to compare"
        )
    # |log(s_C / s_P)|, mode by mode, and Q_u = U_Pᵀ U_C, Q_v = V_Pᵀ V_C
    modes = min(len(pruned.s), len(compensated.s))
    change = (compensated.s[:modes] / pruned.s[:modes]).log().abs().median()
    Q_u, Q_v = P.U.T @ C.U, P.V.T @ C.V
    size = float(Q_u.norm())
    return Frames(
        r=r,
        original_pruned=_angles(basis, P.V),
        original_compensated=_angles(basis, C.V),
        pruned_compensated=_angles(P.V, C.V),
        discrepancy=float((Q_u - Q_v).norm()) / size if size > 0 else None,
        scale_change=float(change),
        gap_dense=dense.gap(r),
        gap_pruned=pruned.gap(r),
        gap_compensated=compensated.gap(r),
        penalty=None if value_weight is None else _penalties(value_weight, V0, dense.top(r), P, C),
    )


def _restricted(V_K: Float[Tensor, "k r"]) -> tuple[Float[Tensor, "k q"], Float[Tensor, "k r"]]:
    """Compute an orthonormal basis of the columns, and the nearest (partial) isometry to them.

    The columns of the isometry stay paired with their modes.
    """
    U, s, Zt = svd(V_K)
    # Rows of orthonormal columns: singular values vanish relative to 1, not to the largest one.
    sound = s > len(V_K) * torch.finfo(s.dtype).eps
    basis = U[:, sound]
    return basis, basis @ Zt[sound]


def _angles(A: Float[Tensor, "k p"], B: Float[Tensor, "k q"]) -> Angles:
    """Compute the principal angles between the spans of two orthonormal bases.

    Cosines are the singular values of `AᵀB`, sines those of `B − A AᵀB` (Björck and Golub 1973);
    the arc tangent of both is accurate for small and for right angles.
    """
    # The wider basis first: there are as many angles as the narrower one has directions.
    if A.shape[1] < B.shape[1]:
        A, B = B, A
    inner = A.T @ B
    # Both descending: the largest cosine belongs to the smallest sine.
    cosines, sines = svd(inner)[1], svd(B - A @ inner)[1].flip(0)
    angles = torch.rad2deg(torch.atan2(sines, cosines))
    return Angles(float(angles.mean()), float(angles.min()), float(angles.max()))


def _penalties(
    value_weight: Float[Tensor, "k h"],
    V0: Float[Tensor, "k r"],
    dense: _Modes,
    P: _Modes,
    C: _Modes,
) -> Penalties:
    r = len(dense.s)
    U_v = _Modes.of(value_weight).U[:, :r]
    # Everything seen through U_v: the anchor U_vᵀ V₀ V₀ᵀ U_v, and its s²-weighted form
    VtU = V0.T @ U_v
    rows = torch.arange(r, device=U_v.device)
    alignment = Alignment(U_v, VtU.T @ VtU, rows, weight=1.0)
    anchor = _weighted(dense.s, VtU)

    def weighted(modes: _Modes) -> float:
        return float((_weighted(modes.s, modes.V.T @ U_v) - anchor).square().sum())

    return Penalties(alignment.penalty(P.V.T), alignment.penalty(C.V.T), weighted(P), weighted(C))


def _weighted(s: Float[Tensor, " r"], VtU: Float[Tensor, "r q"]) -> Float[Tensor, "q q"]:
    """Compute `U_vᵀ V D Vᵀ U_v` from `Vᵀ U_v`, `D = diag(s_i² / Σ s_j²)`."""
    scaled = (s / s.norm())[:, None] * VtU
    return scaled.T @ scaled
