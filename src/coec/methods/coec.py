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

from coec.config.recipe import CoecOptions
from coec.devices import is_finite
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.spd import power_of_two
from coec.methods.closed_form import rcpu
from coec.methods.descent import ROUNDS, TOLERANCE, Descended, Descent, Origin
from coec.methods.frame import Anchor, RotationTarget
from coec.methods.objective import OutputProblem, above, kept_columns, rounding
from coec.types import KeptSet, SiteProblem, SiteResult

RESOLVED, SPREAD, AGREE = 0.02, 2.0**16, 0.01
"""A descent in float32 is accepted if its relative error is above the first, the ratio of weights
to outputs below the second, and its error within the third of that in float64
(docs/lab/LOG.md)."""


def coec(
    problem: SiteProblem, options: CoecOptions, *, rounds: int = ROUNDS, tol: float = TOLERANCE
) -> SiteResult:
    """Rotations on both sides and shrunk singular values of the slice: `Ŵ = U diag(s) R`.

    Solves `min 𝓛(Ŵ) + λ_a 𝒜(R)  s.t.  UᵀU = I, R Rᵀ = I` under the tempered Gram `G^α`; the
    alignment penalty `𝒜` is on if the problem holds a value projection.

    Source: COEC, docs/METHODS.md §5.

    Args:
        problem: the site.
        options: see `CoecOptions`.
        rounds: largest number of rounds.
        tol: change of the objective in a round, relative to `‖Y‖²`, below which the rounds stop.

    Returns:
        The weight; diagnostics hold the error after every round, λ, iterations and the reasons
        for stopping. If the descent ends above the slice, or above RCPU (one left rotation and one
        scale, under the same objective; no bound of a right rotation alone), or is not finite, the
        better of these two is returned, with an event. Another event says that the untempered
        error is above that of RCPU.

    Raises:
        NumericalError: an input holds NaN or Inf.
    """
    weight, kept = problem.dense, problem.kept
    W_K = kept_columns(weight, kept)
    # G^0 = I: the data-blind limit, whose best weight is the slice itself.
    if options.alpha == 0 or problem.nothing_to_compensate:
        return SiteResult(W_K, diagnostics={"reason": "nothing to compensate"})

    # Frames do not depend on the unit of a weight; squares of its numbers keep their range in it.
    unit = power_of_two(weight)
    anchor = None
    if problem.value is not None and options.lambda_a > 0:
        anchor = Anchor.of(weight / unit, problem.value, kept, options)
    # G^α, diagonalised once → the descent
    target = _target(problem, unit, options.alpha)
    site = _Site(W_K.div_(unit), target, anchor, Descent(options, rounds, tol))
    W, summary = site.solved(problem.solve_dtype)
    W = W * unit
    del target, site
    # Tempering and alignment minimise something else than the untempered error.
    if options.alpha < 1 or anchor is not None:
        W, summary = _checked(W, summary, problem)
    return SiteResult(W, diagnostics=summary)


def _target(problem: SiteProblem, unit: float, alpha: float) -> RotationTarget:
    """Return the problem under the tempered Gram, diagonalised, with weights in this unit.

    The CPU diagonalises it if the device of the statistics has no memory for it, with an event.
    """
    device = problem.gram.xx.device

    def target(place: torch.device) -> RotationTarget:
        gram, aim = problem.gram, problem.weight.to(place) / unit
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
class _Site:
    """Kept columns and their problem.

    Attributes:
        W_K: the kept columns, in the weight's unit.
        target: the problem.
        anchor: the alignment of the frame, or None.
        descent: how it is descended.
    """

    W_K: Float[Tensor, "m k"]
    target: RotationTarget
    anchor: Anchor | None
    descent: Descent

    def solved(self, dtype: torch.dtype) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
        """Return the descent's weight and its summary, or the fallback if it is not sound.

        A descent in fewer digits than the target's is checked in all digits, and repeated in all
        digits if it is not accepted.
        """
        if not self.target.yy > 0:
            record("the dense output is 0 on the calibration data: slice kept")
            return self.W_K, {"reason": "no output to reconstruct"}
        if not bool(self.W_K.any()):
            record("every kept column is 0: slice kept")
            return self.W_K, {"reason": "nothing to rotate"}
        descended = None if dtype == self.target.mu.dtype else self._narrow(dtype)
        try:
            descended = descended or self._descended()
        except NumericalError as error:
            record(str(error))
            return self._fallback()
        W = descended.state.frame.weight(self.target)
        if not is_finite(W):
            record("the descent ended at NaN or Inf")
            return self._fallback()
        return W, descended.summary(aligned=self.anchor is not None)

    def _narrow(self, dtype: torch.dtype) -> Descended | None:
        """Return the descent in fewer digits; None, with an event, if these are too few.

        They are too few if the descent fails, if its error differs from that in all digits or is
        below `RESOLVED`, or if `‖W_K‖² tr Gxx / yy` is above `SPREAD`: with a few huge channels of
        small weight, rounding a rotation moves their output by far more than that of the others.
        """
        W_K, target = self.W_K, self.target
        try:
            # ‖W_K‖² tr Gxx / yy bounds how much the rounding of a rotation can weigh in the output.
            spread = float(W_K.square().sum() * target.mu.sum()) / target.yy
            if spread > SPREAD:
                raise NumericalError("a few channels are huge")
            narrow = replace(self, W_K=W_K.to(dtype), target=target.to(target.mu.to(dtype)))
            with recording() as events:
                descended = narrow._descended()
            # The frame's error in all digits: small ones are differences of numbers of size 1.
            error = target.error(descended.state.frame)
            if error < RESOLVED:
                raise NumericalError("the error is small")
            if not abs(error - descended.errors[-1]) <= AGREE * error:  # nor if it is no number
                raise NumericalError("the error comes out otherwise")
        except NumericalError as reason:
            name = str(dtype).removeprefix("torch.")
            record(f"{name} has too few digits here ({reason}): solved in float64")
            return None
        # Events of a descent that is thrown away are not reported.
        for event in events:
            record(event)
        return descended

    def _descended(self) -> Descended:
        """Return the descent.

        Raises:
            NumericalError: it failed, or ended above RCPU or the slice.
        """
        try:
            descended = self.descent(self.W_K, self.target, self.anchor)
        except NumericalError as error:
            raise NumericalError(f"descent abandoned: {error}") from error
        end = descended.objectives[-1]
        if not math.isfinite(end):
            raise NumericalError("the descent ended at NaN or Inf")
        # A descent that ends above the slice on its own objective has broken down, and so has one
        # with left rotations that ends above RCPU, which is one left rotation and one scale.
        dtype, bounds = self.W_K.dtype, {"the slice": descended.objectives[0]}
        if self.descent.options.rotation != "right":
            bounds |= {"RCPU": descended.rcpu}
        for name, bound in bounds.items():
            if above(end, bound, dtype):
                raise NumericalError(f"the descent ended above {name}")
        if end < -rounding(dtype):
            raise NumericalError("the descent ended below 0, where no error lies")
        return descended

    def _fallback(self) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
        """Return RCPU's weight or the slice, whichever is finite and has the lower objective."""
        W, chosen = self.W_K, "none"
        try:
            origin = Origin.of(self.W_K, self.target, self.anchor)
            frame, objective = origin.rcpu(self.target)
            rotated = frame.weight(self.target)
            if is_finite(rotated) and objective <= origin.objective(self.target):
                W, chosen = rotated, "rcpu"
        except NumericalError as error:
            record(f"rcpu abandoned: {error}")
        record(f"fell back to {chosen}")
        return W, {"reason": f"fell back to {chosen}"}


def _checked(
    W: Float[Tensor, "m k"], summary: dict[str, Any], problem: SiteProblem
) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
    """Return W and its summary, or RCPU's weight if W's error lies above the slice's, and an event.

    The error is the untempered one, which was not minimised; that of RCPU is never above the
    slice's. An event also says that the error of W is above that of RCPU.
    """
    target = OutputProblem.of_site(problem)
    error = target.error(W)
    with recording():
        rotated = rcpu(problem).weight
    if above(error, target.error(kept_columns(problem.dense, problem.kept)), W.dtype):
        record("the relative error lies above the slice's: fell back to rcpu")
        return rotated, {"reason": "fell back to rcpu"}
    if above(error, target.error(rotated), W.dtype):
        record("the relative error lies above RCPU's")
    return W, summary
