"""COEC: Calibrated Orthogonal-Equivalence Compensation of one matrix (METHODS §5).

Block-coordinate descent on the factors of `Ŵ = U diag(s) R`: left rotation (closed form), per-mode
rescale (closed form under GCV), right rotation (iterative, on the Stiefel manifold).
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.anchor import Anchor
from coec.compensation.descent import (
    Descended,
    Descent,
    Origin,
    Parameterization,
    RightSolver,
    Side,
    Solver,
    Start,
)
from coec.compensation.frame import Shrinkage, Target
from coec.compensation.objective import Reconstruction, above, kept_columns, power_of_two
from coec.compensation.rcpu import rcpu
from coec.errors import NumericalError, OptionError
from coec.events import record, recording
from coec.linalg.gcv import Rescale
from coec.linalg.gradient import Retraction
from coec.types import Compensation, Gram, KeptSet

ALIGNED = ("penalties_per_round", "objectives_per_round", "alignment_before", "alignment_after")
"""Diagnostics that only an aligned descent has."""

Rotation = Literal["two-sided", "left", "right", "better"]


def coec(
    weight: Float[Tensor, "m d"],
    gram: Gram,
    kept: KeptSet,
    *,
    value_weight: Float[Tensor, "k h"] | None = None,
    alpha: float = 0.9,
    rotation: Rotation = "two-sided",
    parameterization: Parameterization = "stiefel",
    start: Start = "identity",
    slices: int = 1,
    rescale: Rescale = "gcv",
    rescale_ridge: float = 1.0,
    kappa: float = 10.0,
    solver: Solver = "joint",
    retraction: Retraction = "auto",
    delta: float = 7e-4,
    precision: float = 1e-4,
    iterations: int = 200,
    rounds: int = 50,
    tol: float = 1e-4,
    lambda_a: float = 50.0,
    r_p: int = 16,
) -> Compensation:
    """Rotations on both sides and shrunk singular values of the slice: `Ŵ = U diag(s) R`.

    Solves `min 𝓛(Ŵ) + λ_a 𝒜(R)  s.t.  UᵀU = I, R Rᵀ = I` under the tempered Gram `G^α`.

    Source: COEC, docs/METHODS.md §5.

    Args:
        value_weight: the pruned value projection as the consumer sees it (one row per kept
            column); switches the alignment penalty on. None for an MLP.
        alpha: Gram tempering exponent in [0, 1]; 1 is off, 0 returns the slice.
        rotation: which side turns; `better` runs left and right alone and keeps what ends lower.
        parameterization: `stiefel` turns the b×k frame, `full` the whole of O(k).
        start: of every right solve: where the frame is, or the one-sided Procrustes solution.
        slices: contiguous groups of output rows, each compensated on its own.
        rescale: `gcv`, `fixed` (λ = rescale_ridge × median mode energy) or `uniform` (one scale).
        rescale_ridge: for `rescale = "fixed"`.
        kappa: the band of a mode around the global scale, at least 1.
        solver: `joint` (conjugate gradient, the left factor following), `conjugate` (the left
            factor held) or `gradient` (the source's).
        retraction: of `gradient`: `auto` (Cayley for square frames, polar for others) or `polar`.
        delta: `gradient` stops when the rotation changes by less.
        precision: `joint` and `conjugate` stop when a step lowers the objective by a smaller
            fraction.
        iterations: at most so many steps in one right solve.
        rounds: at most so many rounds.
        tol: stop when a round changes the objective, relative to `‖Y‖²`, by less.
        lambda_a: weight of the alignment penalty.
        r_p: rank of the aligned subspaces, capped at the frame's.

    Returns:
        The weight; diagnostics hold the error after every round, λ, iterations and the reasons
        for stopping. Where the descent ends above RCPU (one left rotation and one scale, under the
        same objective) or above the slice, or is not finite, the better of those two is returned
        and an event says so. An event also says where tempering, alignment or slices have traded
        away so much that the untempered error of the whole lies above RCPU's.

    Raises:
        OptionError: an option is out of its range, or slices are to be aligned.
        NumericalError: an input holds NaN or Inf.
    """
    _check_range("alpha", alpha, 0, 1)
    _check_range("kappa", kappa, 1)
    _check_range("rescale_ridge", rescale_ridge, 0)
    _check_range("lambda_a", lambda_a, 0)
    for name, count in {"r_p": r_p, "iterations": iterations, "slices": slices}.items():
        _check_range(name, count, 1)
    for name, value in {
        "rounds": rounds,
        "tol": tol,
        "delta": delta,
        "precision": precision,
    }.items():
        _check_range(name, value, 0)
    aligned = value_weight is not None and lambda_a > 0
    if slices > 1 and aligned:
        raise OptionError(
            "slices = 1 goes with alignment: the penalty is on the frame of the whole matrix, "
            "which slices do not have; set lambda_a = 0 to rotate slices"
        )
    # G^0 = I: the data-blind limit, whose best weight is the slice itself.
    if alpha == 0 or kept.everything:
        W_K = kept_columns(weight, kept)
        return Compensation(W_K, diagnostics={"reason": "nothing to compensate"})

    unit = power_of_two(weight)
    anchor = None
    if aligned and value_weight is not None:
        anchor = Anchor.of(weight / unit, value_weight, kept, lambda_a=lambda_a, r_p=r_p)
    right = RightSolver(solver, parameterization, start, retraction, delta, precision, iterations)
    shrinkage = Shrinkage(rescale, rescale_ridge, kappa)
    sides: tuple[Side, ...] = ("left", "right") if rotation == "better" else (rotation,)
    descents = [Descent(side, shrinkage, right, rounds, tol) for side in sides]

    target = Target.of(Reconstruction.tempered(weight / unit, gram.xx, kept, alpha, gram.precision))
    parts, summaries = [], []
    for rows in _chunks(len(weight), slices):
        W_K = kept_columns(weight[rows], kept).div_(unit)
        W, summary = _solve(W_K, target.rows(rows), descents, anchor)
        parts.append(W * unit)
        summaries.append(summary)
    del target
    W = torch.cat(parts)
    if alpha < 1 or anchor is not None or slices > 1:
        _compare_with_rcpu(W, weight, gram, kept)
    diagnostics = summaries[0] if len(summaries) == 1 else {"slices": summaries}
    return Compensation(W, diagnostics=diagnostics)


def _idle(options: dict[str, Any]) -> dict[str, str]:
    """Options that have no effect beside the others, and why."""
    if options["alpha"] == 0:
        return dict.fromkeys(options.keys() - {"alpha"}, "alpha = 0")
    found: dict[str, str] = {}
    if options["lambda_a"] == 0:
        found["r_p"] = "lambda_a = 0"
    if options["rescale"] != "fixed":
        found["rescale_ridge"] = f"rescale = {options['rescale']}"
    if options["rescale"] == "uniform":
        found["kappa"] = "rescale = uniform"
    if options["solver"] == "gradient":
        found["precision"] = "solver = gradient"
    else:
        found |= dict.fromkeys(("delta", "retraction"), f"solver = {options['solver']}")
    right = [
        "solver",
        "parameterization",
        "start",
        "retraction",
        "delta",
        "precision",
        "iterations",
    ]
    if options["rotation"] == "left":
        found |= dict.fromkeys(right, "rotation = left")
    if options["rounds"] == 0:
        found |= dict.fromkeys([*right, "tol"], "rounds = 0")
    return found


coec.idle = _idle  # type: ignore[attr-defined]


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


def _compare_with_rcpu(
    W: Float[Tensor, "m k"], weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet
) -> None:
    """Records where the untempered error, which was not what was minimised, lies above RCPU's."""
    problem = Reconstruction.of(weight, gram.xx, kept, gram.precision)
    own = problem.error(W)
    with recording():
        other = problem.error(rcpu(weight, gram, kept).weight)
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


def _check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        unbounded = high == float("inf")
        bound = f"at least {low:g} and finite" if unbounded else f"in [{low:g}, {high:g}]"
        raise OptionError(f"{name} must be {bound}, got {value}")
