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
    def _pair_products(self) -> Float[Tensor, "k q"]:
        """The products of every two columns of the writer."""
        return _products(self.writer)

    @property
    def _stiffness(self) -> float:
        """The c of `λ_a 𝒜(D + X) ≈ λ_a 𝒜(D) + … + c ‖XᵀD + DᵀX‖_F²`."""
        return self.weight / len(self.rows) ** 2


def _products(D: Float[Tensor, "n r"]) -> Float[Tensor, "n q"]:
    """The products of every two columns, in the order of `_SvecTables`."""
    tables = _svec_tables(D.shape[1], D.dtype, D.device)
    return D.index_select(1, tables.first).mul_(D.index_select(1, tables.second))


def _absorbed(
    D: Float[Tensor, "n r"], blocks: Float[Tensor, "n q"], stiffness: float, dtype: torch.dtype
) -> Callable[[Float[Tensor, "n r"]], Float[Tensor, "n r"]]:
    """`X → Jᵀ (I/c + J S Jᵀ)⁻¹ J X` with `J X = svec(XᵀD + DᵀX)`, S block diagonal.

    The core of Woodbury's formula `(S⁻¹ + c JᵀJ)⁻¹ = S − S Jᵀ (I/c + J S Jᵀ)⁻¹ J S`. `svec` stacks
    the upper triangle, entries off the diagonal times √2, so that it keeps the Frobenius norm.

    Args:
        blocks: the symmetric r×r blocks of S, one for each row of D, their upper triangles flat.
        stiffness: c.
        dtype: of X.
    """
    r = D.shape[1]
    tables = _svec_tables(r, D.dtype, D.device)
    # T[pu, qv] = Σ_i D_ip D_iu S_i[q, v]; an entry of J S Jᵀ gathers four of its entries.
    T = _products(D).T @ blocks
    T = (T + T.T).flatten()
    # (J S Jᵀ)[pq, uv] = T[pu, qv] + T[qv, pu] + T[pv, qu] + T[qu, pv], scaled as svec scales
    core = T.index_select(0, tables.straight).add_(T.index_select(0, tables.crossed))
    core = core.reshape(tables.norm.shape).mul_(tables.norm)
    core.diagonal().add_(1 / stiffness)
    # I/c + J S Jᵀ, q×q → its inverse; positive definite but for rounding
    L, info = torch.linalg.cholesky_ex(core)
    if int(info) != 0:
        record("rounding hid the alignment's curvature from a step of the right solve")
        return torch.zeros_like
    inverse = torch.cholesky_inverse(L)
    # J and Jᵀ on all r² entries of XᵀD.
    inverse = (
        inverse.index_select(0, tables.place).index_select(1, tables.place).mul_(tables.full_norm)
    )
    D, inverse = D.to(dtype), inverse.to(dtype)
    return lambda X: D @ (inverse @ (X.T @ D).flatten()).reshape(r, r)


@dataclass(frozen=True, eq=False)
class _SvecTables:
    """Index tables for svec of symmetric r×r matrices; q = r (r + 1)/2 is its length.

    Attributes:
        first, second: row and column of every entry of the upper triangle, row by row.
        place: which entry of that triangle each of the r² entries equals.
        straight, crossed: for two entries (p, q) and (u, v) of it, where (pu, qv) and (pv, qu)
            lie in a flat q×q matrix over such entries.
        norm: the products of the factors that `svec` gives two entries.
        full_norm: the same for two of the r² entries, those on the diagonal counted twice.
    """

    first: Int[Tensor, " q"]
    second: Int[Tensor, " q"]
    place: Int[Tensor, " r2"]
    straight: Int[Tensor, " q2"]
    crossed: Int[Tensor, " q2"]
    norm: Float[Tensor, "q q"]
    full_norm: Float[Tensor, "r2 r2"]


@functools.cache
def _svec_tables(r: int, dtype: torch.dtype, device: torch.device) -> _SvecTables:
    # The upper triangle's entries, and where each of the r² entries stands among them.
    a, b = torch.triu_indices(r, r, device=device)
    place = torch.empty(r, r, dtype=torch.int64, device=device)
    place[a, b] = place[b, a] = torch.arange(len(a), device=device)

    def paired(x: Tensor, y: Tensor) -> Tensor:
        return place[x[:, None], y]

    # For entries (p, q), (u, v): the flat places of (pu, qv) and (pv, qu).
    straight = paired(a, a) * len(a) + paired(b, b)
    crossed = paired(a, b) * len(a) + paired(b, a)
    # svec's factors: √2 off the diagonal, 1 on it.
    unit = torch.full((r, r), math.sqrt(2), dtype=dtype, device=device)
    unit.fill_diagonal_(1.0)
    # XᵀD + DᵀX adds an entry to its mirror image: one on the diagonal counts twice.
    twice = unit + torch.eye(r, dtype=dtype, device=device)
    return _SvecTables(
        a, b, place.flatten(), straight.flatten(), crossed.flatten(),
        torch.outer(unit[a, b], unit[a, b]), torch.outer(twice.flatten(), twice.flatten()),
    )  # fmt: skip
