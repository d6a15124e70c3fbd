"""The anchored alignment penalty, and how stiff it is (METHODS §§5.4, 5.6)."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.events import record

STIFF = 32
"""Writers wider than this are left out of the preconditioner: its core would cost r⁶ a step."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """The anchored penalty `𝒜(R) = ‖U_vᵀ (R_rᵀ R_r − Π_anchor) U_v‖_F² / r_p²` (METHODS §5.6).

    Attributes:
        writer: `U_v`, orthonormal columns, in the same basis as R.
        target: `U_vᵀ Π_anchor U_v`.
        rows: which rows of R are `R_r` (those of the largest singular values).
        weight: `λ_a`.
    """

    writer: Float[Tensor, "k r"]
    target: Float[Tensor, "r r"]
    rows: Int[Tensor, " r_p"]
    weight: float

    @property
    def stiff(self) -> bool:
        """Whether the preconditioner is to know the penalty's curvature."""
        return 0 < self.writer.shape[1] <= STIFF and self._stiffness > 0

    def penalty(self, R: Float[Tensor, "b k"]) -> float:
        """`𝒜(R)`, without the weight."""
        D = R[self.rows] @ self.writer
        return float((D.T @ D - self.target).square().sum()) / len(self.rows) ** 2

    def gradient_rows(self, R: Float[Tensor, "b k"]) -> Float[Tensor, "r_p k"]:
        """`∂𝒜/∂R_r = 4 D M U_vᵀ / r_p²`, `D = R_r U_v`, `M = DᵀD − U_vᵀ Π_anchor U_v`."""
        D = R[self.rows] @ self.writer
        M = D.T @ D - self.target
        return (4 / len(self.rows) ** 2) * (D @ M) @ self.writer.T

    def divided(
        self, R: Float[Tensor, "b k"], inverse: Float[Tensor, "b k"]
    ) -> Callable[[Float[Tensor, "b k"]], Float[Tensor, "b k"]]:
        """`X → (diag(1/inverse) + λ_a ∇²𝒜)⁻¹ X`, in place; `∇²𝒜` is the Gauss-Newton Hessian at R.

        It has rank r(r + 1)/2 at most and lives in the aligned rows, seen through the writer:
        Woodbury's formula divides by it exactly.
        """
        rows, writer, aligned = self.rows, self.writer, inverse[self.rows]
        seen = ((aligned[:, None, :] * writer.T) @ writer).flatten(1)
        absorbed = _absorbed(R[rows] @ writer, seen, 2 * self._stiffness)

        def divide(X: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
            X.mul_(inverse)
            X[rows] -= aligned * (absorbed(X[rows] @ writer) @ writer.T)
            return X

        return divide

    def resisted(
        self, R: Float[Tensor, "b k"], softness: Float[Tensor, "b b"], turn: Float[Tensor, "b b"]
    ) -> Float[Tensor, "b b"]:
        """What is left of a turn of the modes once the penalty resists it.

        `turn` is a skew gradient times `softness`, the inverse of every plane's half curvature.
        Turns among the aligned rows leave `R_rᵀ R_r` as it is; those between them and the others
        move it, and are taken back as far as `λ_a 𝒜` is stiffer than the plane.
        """
        rows = self.rows
        inside = torch.zeros(len(R), dtype=torch.bool, device=R.device)
        inside[rows] = True
        others = (~inside).nonzero().flatten()
        D = R @ self.writer
        soft, away = softness[rows][:, others], D[others]
        seen = soft @ (away[:, :, None] * away[:, None, :]).flatten(1)
        absorbed = _absorbed(D[rows], seen, self._stiffness)
        back = soft * (absorbed(turn[rows][:, others] @ away) @ away.T)
        left = turn.clone()
        left[rows[:, None], others] -= back
        left[others[:, None], rows] += back.T
        return left

    @property
    def _stiffness(self) -> float:
        """The c of `λ_a 𝒜(D + X) ≈ λ_a 𝒜(D) + … + c ‖XᵀD + DᵀX‖_F²`."""
        return self.weight / len(self.rows) ** 2


def _absorbed(
    D: Float[Tensor, "n r"], seen: Float[Tensor, "n r2"], stiffness: float
) -> Callable[[Float[Tensor, "n r"]], Float[Tensor, "n r"]]:
    """`X → Jᵀ (I/c + J S Jᵀ)⁻¹ J X` with `J X = svec(XᵀD + DᵀX)`, S block diagonal.

    The core of Woodbury's formula `(S⁻¹ + c JᵀJ)⁻¹ = S − S Jᵀ (I/c + J S Jᵀ)⁻¹ J S`. `svec` stacks
    the upper triangle, entries off the diagonal times √2, so that it keeps the Frobenius norm.

    Args:
        seen: the r×r blocks of S, one for each row of D, flat.
        stiffness: c.
    """
    r = D.shape[1]
    upper, pair, unit = _pairs(r, D.dtype, D.device)
    # T[p, q, u, v] = Σ_i D_ip D_iq S_i[u, v]; an entry of J S Jᵀ gathers four of its entries.
    T = ((D[:, :, None] * D[:, None, :]).flatten(1).T @ seen).reshape(r, r, r, r)
    core = T.permute(2, 0, 3, 1)
    core = core + core.transpose(2, 3)
    core = (core + core.transpose(0, 1)).reshape(r * r, r * r)[upper][:, upper]
    scale = unit[upper]
    core.mul_(torch.outer(scale, scale)).diagonal().add_(1 / stiffness)
    L, info = torch.linalg.cholesky_ex(core)
    if int(info) != 0:
        record("rounding hid the alignment's curvature from a step of the right solve")
        return torch.zeros_like
    inverse = torch.cholesky_inverse(L)[pair][:, pair]
    # J and Jᵀ on all r² entries of XᵀD: those on the diagonal count twice.
    both = unit * (1 + torch.eye(r, dtype=D.dtype, device=D.device).flatten())
    inverse.mul_(torch.outer(both, both))
    return lambda X: D @ (inverse @ (X.T @ D).flatten()).reshape(r, r)


@functools.cache
def _pairs(
    r: int, dtype: torch.dtype, device: torch.device
) -> tuple[Int[Tensor, " q"], Int[Tensor, " r2"], Float[Tensor, " r2"]]:
    """Of a symmetric r×r matrix, row by row: where its upper triangle lies, which entry of that
    triangle every entry equals, and the factor that `svec` gives it.
    """
    a, b = torch.triu_indices(r, r, device=device)
    place = torch.empty(r, r, dtype=torch.int64, device=device)
    place[a, b] = place[b, a] = torch.arange(len(a), device=device)
    unit = torch.full((r, r), math.sqrt(2), dtype=dtype, device=device)
    unit.fill_diagonal_(1.0)
    return a * r + b, place.flatten(), unit.flatten()
