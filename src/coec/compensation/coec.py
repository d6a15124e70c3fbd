"""COEC: Calibrated Orthogonal-Equivalence Compensation of one matrix (METHODS §5).

Block-coordinate descent on the factors of `Ŵ = U diag(s) R`: left rotation (closed form), per-mode
rescale (closed form under GCV), right rotation (iterative, on the Stiefel manifold).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.anchor import Anchor
from coec.compensation.closed_form import rcpu
from coec.compensation.descent import Descended, Descent, Origin, Side
from coec.compensation.frame import RotationTarget
from coec.compensation.objective import OutputProblem, above, kept_columns, rounding
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.products import power_of_two
from coec.settings import CoecOptions
from coec.types import KeptSet, SiteProblem, SiteResult

RESOLVED, SPREAD, AGREE = 0.02, 2.0**16, 0.01
"""What a descent in float32 is trusted with: relative errors above, ratios of weights to outputs
below, and a difference between its error and that in float64 below (docs/lab/LOG.md)."""


def coec(problem: SiteProblem, options: CoecOptions) -> SiteResult:
    """Rotations on both sides and shrunk singular values of the slice: `Ŵ = U diag(s) R`.

    Solves `min 𝓛(Ŵ) + λ_a 𝒜(R)  s.t.  UᵀU = I, R Rᵀ = I` under the tempered Gram `G^α`; the
    alignment penalty `𝒜` is on where the problem holds a value projection. `CoecOptions` says what
    can be chosen.

    Source: COEC, docs/METHODS.md §5.

    Returns:
        The weight; diagnostics hold the error after every round, λ, iterations and the reasons
        for stopping. Where the descent ends above RCPU (one left rotation and one scale, under the
        same objective) or above the slice, or is not finite, the better of those two is returned
        and an event says so. An event also says where tempering, alignment or slices have traded
        away so much that the untempered error of the whole lies above RCPU's.

    Raises:
        NumericalError: an input holds NaN or Inf.
    """
    weight, kept = problem.weight, problem.kept
    # G^0 = I: the data-blind limit, whose best weight is the slice itself.
    if options.alpha == 0 or problem.nothing_to_compensate:
        W_K = kept_columns(weight, kept)
        return SiteResult(W_K, diagnostics={"reason": "nothing to compensate"})

    # Frames do not depend on the unit of a weight; squares of its numbers keep their range in it.
    unit = power_of_two(weight)
    anchor = None
    if problem.value is not None and options.lambda_a > 0:
        anchor = Anchor.of(weight / unit, problem.value, kept, options)
    # G^α, diagonalised once → a descent for every slice of output rows
    target = _target(problem, unit, options.alpha)
    weights, summaries = [], []
    for rows in _chunks(len(weight), options.slices):
        W_K = kept_columns(weight[rows], kept).div_(unit)
        W, summary = _Slice(W_K, target.rows(rows), anchor, options).solved(problem.solve_dtype)
        weights.append(W * unit)
        summaries.append(summary)
    del target
    # Tempering, alignment and slices minimise something else than the untempered error.
    W = torch.cat(weights)
    if options.alpha < 1 or anchor is not None or options.slices > 1:
        W = _checked(W, problem)
    diagnostics = summaries[0] if len(summaries) == 1 else {"slices": summaries}
    return SiteResult(W, diagnostics=diagnostics)


def _target(problem: SiteProblem, unit: float, alpha: float) -> RotationTarget:
    """Return the problem under the tempered Gram, diagonalised, with weights in this unit.

    The CPU diagonalises it where the device of the statistics has no room; an event says so.
    """
    device = problem.gram.xx.device

    def target(place: torch.device) -> RotationTarget:
        gram, aim = problem.gram, problem.aim.to(place) / unit
        kept = KeptSet(problem.kept.indices.to(place), problem.kept.size)
        return RotationTarget.of(
            OutputProblem.tempered(aim, gram.xx.to(place), kept, alpha, gram.precision)
        )

    try:
        return target(device)
    except torch.OutOfMemoryError:
        if device.type == "cpu":
            raise
    record(f"{device.type} has no room to decompose the Gram in float64: decomposed on the CPU")
    return target(torch.device("cpu")).to(problem.gram.xx)


@dataclass(frozen=True, eq=False)
class _Slice:
    """Kept columns of some of the output rows, and what they are to be compensated towards.

    Attributes:
        W_K: the kept columns, in the weight's unit.
        target: the problem of these rows.
        anchor: the alignment of the frame, or None.
        options: how it is descended.
    """

    W_K: Float[Tensor, "m k"]
    target: RotationTarget
    anchor: Anchor | None
    options: CoecOptions

    def solved(self, dtype: torch.dtype) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
        """Return the best descent's weight and its summary, or the fallback if none is sound.

        A descent in fewer digits than the target's is checked in all of them, and done again in all
        of them where fewer do not tell how it goes.
        """
        if not self.target.yy > 0:
            record("the dense output is 0 on the calibration data: slice kept")
            return self.W_K, {"reason": "no output to reconstruct"}
        if not bool(self.W_K.any()):
            record("every kept column is 0: slice kept")
            return self.W_K, {"reason": "nothing to rotate"}
        best = None if dtype == self.target.mu.dtype else self._narrow(dtype)
        try:
            best = best or self._best()
        except NumericalError as error:
            record(str(error))
            return self._fallback()
        W = best.state.frame.weight(self.target)
        if not torch.isfinite(W).all():
            record("the descent ended at NaN or Inf")
            return self._fallback()
        return W, best.summary(aligned=self.anchor is not None)

    def _narrow(self, dtype: torch.dtype) -> Descended | None:
        """Return the best descent in fewer digits; None, and an event, where these are too few.

        They are where it fails, where its error differs from that in all digits, where that is
        below `RESOLVED`, and where `‖W_K‖² tr Gxx / yy` is above `SPREAD`: with a few huge channels
        of small weight, rounding a rotation moves their output by far more than that of the others.
        """
        W_K, target = self.W_K, self.target
        try:
            # ‖W_K‖² tr Gxx / yy bounds how much the rounding of a rotation can weigh in the output.
            spread = float(W_K.square().sum() * target.mu.sum()) / target.yy
            if spread > SPREAD:
                raise NumericalError("a few channels are huge")
            narrow = replace(self, W_K=W_K.to(dtype), target=target.to(target.mu.to(dtype)))
            with recording() as events:
                best = narrow._best()
            # The frame's error in all digits: small ones are differences of numbers of size 1.
            error = target.error(best.state.frame)
            if error < RESOLVED:
                raise NumericalError("the error is small")
            if not abs(error - best.errors[-1]) <= AGREE * error:  # nor where it is no number
                raise NumericalError("the error comes out otherwise")
        except NumericalError as reason:
            name = str(dtype).removeprefix("torch.")
            record(f"{name} has too few digits here ({reason}): solved in float64")
            return None
        # Its events count only now: those of a descent that is thrown away say nothing.
        for event in events:
            record(event)
        return best

    def _best(self) -> Descended:
        """Return the descent of lowest objective.

        Raises:
            NumericalError: every descent failed, or the best ended above RCPU or the slice.
        """
        results, failures = [], []
        rotation, dtype = self.options.rotation, self.W_K.dtype
        sides: tuple[Side, ...] = ("left", "right") if rotation == "better" else (rotation,)
        for side in sides:
            try:
                descended = Descent(side, self.options)(self.W_K, self.target, self.anchor)
            except NumericalError as error:
                failures.append(f"descent abandoned: {error}")
                continue
            if math.isfinite(descended.objectives[-1]):
                results.append(descended)
        if not results:
            raise NumericalError("; ".join(failures) or "the descent ended at NaN or Inf")
        for failure in failures:
            record(failure)
        best = min(results, key=lambda result: result.objectives[-1])
        # Above RCPU or the slice, on what was minimised, a descent has broken down.
        for name, bound in {"RCPU": best.rcpu, "the slice": best.objectives[0]}.items():
            if above(best.objectives[-1], bound, dtype):
                raise NumericalError(f"the descent ended above {name}")
        if best.objectives[-1] < -rounding(dtype):
            raise NumericalError("the descent ended below 0, where no error lies")
        return best

    def _fallback(self) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
        """Return RCPU's weight or the slice, whichever is finite and has the lower objective."""
        W, chosen = self.W_K, "none"
        try:
            origin = Origin.of(self.W_K, self.target, self.anchor)
            frame, objective = origin.rcpu(self.target)
            rotated = frame.weight(self.target)
            if torch.isfinite(rotated).all() and objective <= origin.objective(self.target):
                W, chosen = rotated, "rcpu"
        except NumericalError as error:
            record(f"rcpu abandoned: {error}")
        record(f"fell back to {chosen}")
        return W, {"reason": f"fell back to {chosen}"}


def _checked(W: Float[Tensor, "m k"], problem: SiteProblem) -> Float[Tensor, "m k"]:
    """Return W, or RCPU's weight where W's error lies above the slice's, and an event.

    The error is the untempered one, which was not minimised; RCPU's is never above the slice's. An
    event also says where W's lies above RCPU's.
    """
    target = OutputProblem.of_site(problem)
    error = target.error(W)
    with recording():
        rotated = rcpu(problem).weight
    if above(error, target.error(kept_columns(problem.weight, problem.kept)), W.dtype):
        record("the relative error lies above the slice's: fell back to rcpu")
        return rotated
    if above(error, target.error(rotated), W.dtype):
        record("the relative error lies above RCPU's")
    return W


def _chunks(rows: int, count: int) -> list[slice]:
    """Contiguous slices of about equal size, as torch.chunk makes them."""
    size = math.ceil(rows / count)
    return [slice(first, first + size) for first in range(0, rows, size)]
