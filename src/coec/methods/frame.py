"""The factored weight `Ŵ = U diag(s) R`, its problem, and the anchor of its rows (METHODS §5)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.config.recipe import CoecOptions
from coec.errors import OptionError
from coec.linalg.alignment import Alignment
from coec.linalg.decompose import eigh, polar, rounding_level, svd
from coec.linalg.gcv import Rescaled, global_scale, led, rescale
from coec.linalg.right import JointProblem, RightProblem, energies
from coec.linalg.spd import noise, power_of_two
from coec.methods.objective import OutputProblem
from coec.types import KeptSet

_FIXED = 1.0
"""Ridge of `rescale = fixed`, relative to the median mode energy."""


@dataclass(frozen=True, eq=False)
class RotationTarget:
    """The reconstruction problem in the eigenbasis of `Gxx = E diag(μ) Eᵀ`.

    Attributes:
        mu: eigenvalues, ascending.
        basis: E.
        Gyx: `Gyx E`.
        yy: `‖Y‖_F²`.
    """

    mu: Float[Tensor, " k"]
    basis: Float[Tensor, "k k"]
    Gyx: Float[Tensor, "m k"]
    yy: float

    @classmethod
    def of(cls, problem: OutputProblem) -> "RotationTarget":
        """Diagonalise Gxx once; every later product with it is elementwise.

        Directions of Gxx that are noise get no energy and no part in the output: computed energies
        may be 0 or below, and the output of such directions would then cost nothing.
        """
        mu, E = eigh(problem.Gxx)
        # Gxx → E, μ; Gyx → Gyx E; noise is 0 in both
        informative = mu > noise(mu, E, problem.Gxx.diagonal(), problem.precision)
        Gyx = (problem.Gyx @ E).mul_(informative)
        return cls(torch.where(informative, mu, 0.0), E, Gyx, problem.yy)

    def to(self, like: Tensor) -> "RotationTarget":
        """Return the same problem in the dtype and on the device of a tensor."""
        return replace(self, mu=self.mu.to(like), basis=self.basis.to(like), Gyx=self.Gyx.to(like))

    def error(self, frame: "Frame") -> float:
        """Return `𝓛(Ŵ)` of a frame of any dtype, in the dtype of the problem.

        Computed from the product of the factors: frames from fewer digits are not orthonormal.
        """
        # Ŵ E, m×k → (Σ (Ŵ E)² μ − 2 ⟨Ŵ, Gyx⟩ + yy) / yy
        W = (frame.U.to(self.mu) * frame.s.to(self.mu)) @ frame.R.to(self.mu)
        linear = float((W * self.Gyx).sum())
        return (float((W.square_() @ self.mu).sum()) - 2 * linear + self.yy) / self.yy


@dataclass(frozen=True, eq=False)
class Frame:
    """A thin singular value decomposition in the eigenbasis of Gxx.

    Attributes:
        U: orthonormal columns.
        s: singular values, at least 0, in no particular order once rescaled.
        R: orthonormal rows, times the basis E.
    """

    U: Float[Tensor, "m b"]
    s: Float[Tensor, " b"]
    R: Float[Tensor, "b k"]

    @classmethod
    def of(cls, W: Float[Tensor, "m k"], target: RotationTarget) -> "Frame":
        """Decompose a weight into its frame: the one SVD of the whole method."""
        U, s, R = svd(W)
        return cls(U, s, R @ target.basis)

    def weight(self, target: RotationTarget) -> Float[Tensor, "m k"]:
        """`Ŵ`, back in the channels' own basis, in the dtype of the target."""
        U, s, R = (factor.to(target.mu) for factor in (self.U, self.s, self.R))
        return (U * s) @ (R @ target.basis.T)

    def completed(self) -> "Frame":
        """R completed to a square orthogonal frame, s padded with zeros: the full `O(k)` family."""
        b, k = self.R.shape
        if b == k:
            return self
        # The first b columns of Q span the rows of R; the others complete them.
        Q, _ = torch.linalg.qr(self.R.T, mode="complete")
        U = torch.cat([self.U, self.U.new_zeros(self.U.shape[0], k - b)], dim=1)
        return Frame(
            U, torch.cat([self.s, self.s.new_zeros(k - b)]), torch.cat([self.R, Q[:, b:].T])
        )

    def cut(self, b: int) -> "Frame":
        """The first b modes: undoes `completed`."""
        return Frame(self.U[:, :b], self.s[:b], self.R[:b])

    def response(self, target: RotationTarget) -> Float[Tensor, " b"]:
        """`ρ_i = u_iᵀ Gyx r_i`."""
        return ((self.U.T @ target.Gyx) * self.R).sum(dim=1)

    def energy(self, target: RotationTarget) -> Float[Tensor, " b"]:
        """`e_i = r_iᵀ Gxx r_i`."""
        return energies(self.R, target.mu)

    def error(self, target: RotationTarget) -> float:
        """The relative reconstruction error `𝓛(Ŵ)`."""
        return _error(self.s, self.response(target), self.energy(target), target.yy)

    def rotated_left(self, target: RotationTarget) -> "Frame":
        """`U ← polar(Gyx Rᵀ diag(s))`: the best left rotation in closed form."""
        return replace(self, U=polar(target.Gyx @ (self.s[:, None] * self.R).T, nearest=self.U))

    def leading(self, count: int) -> Int[Tensor, " r"]:
        """The modes of the `count` largest singular values, or all."""
        return torch.topk(self.s, min(count, len(self.s))).indices

    def led_by(self, rows: Int[Tensor, " r"], target: RotationTarget) -> "Frame":
        """The nearest singular values, weighted by energy, of which `rows` are the largest."""
        energy = self.energy(target)
        tiny = torch.finfo(energy.dtype).tiny
        return replace(self, s=led(self.s, energy.clamp_min(tiny), rows))

    def rescaled(
        self,
        target: RotationTarget,
        options: CoecOptions,
        leading: Int[Tensor, " r"] | None = None,
    ) -> tuple["Frame", Rescaled, float]:
        """New singular values (METHODS §5.3), λ, and the relative error with them.

        Args:
            leading: modes that remain the largest.
        """
        # (U, R) → ρ, e → s(λ); 𝓛 needs no more than these three
        response, energy = self.response(target), self.energy(target)
        ridge = _FIXED if options.rescale == "fixed" else None
        out = rescale(self.s, response, energy, ridge=ridge, kappa=options.kappa, leading=leading)
        return replace(self, s=out.s), out, _error(out.s, response, energy, target.yy)

    def scaled(self, target: RotationTarget) -> tuple["Frame", float]:
        """Scale for all singular values, and the relative error with it."""
        response, energy = self.response(target), self.energy(target)
        linear, quadratic = (self.s * response).sum(), (self.s.square() * energy).sum()
        s = self.s * global_scale(float(linear), float(quadratic))
        return replace(self, s=s), _error(s, response, energy, target.yy)

    def right_problem(self, target: RotationTarget, alignment: Alignment | None) -> RightProblem:
        """Return the problem of the right rotation, U and s held."""
        cross = self.s[:, None] * (self.U.T @ target.Gyx)
        return RightProblem(self.s, target.mu, cross, target.yy, alignment)

    def joint_problem(
        self, target: RotationTarget, alignment: Alignment | None, modes: int
    ) -> JointProblem:
        """Return the problem of the right rotation, the left factor of `modes` modes following."""
        U = self.U[:, :modes]
        return JointProblem(self.s, target.mu, target.Gyx, target.yy, U, alignment)


def _error(
    s: Float[Tensor, " b"], response: Float[Tensor, " b"], energy: Float[Tensor, " b"], yy: float
) -> float:
    return (float((s.square() * energy).sum()) - 2 * float((s * response).sum()) + yy) / yy


@dataclass(frozen=True, eq=False)
class Anchor:
    """The writer's frame and the anchor seen through it, in the channels' own basis.

    Attributes:
        writer: `U_v`, the leading left singular vectors of the pruned value projection, no more
            than its rank.
        target: `U_vᵀ Π_anchor U_v`, `Π_anchor = V Vᵀ`, `V = orth(V_full[K, :r_p])` with `V_full`
            the right singular vectors of the unpruned consumer.
        weight: `λ_a`.
        r_p: how many leading rows of the frame are aligned.
    """

    writer: Float[Tensor, "k r"]
    target: Float[Tensor, "r r"]
    weight: float
    r_p: int

    @classmethod
    def of(
        cls,
        weight: Float[Tensor, "m d"],
        value_weight: Float[Tensor, "k h"],
        kept: KeptSet,
        options: CoecOptions,
    ) -> "Anchor":
        """Build the anchor from the unpruned consumer and the pruned value projection."""
        k = len(kept.indices)
        if value_weight.shape[0] != k:
            raise OptionError(
                f"value_weight needs one row per kept column ({k}), got {value_weight.shape[0]}: "
                "repeat its rows per query head, in the consumer's column order"
            )
        # W_v, k×h → U_v, its leading left singular vectors
        U_v = _leading_left(value_weight, options.r_p)
        # W₀, m×d → V_full, its leading right singular vectors → V = orth(V_full[K]) → U_vᵀ V Vᵀ U_v
        V_full = _leading_left(weight.T, options.r_p)
        V = _leading_left(V_full[kept.indices], options.r_p)
        overlap = U_v.T @ V
        return cls(U_v, overlap @ overlap.T, options.lambda_a, options.r_p)

    def alignment(self, frame: Frame, target: RotationTarget) -> Alignment:
        """Return the penalty on the rows of the frame that lead now, in the dtype of the target."""
        # R is in the eigenbasis E of Gxx, and so must the writer be: U_v → Eᵀ U_v.
        rows, basis = frame.leading(self.r_p), target.basis
        return Alignment(basis.T @ self.writer.to(basis), self.target.to(basis), rows, self.weight)


def _leading_left(A: Float[Tensor, "m n"], count: int) -> Float[Tensor, "m r"]:
    """Leading left singular vectors, descending; no more than the rank.

    Eigenvectors of `A Aᵀ` cost a third to a half of an SVD, and exist if query heads repeat rows of
    A, for which the polar iteration of a GPU fails. Squaring halves the digits of small singular
    values: the SVD is used for these, and for tall matrices, where it is cheap.
    """
    if A.shape[0] <= A.shape[1]:
        unit = A / power_of_two(A)
        squares, Q = eigh(unit @ unit.T)
        s = squares.clamp_min(0).sqrt().flip(0)[:count]
        if float(s[-1]) > torch.finfo(A.dtype).eps ** 0.25 * float(s[0]):
            return Q.flip(1)[:, :count]
    U, s, _ = svd(A)
    return U[:, s > rounding_level(s)][:, :count]
