"""Compensations replace the kept columns of a consumer; all are pure functions.

A compensation takes a `SiteProblem` and its options and returns a `SiteResult`. A `Method` declares
what must be known before it runs. To add one, write the function and list it in `methods.py`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.compensation.methods import COMPENSATIONS, Method
from coec.compensation.objective import above, kept_columns, relative_errors
from coec.compensation.shrinkage import FEW, drawn_back
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.spd import power_of_two, semidefinite
from coec.types import Gram, KeptSet, SiteProblem, SiteResult

__all__ = ["COMPENSATIONS", "Method", "compensate", "relative_errors"]

EXTREME = 0.2
"""Numbers beyond this power of the largest of their dtype are measured in units of their own."""


def compensate(
    weight: Float[Tensor, "m d"],
    gram: Gram,
    kept: KeptSet | Int[Tensor, " k"],
    *,
    method: str | Method | Callable[..., SiteResult] = "coec",
    value_weight: Float[Tensor, "k h"] | None = None,
    target: Float[Tensor, "m d"] | None = None,
    solve_dtype: torch.dtype | None = None,
    **options: Any,
) -> SiteResult:
    """Replace the kept columns of one weight from second-order statistics (METHODS §§4, 5).

    Args:
        weight: `W₀`, the dense consumer (`down_proj` or `o_proj`), outputs × inputs.
        gram: statistics of the inputs, one channel per column of W₀.
        kept: sorted indices of the kept columns, or a KeptSet.
        method: a name in COMPENSATIONS, a function `(problem, *, options) -> SiteResult`, or a
            `Method`, which can declare more.
        value_weight: for an attention output projection: the pruned value projection's rows, one
            per kept column; given to methods that need it.
        target: T, if the wanted outputs are `T x` and not `W₀ x`, as on the inputs of a pruned
            model: see `SiteProblem.aim`. Errors are relative to it, and that of the slice may be
            above 1. Compensation then changes the weight even if every column is kept.
        solve_dtype: dtype of the products of long iterations, by default that of the statistics.
            Everything else is float64.
        options: of the method; unknown ones are errors.

    Returns:
        SiteResult: weight m×k in the dtype of the statistics, bias (or None), diagnostics with the
        untempered relative error before and after and every safeguard that fired. With fewer
        than eight tokens for every kept column, results are drawn back to the slice.

    Raises:
        OptionError: an unknown method or option, a value out of range, shapes that do not fit, or a
            bias that the method did not declare.
        NumericalError: an input holds NaN or Inf, or numbers overflow in the statistics' dtype.

    Example:
        >>> result = compensate(W, Gram(xx=G, x=x, tokens=n), torch.arange(48), alpha=0.9)
        >>> result.weight.shape, result.diagnostics["error_after"]
    """
    method = Method.of(method)
    chosen = method.chosen(options)
    kept = kept if isinstance(kept, KeptSet) else KeptSet(kept, weight.shape[-1])
    kept = KeptSet(kept.indices.to(gram.xx.device), kept.size)
    solve_dtype = solve_dtype or gram.xx.dtype
    problem = SiteProblem(weight, gram, kept, value_weight, target, solve_dtype)
    _check_finite(problem)
    with recording() as events:
        # Inputs → float64, semidefinite Gram, moderate units → the method's W̃
        problem, units = _moderate(_prepared(problem, method))
        if problem.nothing_to_compensate:
            result = SiteResult(problem.weight)
        else:
            result = _drawn_back(problem, method(problem, chosen), method)
        if not torch.isfinite(result.weight).all():
            raise NumericalError("the compensated weight holds NaN or Inf")
        # 𝓛 of the slice and of W̃, untempered: a named method that loses to the slice gives way to
        # it; a user's own function is only reported.
        before, after = relative_errors(
            problem.weight, problem.gram, kept, result, target=problem.target
        )
        if above(after, before, problem.weight.dtype):
            rise = "the relative error lies above the slice's"
            if method not in COMPENSATIONS.values():
                record(rise)
            else:
                record(f"{rise}: slice kept")
                slice_ = kept_columns(problem.weight, kept)
                result, after = SiteResult(slice_, diagnostics=result.diagnostics), before
    errors = {"error_before": before, "error_after": after}
    diagnostics = {**errors, **result.diagnostics, "events": events}
    return _in_units(replace(result, diagnostics=diagnostics), units, gram.xx.dtype)


def _drawn_back(problem: SiteProblem, result: SiteResult, method: Method) -> SiteResult:
    """Return `W_K + θ (W̃ − W_K)` with `θ = min(1, N / 8k)`: few tokens tell little (METHODS §4)."""
    share = problem.gram.tokens / (FEW * len(problem.kept.indices))
    if share >= 1 or method.shrinks:
        return result
    record(f"few tokens: drawn back to the slice; {FEW} for every kept column are enough")
    result = drawn_back(problem.weight, problem.kept, result, share)
    return replace(result, diagnostics={**result.diagnostics, "followed": share})


def _prepared(problem: SiteProblem, method: Method) -> SiteProblem:
    """Return the problem in float64, the Gram semidefinite, with the parts that are needed."""
    gram = problem.gram.to(torch.float64)
    value = problem.value if "value" in method.needs else None
    like = gram.xx
    return replace(
        problem,
        weight=problem.weight.to(like),
        gram=replace(gram, xx=semidefinite(like)),
        value=None if value is None else value.to(like),
        target=None if problem.target is None else problem.target.to(like),
    )


def _check_finite(problem: SiteProblem) -> None:
    problem.gram.check_finite()
    tensors = {"weight": problem.weight, "value weight": problem.value, "target": problem.target}
    for name, tensor in tensors.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise NumericalError(f"the {name} holds NaN or Inf")


def _in_units(result: SiteResult, units: tuple[float, float], dtype: torch.dtype) -> SiteResult:
    """Return the result of a problem in moderate units in its original ones, in this dtype."""
    weight_unit, input_unit = units
    bias = None if result.bias is None else (result.bias * weight_unit * input_unit).to(dtype)
    W = (result.weight * weight_unit).to(dtype)
    for name, tensor in {"bias": bias, "compensated weight": W}.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise NumericalError(f"the {name} overflows: solve in float64")
    return replace(result, weight=W, bias=bias)


def _moderate(problem: SiteProblem) -> tuple[SiteProblem, tuple[float, float]]:
    """Return the problem in units in which no product over- or underflows, and the units.

    Powers of two, so that nothing is rounded: one for weight and target, the larger of them, and
    one for the inputs. Both are 1 unless sizes are extreme for the dtype: products of four factors
    must stay in its range.
    """
    weight, target, gram = problem.weight, problem.target, problem.gram
    limit = torch.finfo(weight.dtype).max ** EXTREME
    weight_unit = power_of_two(torch.stack([*weight.aminmax(), *problem.aim.aminmax()]))
    # G holds squares of inputs: the unit of the inputs is the root of that of G.
    input_unit = 2.0 ** (math.frexp(power_of_two(gram.xx.diagonal()))[1] // 2)
    # Moderate sizes keep unit 1, and then nothing is copied.
    if 1 / limit < weight_unit < limit:
        weight_unit = 1.0
    else:
        weight = weight / weight_unit
        target = None if target is None else target / weight_unit
    if 1 / limit < input_unit**2 < limit:
        input_unit = 1.0
    else:
        area = input_unit**2
        centred = None if gram.centred is None else gram.centred / area
        # The largest token energies are dropped: no compensation reads them.
        xx, x = gram.xx / area, gram.x / input_unit
        gram = replace(gram, xx=xx, x=x, centred=centred, largest=None)
    return replace(problem, weight=weight, target=target, gram=gram), (weight_unit, input_unit)
