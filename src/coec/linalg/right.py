"""The rotations' problems on the Stiefel manifold, in the eigenbasis of Gxx (METHODS §5.4).

With `Gxx = E diag(μ) Eᵀ`, the change of variable `R → R E`, `C → C E` makes every product with
Gxx elementwise. All solvers work there and are equivariant under it, so nothing else changes.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.linalg.alignment import Alignment
from coec.linalg.decompose import polar, symmetric
from coec.linalg.gcv import global_scale


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

    def at(self, R: Float[Tensor, "b k"]) -> "Point":
        """The objective at R, the left factor being held."""
        # ⟨C, R⟩ and e: of these two the objective is a function, whatever t.
        return Point(self, R, float((self.cross * R).sum()), energies(R, self.mu))

    def slack(self, point: "Point", S: Float[Tensor, "b b"]) -> None:
        """Return None, for no turns of the planes of modes: the left factor does not follow."""

    def scale(self, R: Float[Tensor, "b k"]) -> float:
        """`t = ⟨C, R⟩ / ⟨diag(s²) R Gxx, R⟩`; 1, and an event, unless both are positive."""
        return self.at(R).scale()

    def objective(self, R: Float[Tensor, "b k"]) -> float:
        """The objective at the optimal scale."""
        return self.at(R).value

    def gradient(self, R: Float[Tensor, "b k"], t: float) -> Float[Tensor, "b k"]:
        """The Euclidean gradient in R at scale t."""
        # 2t² diag(s²) R diag(μ)/yy − 2t C/yy + λ_a ∂𝒜/∂R_r
        grad = torch.outer((2 * t * t / self.yy) * self.s.square(), self.mu).mul_(R)
        grad.sub_(self.cross, alpha=2 * t / self.yy)
        if self.alignment is not None:
            rows = self.alignment.rows
            grad[rows] += self.alignment.weight * self.alignment.gradient_rows(R)
        return grad


@dataclass(frozen=True, eq=False)
class JointProblem:
    """The right problem with the left factor eliminated: U is the best one for every R.

    `min_R min_U` of the right problem's objective: `⟨C, R⟩` becomes the nuclear norm
    `‖Gyx Rᵀ diag(s)‖_*`, at `U = polar(Gyx Rᵀ diag(s))` (variable projection, METHODS §5.4).

    Attributes:
        s: singular values; any after the first b_U, of a completed frame, are 0.
        mu: eigenvalues of Gxx.
        Gyx: in the eigenbasis.
        yy: `‖Y‖_F²`, positive.
        U: a left factor: where the best one is not unique, the nearest to this is taken.
        alignment: the penalty, or None.
    """

    s: Float[Tensor, " b"]
    mu: Float[Tensor, " k"]
    Gyx: Float[Tensor, "m k"]
    yy: float
    U: Float[Tensor, "m b_U"]
    alignment: Alignment | None = None

    def at(self, R: Float[Tensor, "b k"]) -> "Point":
        """The objective at R, and the best left factor there."""
        # Modes that complete a frame have s = 0 and no column of U.
        modes = self.U.shape[1]
        # Gyx Rᵀ diag(s), m×b → U = polar(…), at which ⟨U, …⟩ is the nuclear norm
        response = (self.Gyx @ R[:modes].T).mul_(self.s[:modes])
        U = polar(response, nearest=self.U)
        return Point(self, R, float((U * response).sum()), energies(R, self.mu), U)

    def slack(self, point: "Point", S: Float[Tensor, "b b"]) -> Float[Tensor, "b b"]:
        """Return how far planes of modes turn against a gradient, because U follows R.

        The skew part of the gradient times `Rᵀ`, times the softness of every plane, less what
        alignment resists.

        Args:
            S: the gradient times `Rᵀ`; its symmetric part, which a tangent one lacks, is ignored.
        """
        softness = self._softness(point)
        # skew(g Rᵀ) holds one entry for every plane (i, j), and its negative at (j, i).
        turn = (0.5 * (S - S.T)).mul_(softness)
        if self.alignment is None or not self.alignment.stiff:
            return turn
        return self.alignment.resisted(point.R, softness, turn)

    def _softness(self, point: "Point") -> Float[Tensor, "b b"]:
        """Return the addition to every plane's inverse curvature, (i, j) of modes, as U follows R.

        For `R → exp(ω J) R`, J the generator of the plane (i, j), the curvature with U held is
        `F = (s_i² e_j + s_j² e_i) t²/yy`; with U following it is
        `J = (s_i² − s_j²)² e_i e_j / (s_i² e_i + s_j² e_j) · t²/yy`, nearly 0 where `s_i ≈ s_j`:
        turning both factors alike then leaves their product as it is. Returned is
        `1/(J + ε F + δ) − 1/(F + ε F + δ)`, ε = SLACK, δ = FLOOR of the mean of the Hessian's
        diagonal, without which planes of modes that hold nothing would be all noise. F and J are
        half the second derivatives: every plane has two entries.
        """
        # F, then J; planes of two modes without energy are 0/0, and 0.
        e, s2, t = point.energy.clamp_min(0), self.s.square(), point.t
        a = s2 * e
        unit = t * t / self.yy
        fixed = torch.outer(s2, e)
        fixed = (fixed + fixed.T).mul_(unit)
        joint = (s2[:, None] - s2).square_().mul_(e).mul_(e[:, None])
        joint.mul_(unit).div_(a[:, None] + a).nan_to_num_(nan=0.0)
        # 1/(J + ε F + δ) − 1/(F + ε F + δ), in the memory of J and F
        floor = FLOOR * 2 * unit * float(s2.mean()) * float(self.mu.clamp_min(0).mean())
        soft = joint.add_(fixed, alpha=SLACK).add_(floor).reciprocal_()
        return soft.sub_(fixed.mul_(1 + SLACK).add_(floor).reciprocal_())


@dataclass(frozen=True, eq=False)
class Point:
    """A point R, and the objective there.

    Attributes:
        problem: whose objective.
        R: orthonormal rows.
        linear: `⟨C, R⟩`.
        energy: `e_i = r_iᵀ Gxx r_i`.
        U: the left factor there, where it follows.
    """

    problem: "RightProblem | JointProblem"
    R: Float[Tensor, "b k"]
    linear: float
    energy: Float[Tensor, " b"]
    U: Float[Tensor, "m b_U"] | None = None

    @cached_property
    def value(self) -> float:
        """The objective at the optimal scale."""
        t, yy, alignment = self.t, self.problem.yy, self.problem.alignment
        value = (t * t * self.quadratic - 2 * t * self.linear + yy) / yy
        if alignment is not None:
            value += alignment.weight * alignment.penalty(self.R)
        return value

    @cached_property
    def quadratic(self) -> float:
        """`⟨diag(s²) R Gxx, R⟩`."""
        return float((self.problem.s.square() * self.energy).sum())

    @property
    def t(self) -> float:
        """The optimal scale; 1 unless both inner products are positive."""
        positive = self.linear > 0 and self.quadratic > 0
        return self.linear / self.quadratic if positive else 1.0

    def scale(self) -> float:
        """The optimal scale; an event where there is none."""
        return global_scale(self.linear, self.quadratic)

    def touching(self) -> RightProblem:
        """The right problem with the left factor held as it is here.

        It touches the objective from above, and is the problem itself where that is a right one.
        """
        problem = self.problem
        if isinstance(problem, RightProblem):
            return problem
        assert self.U is not None
        modes = problem.U.shape[1]
        # C = diag(s) Uᵀ Gyx at this point's U
        cross = torch.empty_like(self.R)
        torch.mm(self.U.T, problem.Gyx, out=cross[:modes])
        cross[:modes].mul_(problem.s[:modes, None])
        cross[modes:] = 0
        return RightProblem(problem.s, problem.mu, cross, problem.yy, problem.alignment)


Problem = RightProblem | JointProblem
"""Problems that the conjugate gradient minimises."""

SLACK = 1e-3
"""How soft a plane may be at most, relative to its curvature with U held (see docs/lab/LOG.md)."""

FLOOR = 5e-4
"""And relative to the mean of the Hessian's diagonal."""


def energies(R: Float[Tensor, "b k"], mu: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
    """`e_i = r_iᵀ Gxx r_i` in the eigenbasis."""
    return R.square() @ mu


def tangent_(R: Float[Tensor, "b k"], Z: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """`Z − sym(Z Rᵀ) R`, in place: the orthogonal projection of Z on the tangent space at R."""
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


STRIP = 256
"""Rows that a product is cut into: enough to keep its rate."""


def lower_gram(A: Float[Tensor, "b k"]) -> Float[Tensor, "b b"]:
    """The lower triangle of `A Aᵀ`, which is all that Cholesky reads, in strips of rows.

    What lies right of a strip's last column is not computed, and 0: for many rows nearly half the
    product.
    """
    b = len(A)
    if b <= STRIP:
        return A @ A.T
    G = A.new_zeros(b, b)
    for first in range(0, b, STRIP):
        last = min(first + STRIP, b)
        torch.mm(A[first:last], A[:last].T, out=G[first:last, :last])
    return G
