"""COEC: Calibrated Orthogonal-Equivalence Compensation of one matrix (METHODS §5).

Block-coordinate descent on the factors of `Ŵ = U diag(s) R`: left rotation (closed form), per-mode
rescale (closed form under GCV), right rotation (iterative, on the Stiefel manifold).
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.anchor import Anchor
from coec.compensation.descent import Descended, Descent, Origin, RightSolver, Side
from coec.compensation.frame import Shrinkage, Target
from coec.compensation.objective import Reconstruction, above, kept_columns
from coec.compensation.rcpu import rcpu
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.units import power_of_two
from coec.settings import CoecOptions
from coec.types import SiteProblem, SiteResult

ALIGNED = ("penalties_per_round", "objectives_per_round", "alignment_before", "alignment_after")
"""Diagnostics that only an aligned descent has."""


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
    weight, gram, kept = problem.weight, problem.gram, problem.kept
    # G^0 = I: the data-blind limit, whose best weight is the slice itself.
    if options.alpha == 0 or problem.nothing_to_repair:
        W_K = kept_columns(weight, kept)
        return SiteResult(W_K, diagnostics={"reason": "nothing to compensate"})

    unit = power_of_two(weight)
    anchor = None
    if problem.value is not None and options.lambda_a > 0:
        anchor = Anchor.of(
            weight / unit, problem.value, kept, lambda_a=options.lambda_a, r_p=options.r_p
        )
    descents = _descents(options)
    target = Target.of(
        Reconstruction.tempered(problem.aim / unit, gram.xx, kept, options.alpha, gram.precision)
    )
    parts, summaries = [], []
    for rows in _chunks(len(weight), options.slices):
        W_K = kept_columns(weight[rows], kept).div_(unit)
        W, summary = _solve(W_K, target.rows(rows), descents, anchor)
        parts.append(W * unit)
        summaries.append(summary)
    del target
    W = torch.cat(parts)
    if options.alpha < 1 or anchor is not None or options.slices > 1:
        _compare_with_rcpu(W, problem)
    diagnostics = summaries[0] if len(summaries) == 1 else {"slices": summaries}
    return SiteResult(W, diagnostics=diagnostics)


def _descents(options: CoecOptions) -> list[Descent]:
    """One descent, or the two of which the better is kept."""
    right = RightSolver(
        options.solver,
        options.parameterization,
        options.start,
        options.retraction,
        options.delta,
        options.precision,
        options.iterations,
    )
    shrinkage = Shrinkage(options.rescale, options.rescale_ridge, options.kappa)
    rotation = options.rotation
    sides: tuple[Side, ...] = ("left", "right") if rotation == "better" else (rotation,)
    return [Descent(side, shrinkage, right, options.rounds, options.tol) for side in sides]


def _solve(
    W_K: Float[Tensor, "m k"], target: Target, descents: list[Descent], anchor: Anchor | None
) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
    """The best of the descents on one group of rows, or the fallback when none is sound."""
    if not target.yy > 0:
        record("the dense output is 0 on the calibration data: slice kept")
        return W_K, {"reason": "no output to reconstruct"}
    if not bool(W_K.any()):
        record("every kept column is 0: slice kept")
        return W_K, {"reason": "nothing to rotate"}
    results = []
    for descent in descents:
        try:
            results.append(descent(W_K, target, anchor))
        except NumericalError as error:
            record(f"descent abandoned: {error}")
    results = [result for result in results if math.isfinite(result.objectives[-1])]
    if not results:
        return _fallback(W_K, target, anchor)
    best = min(results, key=lambda result: result.objectives[-1])
    W = best.frame.weight(target)
    if not torch.isfinite(W).all():
        record("the descent ended at NaN or Inf")
        return _fallback(W_K, target, anchor)
    for name, bound in {"RCPU": best.rcpu, "the slice": best.objectives[0]}.items():
        if above(best.objectives[-1], bound, W.dtype):
            record(f"the descent ended above {name}")
            return _fallback(W_K, target, anchor)
    return W, _summary(best, anchored=anchor is not None)


def _fallback(
    W_K: Float[Tensor, "m k"], target: Target, anchor: Anchor | None
) -> tuple[Float[Tensor, "m k"], dict[str, Any]]:
    """RCPU's weight or the slice, whichever is finite and has the lower objective."""
    W, chosen = W_K, "none"
    try:
        origin = Origin.of(W_K, target, anchor)
        frame, objective = origin.rcpu(target)
        rotated = frame.weight(target)
        if torch.isfinite(rotated).all() and objective <= origin.objective(target):
            W, chosen = rotated, "rcpu"
    except NumericalError as error:
        record(f"rcpu abandoned: {error}")
    record(f"fell back to {chosen}")
    return W, {"reason": f"fell back to {chosen}"}


def _compare_with_rcpu(W: Float[Tensor, "m k"], problem: SiteProblem) -> None:
    """Records where the untempered error, which was not what was minimised, lies above RCPU's."""
    target = Reconstruction.of_site(problem)
    own = target.error(W)
    with recording():
        other = target.error(rcpu(problem).weight)
    if above(own, other, W.dtype):
        record("the relative error lies above RCPU's")


def _summary(result: Descended, *, anchored: bool) -> dict[str, Any]:
    summary = result.summary()
    if not anchored:
        for name in ALIGNED:
            del summary[name]
    return summary


def _chunks(rows: int, count: int) -> list[slice]:
    """Contiguous slices of about equal size, as torch.chunk makes them."""
    size = math.ceil(rows / count)
    return [slice(first, first + size) for first in range(0, rows, size)]
