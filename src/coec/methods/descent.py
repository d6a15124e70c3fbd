"""The alternation of COEC: left rotation, rescale, right rotation, rescale (METHODS §5.5)."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from coec.config.recipe import CoecOptions
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.alignment import Alignment
from coec.linalg.conjugate import conjugate
from coec.linalg.gcv import Rescaled
from coec.linalg.gradient import gradient
from coec.methods.frame import Anchor, Frame, RotationTarget
from coec.methods.objective import rounding
from coec.types import Convergence

ROUNDS, TOLERANCE = 50, 1e-4
"""Rounds end after so many, or if one changes the objective by less (METHODS §5.5)."""

_RISE = 1e-9
"""A relative rise of the error above this is not rounding and is reported."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Start of a descent, and the errors with which its end is compared.

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
        with recording():  # its safeguards are reported only if it is the result
            frame, error = self.turned.scaled(target)
        return frame, error + self.added


@dataclass(frozen=True, eq=False)
class State:
    """A frame just rescaled, and the alignment that its next right solve is under."""

    frame: Frame
    out: Rescaled
    error: float
    alignment: Alignment | None

    @property
    def penalty(self) -> float:
        """`𝒜` on the rows that are aligned now; 0 without an anchor."""
        return 0.0 if self.alignment is None else self.alignment.penalty(self.frame.R)

    @property
    def objective(self) -> float:
        """`𝓛 + λ_a 𝒜`."""
        weight = 0.0 if self.alignment is None else self.alignment.weight
        return self.error + weight * self.penalty


@dataclass(eq=False)
class Descended:
    """A descent as far as it has come, and its errors round by round.

    Attributes:
        state: after the last round.
        errors: the relative error (tempered) of the slice, after the first left step and rescale,
            and after every round.
        penalties: `𝒜` at the same moments, on the rows aligned then; 0 without an anchor.
        objectives: `𝓛 + λ_a 𝒜` at the same moments, which the rounds minimise.
        rcpu: the objective of RCPU.
        reason: why it stopped.
        right: how every right solve ended.
    """

    state: State
    errors: list[float]
    penalties: list[float]
    objectives: list[float]
    rcpu: float
    reason: str
    right: list[Convergence] = field(default_factory=list)

    def advance(self, state: State) -> None:
        """Add the state at the end of a round."""
        self.state = state
        self.errors.append(state.error)
        self.penalties.append(state.penalty)
        self.objectives.append(state.objective)

    def summary(self, *, aligned: bool) -> dict[str, Any]:
        """JSON-ready numbers for the report."""
        alignment = {
            "penalties_per_round": self.penalties,
            "objectives_per_round": self.objectives,
            "alignment_before": self.penalties[0],
            "alignment_after": self.penalties[-1],
        }
        return {
            "rounds": len(self.errors) - 2,
            "errors_per_round": self.errors,
            **(alignment if aligned else {}),
            "right_iterations": [solve.iterations for solve in self.right],
            "right_reason": self.right[-1].reason if self.right else None,
            "gcv_lambda": self.state.out.ridge,
            "modes_clamped": self.state.out.clamped,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Descent:
    """Block-coordinate descent on (U, s, R); every block lowers its own objective.

    Two sets of rules. With `gradient` they are the source's: the rows to align are chosen anew
    before every right solve, and the loop ends when the relative error changes by less than `tol`.
    Otherwise the leading rows after the first rescale are aligned, and every later rescale keeps
    them in the lead: all rounds minimise one objective, `𝓛 + λ_a 𝒜`, which falls in every round,
    and the loop ends when it falls by less than `tol`.
    """

    options: CoecOptions
    rounds: int = ROUNDS
    tol: float = TOLERANCE

    def __call__(
        self, W_K: Float[Tensor, "m k"], target: RotationTarget, anchor: Anchor | None
    ) -> Descended:
        """Alternate from the slice until a round gains less than `tol`."""
        faithful = self._faithful
        origin = Origin.of(W_K, target, anchor)
        first = self._start(origin, target, anchor)
        descended = Descended(
            first,
            [origin.slice.error(target)],
            [origin.penalty],
            [origin.objective(target)],
            origin.rcpu(target)[1],
            f"round limit {self.rounds}",
        )
        descended.advance(first)
        del origin, first  # as large as frames, and not needed while the rounds go on
        # A round that breaks down or raises the objective is undone, and ends the descent.
        for _ in range(self.rounds):
            before = descended.state
            try:
                after, solves = self._round(before, target, anchor)
            except NumericalError as failure:
                record(f"a round was abandoned: {failure}")
                descended.reason = "round abandoned"
                break
            descended.right += solves
            rose = _rose(before.objective, after.objective, after.frame.s.dtype)
            # The source aligns other rows in every round, so that no single objective has to fall.
            if rose and anchor and faithful:
                record("a round raised the objective: other rows lead, and are aligned")
            elif rose:
                record("a round raised the objective and was taken back")
                descended.reason = "objective rose"
                break
            descended.advance(after)
            fall = before.objective - after.objective
            gain = abs(before.error - after.error) if faithful else fall
            if gain < self.tol:
                change = "relative error changed" if faithful else "objective fell"
                descended.reason = f"{change} by less than tol = {self.tol:g}"
                break
        return descended

    @property
    def _faithful(self) -> bool:
        return self.options.solver == "gradient"

    def _start(self, origin: Origin, target: RotationTarget, anchor: Anchor | None) -> State:
        """Return the state after the first left rotation and rescale; choose the rows to align."""
        frame = origin.slice if self.options.rotation == "right" else origin.turned
        # Frame → s(λ) → the rows that lead → s that keeps them ahead by a margin
        frame, out, error = frame.rescaled(target, self.options)
        if anchor is None:
            return State(frame, out, error, None)
        alignment = anchor.alignment(frame, target)
        if not self._faithful:
            frame = frame.led_by(alignment.rows, target)
            error = frame.error(target)
        return State(frame, out, error, alignment)

    def _round(
        self, state: State, target: RotationTarget, anchor: Anchor | None
    ) -> tuple[State, list[Convergence]]:
        """Right rotation, rescale, left rotation, rescale, as far as the sides allow."""
        frame, alignment, solves = state.frame, state.alignment, []
        leading = None if alignment is None or self._faithful else alignment.rows
        # R-step
        if self.options.rotation != "left":
            frame, convergence = self.turned_right(frame, target, alignment)
            solves.append(convergence)
            # If U follows R, singular values for the U before would be out of step.
            if self.options.rotation == "two-sided" and self._faithful:
                frame, _, _ = frame.rescaled(target, self.options, leading)
        # U-step, then the rescale that ends a round
        if self.options.rotation != "right":
            frame = frame.rotated_left(target)
        frame, out, error = frame.rescaled(target, self.options, leading)
        if anchor is not None and self._faithful:
            alignment = anchor.alignment(frame, target)
        return State(frame, out, error, alignment), solves

    def turned_right(
        self, frame: Frame, target: RotationTarget, alignment: Alignment | None
    ) -> tuple[Frame, Convergence]:
        """Return the frame with R turned, and how the solve ended."""
        # R, b×k → a square frame for O(k) → the solve → b modes again
        options, b = self.options, len(frame.s)
        if options.parameterization == "full":
            frame = frame.completed()
        R = frame.R
        if self._faithful:
            R, convergence = gradient(frame.right_problem(target, alignment), R)
        elif options.rotation == "right":
            R, convergence = conjugate(frame.right_problem(target, alignment), R)
        else:  # the left factor turns too, which the solve takes into account
            R, convergence = conjugate(frame.joint_problem(target, alignment, b), R)
        return replace(frame, R=R).cut(b), convergence


def _rose(before: float, after: float, dtype: torch.dtype) -> bool:
    """Return whether the objective rose beyond rounding, or is no number."""
    return not after <= before * (1 + _RISE) + rounding(dtype)
