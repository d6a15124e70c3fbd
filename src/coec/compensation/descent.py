"""The alternation of COEC: left rotation, rescale, right rotation, rescale (METHODS §5.5)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.anchor import Anchor
from coec.compensation.frame import Frame, Shrinkage, Target
from coec.events import record
from coec.linalg.conjugate import conjugate
from coec.linalg.gcv import Rescaled
from coec.linalg.gradient import gradient
from coec.linalg.polar import polar
from coec.linalg.right import RightProblem
from coec.types import Convergence

Side = Literal["two-sided", "left", "right"]
Solver = Literal["conjugate", "gradient"]
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
        self, frame: Frame, target: Target, anchor: Anchor | None
    ) -> tuple[Frame, Convergence]:
        """The frame with R turned, and how the solve ended."""
        b = len(frame.s)
        if self.parameterization == "full":
            frame = frame.completed()
        alignment = anchor.alignment(frame, target) if anchor else None
        problem = frame.right_problem(target, alignment)
        R = polar(problem.cross.T).T if self.start == "procrustes" else frame.R
        R, convergence = self._solve(problem, R)
        return replace(frame, R=R).cut(b), convergence

    def _solve(
        self, problem: RightProblem, R: Float[Tensor, "b k"]
    ) -> tuple[Float[Tensor, "b k"], Convergence]:
        if self.solver == "gradient":
            return gradient(problem, R, delta=self.delta, iterations=self.iterations)
        return conjugate(problem, R, tolerance=self.precision, iterations=self.iterations)


@dataclass(frozen=True, eq=False)
class Descended:
    """A frame after the alternation, and its story.

    Attributes:
        errors: the relative error (tempered) of the slice, after the first left step and rescale,
            and after every round.
        right: how every right solve ended.
        ridge: the last λ of the rescale, relative to the median mode energy.
        clamped: modes stopped by the band in the last rescale.
        reason: why it stopped.
    """

    frame: Frame
    errors: tuple[float, ...]
    right: tuple[Convergence, ...]
    ridge: float | None
    clamped: int
    reason: str

    def summary(self) -> dict[str, Any]:
        """JSON-ready numbers for the report."""
        return {
            "rounds": len(self.errors) - 2,
            "errors_per_round": list(self.errors),
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

    def __call__(self, frame: Frame, target: Target, anchor: Anchor | None) -> Descended:
        """Alternates until the relative error changes by less than `tol`, or `rounds` rounds."""
        errors = [frame.error(target)]
        frame, out, error = self._left(frame, target, errors[0])
        errors.append(error)
        solves: list[Convergence] = []
        reason = f"round limit {self.rounds}"
        for _ in range(self.rounds):
            if self.side != "left":
                frame, convergence = self.right(frame, target, anchor)
                solves.append(convergence)
                frame, out, error = frame.rescaled(target, self.shrinkage)
            if self.side != "right":
                frame, out, error = self._left(frame, target, error)
            errors.append(error)
            if _rose(errors[-2], error, frame.s.dtype) and anchor is None:
                record("a round raised the relative error")
            if abs(errors[-2] - error) < self.tol:
                reason = f"relative error changed by less than tol = {self.tol:g}"
                break
        return Descended(frame, tuple(errors), tuple(solves), out.ridge, out.clamped, reason)

    def _left(self, frame: Frame, target: Target, before: float) -> tuple[Frame, Rescaled, float]:
        if self.side != "right":
            frame = frame.rotated_left(target)
        frame, out, error = frame.rescaled(target, self.shrinkage)
        if _rose(before, error, frame.s.dtype):
            record("a left rotation with its rescale raised the relative error")
        return frame, out, error


def rounding(dtype: torch.dtype) -> float:
    """How far a relative error may be off by rounding alone."""
    return ROUNDING * torch.finfo(dtype).eps


def _rose(before: float, after: float, dtype: torch.dtype) -> bool:
    return after > before * (1 + RISE) + rounding(dtype)
