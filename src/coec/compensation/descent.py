"""The alternation of COEC: left rotation, rescale, right rotation, rescale (METHODS §5.5)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.compensation.anchor import Anchor
from coec.compensation.frame import Frame, Shrinkage, Target
from coec.errors import NumericalError
from coec.events import record
from coec.linalg.conjugate import conjugate
from coec.linalg.gcv import Rescaled
from coec.linalg.gradient import gradient
from coec.linalg.polar import polar
from coec.linalg.right import Alignment
from coec.types import Convergence

Side = Literal["two-sided", "left", "right"]
Solver = Literal["joint", "conjugate", "gradient"]
Parameterization = Literal["stiefel", "full"]
Start = Literal["identity", "procrustes"]

CHOICES = 4
"""How often the aligned rows are chosen before the best end so far is taken."""

RISE = 1e-9
"""A relative rise of the error above this is not rounding and is reported."""

ROUNDING = 16
"""A relative error is a difference of numbers of size 1: known to so many eps of its dtype."""


@dataclass(frozen=True)
class RightSolver:
    """How one right rotation is solved."""

    solver: Solver
    parameterization: Parameterization
    start: Start
    delta: float
    precision: float
    iterations: int

    def __call__(
        self, frame: Frame, target: Target, alignment: Alignment | None, *, left: bool
    ) -> tuple[Frame, Convergence]:
        """The frame with R turned, and how the solve ended.

        Args:
            left: whether the left factor turns too, which `joint` takes into account.
        """
        b = len(frame.s)
        if self.parameterization == "full":
            frame = frame.completed()
        R = frame.R
        if self.start == "procrustes":
            R = polar(frame.right_problem(target, None).cross.T).T
        if self.solver == "gradient":
            problem = frame.right_problem(target, alignment)
            R, ended = gradient(problem, R, delta=self.delta, iterations=self.iterations)
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
class Descended:
    """A frame after the alternation, and its story.

    Attributes:
        errors: the relative error (tempered) of the slice, after the first left step and rescale,
            and after every round.
        penalties: `𝒜` at the same moments, on the rows held last and since they were chosen; 0
            without an anchor.
        objectives: `𝓛 + λ_a 𝒜` likewise, what the rounds minimise.
        right: how every right solve ended.
        ridge: the last λ of the rescale, relative to the median mode energy.
        clamped: modes stopped by the band in the last rescale.
        reason: why it stopped.
        alignment: the slice's penalty, and the frame's on its own leading rows.
        before, after: the objective of both.
    """

    frame: Frame
    errors: tuple[float, ...]
    penalties: tuple[float, ...]
    objectives: tuple[float, ...]
    right: tuple[Convergence, ...]
    ridge: float | None
    clamped: int
    reason: str
    alignment: tuple[float, float]
    before: float
    after: float

    def summary(self) -> dict[str, Any]:
        """JSON-ready numbers for the report."""
        return {
            "rounds": len(self.errors) - 2,
            "errors_per_round": list(self.errors),
            "penalties_per_round": list(self.penalties),
            "objectives_per_round": list(self.objectives),
            "right_iterations": [c.iterations for c in self.right],
            "right_reason": self.right[-1].reason if self.right else None,
            "gcv_lambda": self.ridge,
            "modes_clamped": self.clamped,
            "reason": self.reason,
        }

    def judged(self, alignment: Alignment) -> "Descended":
        """With penalty and objective of its frame on the rows given."""
        penalty = alignment.penalty(self.frame.R)
        after = self.errors[-1] + alignment.weight * penalty
        return replace(self, alignment=(self.alignment[0], penalty), after=after)

    def restarted(self) -> "Descended":
        """Penalties and objectives begin anew: the rows that they are on have been chosen anew."""
        return replace(self, penalties=(self.alignment[1],), objectives=(self.after,))


@dataclass(frozen=True)
class Descent:
    """Block-coordinate descent on (U, s, R); every block lowers its own objective."""

    side: Side
    shrinkage: Shrinkage
    right: RightSolver
    rounds: int
    tol: float

    def __call__(
        self, W_K: Float[Tensor, "m k"], target: Target, anchor: Anchor | None
    ) -> Descended:
        """Alternates until a round lowers the objective by less than `tol`, or `rounds` rounds.

        The alignment penalty is on the leading rows, and which those are changes with the singular
        values. They are held during a descent, whose objective thereby stays one function, and
        chosen anew where it ends, at most `CHOICES` times. Of all ends the one of the lowest
        objective on its own leading rows is returned: that objective never rises. With `gradient`
        both rules are the source's: rows chosen anew every round, the relative error watched.
        """
        now = self._start(W_K, target, anchor)
        if anchor is None or self._faithful:
            return self._descend(now, target, anchor, None)
        alignment = anchor.alignment(now.frame, target)
        best = replace(now, reason="no descent ended lower than it began")
        for _ in range(CHOICES):
            now = self._descend(now, target, anchor, alignment)
            held, alignment = alignment, anchor.alignment(now.frame, target)
            now = now.judged(alignment)
            if now.after <= best.after:  # of equals the later: its reason is why it stopped
                best = now
            if _same(held.rows, alignment.rows):
                break
            now = now.restarted()
        return best

    @property
    def _faithful(self) -> bool:
        return self.right.solver == "gradient"

    def _start(self, W_K: Float[Tensor, "m k"], target: Target, anchor: Anchor | None) -> Descended:
        """The slice after the first left rotation and rescale."""
        frame = Frame.of(W_K, target)
        before = frame.error(target)
        frame, out, error = self._rotated_left(frame, target).rescaled(target, self.shrinkage)
        alignment = anchor.alignment(frame, target) if anchor else None
        penalty = alignment.penalty(frame.R) if alignment else 0.0  # R has not turned yet
        added = alignment.weight * penalty if alignment else 0.0
        return Descended(
            frame=frame,
            errors=(before, error),
            penalties=(penalty, penalty),
            objectives=(before + added, error + added),
            right=(),
            ridge=out.ridge,
            clamped=out.clamped,
            reason=f"round limit {self.rounds}",
            alignment=(penalty, penalty),
            before=before + added,
            after=error + added,
        )

    def _descend(
        self, now: Descended, target: Target, anchor: Anchor | None, alignment: Alignment | None
    ) -> Descended:
        """Rounds from a frame until one lowers the objective by less than `tol`."""
        while len(now.errors) - 2 < self.rounds:
            if anchor and self._faithful:
                alignment = anchor.alignment(now.frame, target)
            try:
                frame, out, error, ended = self._round(now.frame, target, alignment)
            except NumericalError as failure:
                record(f"a round was abandoned: {failure}")
                return replace(now, reason="round abandoned")
            penalty = alignment.penalty(frame.R) if alignment else 0.0
            objective = error + (alignment.weight * penalty if alignment else 0.0)
            now = replace(now, right=now.right + tuple(ended))
            faithful = self._faithful
            rose = _rose(now.objectives[-1], objective, frame.s.dtype)
            if rose and not (anchor and faithful):
                record("a round raised the objective and was taken back")
                return replace(now, reason="objective rose")
            gain = abs(now.errors[-1] - error) if faithful else now.objectives[-1] - objective
            now = replace(
                now,
                frame=frame,
                errors=(*now.errors, error),
                penalties=(*now.penalties, penalty),
                objectives=(*now.objectives, objective),
                ridge=out.ridge,
                clamped=out.clamped,
                alignment=(now.alignment[0], penalty),
                after=objective,
            )
            if gain < self.tol:
                what = "relative error changed" if faithful else "objective fell"
                return replace(now, reason=f"{what} by less than tol = {self.tol:g}")
        return replace(now, reason=f"round limit {self.rounds}")

    def _round(
        self, frame: Frame, target: Target, alignment: Alignment | None
    ) -> tuple[Frame, Rescaled, float, list[Convergence]]:
        """Right rotation, rescale, left rotation, rescale, as far as the sides allow."""
        solves = []
        if self.side != "left":
            left = self.side == "two-sided"
            frame, ended = self.right(frame, target, alignment, left=left)
            solves.append(ended)
            # Where U follows R, singular values for the U of before would be out of step.
            if left and self.right.solver != "joint":
                frame, _, _ = frame.rescaled(target, self.shrinkage)
        frame, out, error = self._rotated_left(frame, target).rescaled(target, self.shrinkage)
        return frame, out, error, solves

    def _rotated_left(self, frame: Frame, target: Target) -> Frame:
        return frame if self.side == "right" else frame.rotated_left(target)


def rounding(dtype: torch.dtype) -> float:
    """How far a relative error may be off by rounding alone."""
    return ROUNDING * torch.finfo(dtype).eps


def _rose(before: float, after: float, dtype: torch.dtype) -> bool:
    """Whether it rose beyond rounding, or is no number."""
    return not after <= before * (1 + RISE) + rounding(dtype)


def _same(A: Int[Tensor, " r"], B: Int[Tensor, " r"]) -> bool:
    return set(A.tolist()) == set(B.tolist())
