"""The factored weight `Ŵ = U diag(s) R`, on which rotations and rescaling act (METHODS §5.2)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.compensation.objective import OutputProblem
from coec.linalg.alignment import Alignment
from coec.linalg.decompose import eigh, svd
from coec.linalg.gcv import Rescaled, Shrinkage, led, rescale
from coec.linalg.polar import polar
from coec.linalg.right import JointProblem, RightProblem, energies
from coec.linalg.spd import noise


@dataclass(frozen=True, eq=False)
class RotationTarget:
    """The reconstruction problem in the eigenbasis of `Gxx = E diag(μ) Eᵀ`.

    Attributes:
        mu: eigenvalues, ascending.
        basis: E.
        Gyx: `Gyx E`.
        energy: of every output.
        yy: `‖Y‖_F²`.
    """

    mu: Float[Tensor, " k"]
    basis: Float[Tensor, "k k"]
    Gyx: Float[Tensor, "m k"]
    energy: Float[Tensor, " m"]
    yy: float

    @classmethod
    def of(cls, problem: OutputProblem) -> "RotationTarget":
        """Diagonalise Gxx once; every later product with it is elementwise.

        Directions of Gxx that are noise get no energy and no part in the output: their energy may
        come out at 0 or below, and the output that they seem to give would then cost nothing.
        """
        mu, E = eigh(problem.Gxx)
        # Gxx → E, μ; Gyx → Gyx E; noise is 0 in both
        informative = mu > noise(mu, E, problem.Gxx.diagonal(), problem.precision)
        Gyx = (problem.Gyx @ E).mul_(informative)
        return cls(torch.where(informative, mu, 0.0), E, Gyx, problem.energy, problem.yy)

    def to(self, like: Tensor) -> "RotationTarget":
        """Return the same problem in the dtype and on the device of a tensor."""
        mu, basis, Gyx = self.mu.to(like), self.basis.to(like), self.Gyx.to(like)
        return RotationTarget(mu, basis, Gyx, self.energy.to(like), self.yy)

    def error(self, frame: "Frame") -> float:
        """Return `𝓛(Ŵ)` of a frame of any dtype, in the dtype of the problem.

        Taken from the product of the factors: a frame from fewer digits is not quite orthonormal.
        """
        # Ŵ E, m×k → (Σ (Ŵ E)² μ − 2 ⟨Ŵ, Gyx⟩ + yy) / yy
        W = (frame.U.to(self.mu) * frame.s.to(self.mu)) @ frame.R.to(self.mu)
        linear = float((W * self.Gyx).sum())
        return (float((W.square_() @ self.mu).sum()) - 2 * linear + self.yy) / self.yy

    def rows(self, rows: slice) -> "RotationTarget":
        """Return the problem of some of the outputs alone."""
        energy = self.energy[rows]
        return RotationTarget(self.mu, self.basis, self.Gyx[rows], energy, float(energy.sum()))


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
        """The nearest singular values, by what they weigh in the error, of which `rows` lead."""
        energy = self.energy(target)
        tiny = torch.finfo(energy.dtype).tiny
        return replace(self, s=led(self.s, energy.clamp_min(tiny), rows))

    def rescaled(
        self, target: RotationTarget, shrinkage: Shrinkage, leading: Int[Tensor, " r"] | None = None
    ) -> tuple["Frame", Rescaled, float]:
        """New singular values (METHODS §5.3), what chose them, and the relative error with them.

        Args:
            leading: modes that stay the largest.
        """
        # (U, R) → ρ, e → s(λ); 𝓛 needs no more than these three
        response, energy = self.response(target), self.energy(target)
        out = rescale(self.s, response, energy, shrinkage, leading)
        return replace(self, s=out.s), out, _error(out.s, response, energy, target.yy)

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
