"""The anchored alignment penalty, and how stiff it is (METHODS §§5.4, 5.6)."""

import functools
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
        rows: the rows of R that are `R_r` (of the largest singular values).
        weight: `λ_a`.
    """

    writer: Float[Tensor, "k r"]
    target: Float[Tensor, "r r"]
    rows: Int[Tensor, " r_p"]
    weight: float

    @property
    def stiff(self) -> bool:
        """Return whether the preconditioner takes the penalty's curvature into account."""
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
        Woodbury's formula divides by it exactly. Its core, whose condition may be 1e6, is made in
        the dtype of the writer, whatever that of R and X.
        """
        # S = diag(inverse). Seen through the writer, row i is S_i = U_vᵀ diag(inverse_i) U_v.
        rows, writer, aligned = self.rows, self.writer.to(R), inverse[self.rows]
        D = R[rows].to(self.writer) @ self.writer
        blocks = aligned.to(self.writer) @ self._pair_products
        # The penalty is c ‖J X‖² to second order, whose Hessian is 2c JᵀJ.
        absorbed = _absorbed(D, blocks, 2 * self._stiffness, R.dtype)

        def divide(X: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
            # X → S X, then S X − S Jᵀ (I/2c + J S Jᵀ)⁻¹ J S X in the aligned rows
            X.mul_(inverse)
            X[rows] -= aligned * (absorbed(X[rows] @ writer) @ writer.T)
            return X

        return divide

    def resisted(
        self, R: Float[Tensor, "b k"], softness: Float[Tensor, "b b"], turn: Float[Tensor, "b b"]
    ) -> Float[Tensor, "b b"]:
        """Return a turn of the modes, reduced by the resistance of the penalty.

        `turn` is a skew gradient times `softness`, the inverse of every plane's half curvature.
        Turns among the aligned rows leave `R_rᵀ R_r` unchanged; turns between them and the others
        move it, and are reduced as far as `λ_a 𝒜` is stiffer than the plane.
        """
        rows = self.rows
        # A plane of two aligned rows leaves 𝒜 as it is; one of an aligned row and another does not.
        D = R @ self.writer
        soft = softness[rows]
        soft[:, rows] = 0
        # S_i = Σ_j softness_ij D_j D_jᵀ. Both the softness and c refer to half curvatures.
        absorbed = _absorbed(D[rows], soft @ _products(D), self._stiffness, D.dtype)
        # turn → its reduction by the penalty; a turn is skew, so the columns follow the rows
        between = turn[rows]
        between[:, rows] = 0
        back = soft.mul_(absorbed(between @ D) @ D.T)
        resisted = turn.clone()
        resisted[rows] -= back
        resisted[:, rows] += back.T
        return resisted

    @functools.cached_property
    def _pair_products(self) -> Float[Tensor, "k r2"]:
        """The products of every two columns of the writer."""
        return _products(self.writer)

    @property
    def _stiffness(self) -> float:
        """The c of `λ_a 𝒜(D + X) ≈ λ_a 𝒜(D) + … + c ‖XᵀD + DᵀX‖_F²`."""
        return self.weight / len(self.rows) ** 2


def _products(D: Float[Tensor, "n r"]) -> Float[Tensor, "n r2"]:
    """The products of every two columns: `D_i D_iᵀ` of every row, flat."""
    return (D[:, :, None] * D[:, None, :]).flatten(1)


def _absorbed(
    D: Float[Tensor, "n r"], blocks: Float[Tensor, "n r2"], stiffness: float, dtype: torch.dtype
) -> Callable[[Float[Tensor, "n r"]], Float[Tensor, "n r"]]:
    """`X → Jᵀ (I/c + J S Jᵀ)⁻¹ J X` with `J X = XᵀD + DᵀX`, S block diagonal.

    The core of Woodbury's formula `(S⁻¹ + c JᵀJ)⁻¹ = S − S Jᵀ (I/c + J S Jᵀ)⁻¹ J S`.

    Args:
        blocks: the symmetric r×r blocks of S, one for each row of D, flat.
        stiffness: c.
        dtype: of X.
    """
    r = D.shape[1]
    # T[p, u, q, v] = Σ_i S_i[p, u] D_iq D_iv + Σ_i S_i[q, v] D_ip D_iu
    T = (blocks.T @ _products(D)).reshape(r, r, r, r)
    T = T + T.permute(2, 3, 0, 1)
    # (J S Jᵀ)[pq, uv] = T[p, u, q, v] + T[p, v, q, u]
    core = (T.permute(0, 2, 1, 3) + T.permute(0, 2, 3, 1)).reshape(r * r, r * r)
    core.diagonal().add_(1 / stiffness)
    # I/c + J S Jᵀ, r²×r² → its inverse; positive definite but for rounding
    L, info = torch.linalg.cholesky_ex(core)
    if int(info) != 0:
        record("rounding hid the alignment's curvature from a step of the right solve")
        return torch.zeros_like
    inverse, D = torch.cholesky_inverse(L).to(dtype), D.to(dtype)

    def absorbed(X: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
        seen = X.T @ D
        # Jᵀ M = 2 D M of a symmetric M
        return 2 * D @ (inverse @ (seen + seen.T).flatten()).reshape(r, r)

    return absorbed
