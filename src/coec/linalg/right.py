"""The right rotation's problem on the Stiefel manifold, in the eigenbasis of Gxx (METHODS §5.4).

With `Gxx = E diag(μ) Eᵀ`, the change of variable `R → R E`, `C → C E` makes every product with
Gxx elementwise. Both solvers work there and are equivariant under it, so nothing else changes.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


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

    def penalty(self, R: Float[Tensor, "b k"]) -> float:
        """`𝒜(R)`, without the weight."""
        D = R[self.rows] @ self.writer
        return float((D.T @ D - self.target).square().sum()) / len(self.rows) ** 2

    def gradient_rows(self, R: Float[Tensor, "b k"]) -> Float[Tensor, "r_p k"]:
        """`∂𝒜/∂R_r = 4 D M U_vᵀ / r_p²`, `D = R_r U_v`, `M = DᵀD − U_vᵀ Π_anchor U_v`."""
        D = R[self.rows] @ self.writer
        M = D.T @ D - self.target
        return (4 / len(self.rows) ** 2) * (D @ M) @ self.writer.T


@dataclass(frozen=True, eq=False)
class RightProblem:
    """`min_R (t² ⟨diag(s²) R Gxx, R⟩ − 2t ⟨C, R⟩ + yy) / yy + λ_a 𝒜(R)  s.t.  R Rᵀ = I`.

    The global scale t is optimal for every R, so by the envelope theorem the gradient in R is the
    partial gradient at that t.

    Attributes:
        s: singular values.
        mu: eigenvalues of Gxx.
        cross: `C = diag(s) Uᵀ Gyx` in the eigenbasis.
        yy: `‖Y‖_F²`, positive.
        alignment: the penalty, or None.
    """

    s: Float[Tensor, " b"]
    mu: Float[Tensor, " k"]
    cross: Float[Tensor, "b k"]
    yy: float
    alignment: Alignment | None = None

    def scale(self, R: Float[Tensor, "b k"]) -> float:
        """`t = ⟨C, R⟩ / ⟨diag(s²) R Gxx, R⟩`; 1 unless both are positive."""
        linear, quadratic = self._inner_products(R)
        return _ratio(linear, quadratic)

    def objective(self, R: Float[Tensor, "b k"]) -> float:
        """The objective at the optimal scale."""
        linear, quadratic = self._inner_products(R)
        t = _ratio(linear, quadratic)
        value = (t * t * quadratic - 2 * t * linear + self.yy) / self.yy
        if self.alignment is not None:
            value += self.alignment.weight * self.alignment.penalty(R)
        return value

    def gradient(self, R: Float[Tensor, "b k"], t: float) -> Float[Tensor, "b k"]:
        """The Euclidean gradient in R at scale t."""
        weight = (2 * t * t / self.yy) * self.s.square()
        grad = weight[:, None] * R * self.mu - (2 * t / self.yy) * self.cross
        if self.alignment is not None:
            rows = self.alignment.rows
            grad[rows] += self.alignment.weight * self.alignment.gradient_rows(R)
        return grad

    def _inner_products(self, R: Float[Tensor, "b k"]) -> tuple[float, float]:
        energy = (R.square() * self.mu).sum(dim=1)
        return float((self.cross * R).sum()), float((self.s.square() * energy).sum())


def _ratio(linear: float, quadratic: float) -> float:
    return linear / quadratic if linear > 0 and quadratic > 0 else 1.0
