"""The alternation of COEC: left rotation, rescale, right rotation, rescale (METHODS §5.5)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
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
        penalties: `𝒜` at the same moments; 0 without an anchor.
        objectives: `𝓛 + λ_a 𝒜`, what the rounds minimise.
        right: how every right solve ended.
        ridge: the last λ of the rescale, relative to the median mode energy.
        clamped: modes stopped by the band in the last rescale.
        reason: why it stopped.
    """

    frame: Frame
    errors: tuple[float, ...]
    penalties: tuple[float, ...]
    objectives: tuple[float, ...]
    right: tuple[Convergence, ...]
    ridge: float | None
    clamped: int
    reason: str

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

        The leading rows, which the alignment penalty is on, are chosen after the first rescale and
        keep their part while they turn: chosen anew every round they would change the objective.
        With `gradient` both rules are the source's: rows chosen anew, the relative error watched.
        """
        faithful = self.right.solver == "gradient"
        frame = Frame.of(W_K, target)
        errors = [frame.error(target)]
        frame, out, error = self._rotated_left(frame, target).rescaled(target, self.shrinkage)
        alignment = anchor.alignment(frame, target) if anchor else None
        errors.append(error)
        penalties = [alignment.penalty(frame.R) if alignment else 0.0] * 2  # R has not turned yet
        weight = alignment.weight if alignment else 0.0
        objectives = [e + weight * p for e, p in zip(errors, penalties, strict=True)]
        solves: list[Convergence] = []
        reason = f"round limit {self.rounds}"
        for _ in range(self.rounds):
            if anchor and faithful:
                alignment = anchor.alignment(frame, target)
            try:
                turned, rescaled, error, ended = self._round(frame, target, alignment)
            except NumericalError as failure:
                record(f"a round was abandoned: {failure}")
                reason = "round abandoned"
                break
            penalty = alignment.penalty(turned.R) if alignment else 0.0
            objective = error + weight * penalty
            solves += ended
            if _rose(objectives[-1], objective, frame.s.dtype) and not (anchor and faithful):
                record("a round raised the objective and was taken back")
                reason = "objective rose"
                break
            frame, out = turned, rescaled
            errors.append(error)
            penalties.append(penalty)
            objectives.append(objective)
            gain = abs(errors[-2] - error) if faithful else objectives[-2] - objective
            if gain < self.tol:
                what = "relative error changed" if faithful else "objective fell"
                reason = f"{what} by less than tol = {self.tol:g}"
                break
        return Descended(
            frame,
            tuple(errors),
            tuple(penalties),
            tuple(objectives),
            tuple(solves),
            out.ridge,
            out.clamped,
            reason,
        )

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
