"""The alternation of COEC: left rotation, rescale, right rotation, rescale (METHODS §5.5)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.anchor import Anchor
from coec.compensation.frame import Frame, RotationTarget, Shrinkage
from coec.compensation.objective import rounding
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.alignment import Alignment
from coec.linalg.conjugate import conjugate
from coec.linalg.gcv import Rescaled
from coec.linalg.gradient import gradient
from coec.linalg.polar import polar
from coec.settings.options import Parameterization, Retraction, Solver, Start
from coec.types import Convergence

Side = Literal["two-sided", "left", "right"]

RCPU = Shrinkage("uniform", 0.0, 1.0)
"""One scale for all modes, which with the left rotation alone is RCPU."""

_RISE = 1e-9
"""A relative rise of the error above this is not rounding and is reported."""


@dataclass(frozen=True)
class RightSolver:
    """Solver of one right rotation, with its settings."""

    solver: Solver
    parameterization: Parameterization
    start: Start
    retraction: Retraction
    delta: float
    precision: float
    iterations: int

    def __call__(
        self, frame: Frame, target: RotationTarget, alignment: Alignment | None, *, left: bool
    ) -> tuple[Frame, Convergence]:
        """Return the frame with R turned, and how the solve ended.

        Args:
            left: whether the left factor turns too, which `joint` takes into account.
        """
        # R, b×k → a square frame for O(k) → the start → the solve → b modes again
        b = len(frame.s)
        if self.parameterization == "full":
            frame = frame.completed()
        R = frame.R
        if self.start == "procrustes":
            R = polar(frame.right_problem(target, None).cross.T).T
        if self.solver == "gradient":
            problem = frame.right_problem(target, alignment)
            R, ended = gradient(
                problem,
                R,
                delta=self.delta,
                iterations=self.iterations,
                retraction=self.retraction,
            )
        else:
            joint = self.solver == "joint" and left
            R, ended = conjugate(
                frame.joint_problem(target, alignment, b)
                if joint
                else frame.right_problem(target, alignment),
                R,
                tolerance=self.precision,
                iterations=self.iterations,
            )
        return replace(frame, R=R).cut(b), ended


@dataclass(frozen=True, eq=False)
class Origin:
    """Start of a descent, and the errors that its end is compared with.

    Attributes:
        slice: the slice's frame.
        turned: the same after the first left rotation.
        penalty: the slice's `𝒜`, 0 without an anchor.
        added: `λ_a` times that.
    """

    slice: Frame
    turned: Frame
    penalty: float
    added: float

    @classmethod
    def of(
        cls, W_K: Float[Tensor, "m k"], target: RotationTarget, anchor: Anchor | None
    ) -> "Origin":
        """Decompose the slice, once for the whole descent."""
        frame = Frame.of(W_K, target)
        penalty = added = 0.0
        if anchor is not None:
            penalty = anchor.alignment(frame, target).penalty(frame.R)
            added = anchor.weight * penalty
        return cls(frame, frame.rotated_left(target), penalty, added)

    def objective(self, target: RotationTarget) -> float:
        """`𝓛 + λ_a 𝒜` of the slice."""
        return self.slice.error(target) + self.added

    def rcpu(self, target: RotationTarget) -> tuple[Frame, float]:
        """Return RCPU's frame under the target's Gram, and its `𝓛 + λ_a 𝒜`.

        RCPU is one left rotation and one scale, neither of which changes R, and so not `𝒜`.
        """
        with recording():  # its own safeguards count only where it is what comes out
            frame, _, error = self.turned.rescaled(target, RCPU)
        return frame, error + self.added


@dataclass(frozen=True, eq=False)
class Descended:
    """Result of a descent: the frame, and its errors round by round.

    Attributes:
        errors: the relative error (tempered) of the slice, after the first left step and rescale,
            and after every round.
        penalties: `𝒜` at the same moments, on the rows that are aligned then; 0 without an anchor.
        objectives: `𝓛 + λ_a 𝒜` likewise, what the rounds minimise.
        right: how every right solve ended.
        ridge: the last λ of the rescale, relative to the median mode energy.
        clamped: modes stopped by the band in the last rescale.
        reason: why it stopped.
        rcpu: the objective of RCPU.
    """

    frame: Frame
    errors: tuple[float, ...]
    penalties: tuple[float, ...]
    objectives: tuple[float, ...]
    right: tuple[Convergence, ...]
    ridge: float | None
    clamped: int
    reason: str
    rcpu: float

    def summary(self) -> dict[str, Any]:
        """JSON-ready numbers for the report."""
        return {
            "rounds": len(self.errors) - 2,
            "errors_per_round": list(self.errors),
            "penalties_per_round": list(self.penalties),
            "objectives_per_round": list(self.objectives),
            "alignment_before": self.penalties[0],
            "alignment_after": self.penalties[-1],
            "right_iterations": [c.iterations for c in self.right],
            "right_reason": self.right[-1].reason if self.right else None,
            "gcv_lambda": self.ridge,
            "modes_clamped": self.clamped,
            "reason": self.reason,
        }

    def then(self, now: "_State", solves: list[Convergence]) -> "Descended":
        """Return the state one round later."""
        return replace(
            self,
            frame=now.frame,
            errors=(*self.errors, now.error),
            penalties=(*self.penalties, now.penalty),
            objectives=(*self.objectives, now.objective),
            right=self.right + tuple(solves),
            ridge=now.out.ridge,
            clamped=now.out.clamped,
        )


@dataclass(frozen=True, eq=False)
class _State:
    """A frame just rescaled, and the alignment that its next right solve is under."""

    frame: Frame
    out: Rescaled
    error: float
    alignment: Alignment | None

    @property
    def penalty(self) -> float:
        return 0.0 if self.alignment is None else self.alignment.penalty(self.frame.R)

    @property
    def objective(self) -> float:
        weight = 0.0 if self.alignment is None else self.alignment.weight
        return self.error + weight * self.penalty


@dataclass(frozen=True)
class Descent:
    """Block-coordinate descent on (U, s, R); every block lowers its own objective.

    Two sets of rules. With `gradient` they are the source's: the rows to align are chosen anew
    before every right solve, and the loop ends when the relative error changes by less than `tol`.
    Otherwise the rows are those that lead after the first rescale, and every later rescale keeps
    them in the lead: the rounds then minimise one objective, `𝓛 + λ_a 𝒜`, which falls in each of
    them, and the loop ends when it falls by less than `tol`.
    """

    side: Side
    shrinkage: Shrinkage
    right: RightSolver
    rounds: int
    tol: float

    def __call__(
        self, W_K: Float[Tensor, "m k"], target: RotationTarget, anchor: Anchor | None
    ) -> Descended:
        """Alternate from the slice until a round gains less than `tol`."""
        origin = Origin.of(W_K, target, anchor)
        state = self._start(origin, target, anchor)
        done = Descended(
            frame=state.frame,
            errors=(origin.slice.error(target), state.error),
            penalties=(origin.penalty, state.penalty),
            objectives=(origin.objective(target), state.objective),
            right=(),
            ridge=state.out.ridge,
            clamped=state.out.clamped,
            reason=f"round limit {self.rounds}",
            rcpu=origin.rcpu(target)[1],
        )
        del origin  # as large as a frame, and not needed while the rounds go on
        # A round that breaks down or raises the objective is undone, and ends the descent.
        for _ in range(self.rounds):
            try:
                new, solves = self._round(state, target, anchor)
            except NumericalError as failure:
                record(f"a round was abandoned: {failure}")
                return replace(done, reason="round abandoned")
            rose = _rose(state.objective, new.objective, new.frame.s.dtype)
            # The source aligns other rows in every round, so that no single objective has to fall.
            if rose and anchor and self._faithful:
                record("a round raised the objective: other rows lead, and are aligned")
            elif rose:
                record("a round raised the objective and was taken back")
                return replace(done, right=done.right + tuple(solves), reason="objective rose")
            done = done.then(new, solves)
            faithful = self._faithful
            gain = abs(state.error - new.error) if faithful else state.objective - new.objective
            if gain < self.tol:
                what = "relative error changed" if faithful else "objective fell"
                return replace(done, reason=f"{what} by less than tol = {self.tol:g}")
            state = new
        return done

    @property
    def _faithful(self) -> bool:
        return self.right.solver == "gradient"

    def _start(self, origin: Origin, target: RotationTarget, anchor: Anchor | None) -> _State:
        """Return the state after the first left rotation and rescale; choose the rows to align."""
        frame = origin.slice if self.side == "right" else origin.turned
        # Frame → s(λ) → the rows that lead → s that keeps them ahead by a margin
        frame, out, error = frame.rescaled(target, self.shrinkage)
        if anchor is None:
            return _State(frame, out, error, None)
        alignment = anchor.alignment(frame, target)
        if not self._faithful:
            frame = frame.led_by(alignment.rows, target)
            error = frame.error(target)
        return _State(frame, out, error, alignment)

    def _round(
        self, state: _State, target: RotationTarget, anchor: Anchor | None
    ) -> tuple[_State, list[Convergence]]:
        """Right rotation, rescale, left rotation, rescale, as far as the sides allow."""
        frame, alignment, solves = state.frame, state.alignment, []
        leading = None if alignment is None or self._faithful else alignment.rows
        # R-step
        if self.side != "left":
            left = self.side == "two-sided"
            frame, ended = self.right(frame, target, alignment, left=left)
            solves.append(ended)
            # Where U follows R, singular values for the U of before would be out of step.
            if left and self.right.solver != "joint":
                frame, _, _ = frame.rescaled(target, self.shrinkage, leading)
        # U-step, then the rescale that ends a round
        if self.side != "right":
            frame = frame.rotated_left(target)
        frame, out, error = frame.rescaled(target, self.shrinkage, leading)
        if anchor is not None and self._faithful:
            alignment = anchor.alignment(frame, target)
        return _State(frame, out, error, alignment), solves


def _rose(before: float, after: float, dtype: torch.dtype) -> bool:
    """Return whether the objective rose beyond rounding, or is no number."""
    return not after <= before * (1 + _RISE) + rounding(dtype)
