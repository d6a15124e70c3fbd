"""Compensations: what replaces the kept columns of a consumer, as pure functions.

A compensation is a function of a `SiteProblem` and of its options that returns a `SiteResult`; what
else must be known of it, a `Method` declares. Add one by writing the function and listing it in
`methods.py`; nothing else knows their names.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.compensation.methods import COMPENSATIONS, Method
from coec.compensation.objective import (
    above,
    kept_columns,
    output_energy,
    power_of_two,
    relative_error,
)
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.spd import semidefinite
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
    **options: Any,
) -> SiteResult:
    """Replaces the kept columns of one weight from second-order statistics (METHODS §§4, 5).

    Args:
        weight: `W₀`, the dense consumer (`down_proj` or `o_proj`), outputs × inputs.
        gram: statistics of its inputs in the dense model; their dtype is the working precision.
        kept: indices of the columns that stay, sorted; or a KeptSet.
        method: a name in COMPENSATIONS, a function `(problem, *, options) -> SiteResult`, or a
            `Method`, where that must declare something.
        value_weight: for an attention output projection: the pruned value projection's rows, one
            per kept column; given to methods that need it.
        options: of the method; unknown ones are errors.

    Returns:
        SiteResult: weight m×k, bias (or None), diagnostics with the untempered relative error
        before and after and every safeguard that fired.

    Raises:
        OptionError: an unknown method or option, one out of range, shapes that do not fit, or a
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
    problem = SiteProblem(weight, gram, kept, value_weight)
    _check_finite(problem)
    value = (
        None if value_weight is None or "value" not in method.needs else value_weight.to(gram.xx)
    )
    problem = replace(problem, weight=weight.to(gram.xx), value=value)
    with recording() as events:
        problem, units = _moderate(replace(problem, gram=replace(gram, xx=semidefinite(gram.xx))))
        everything = problem.kept.everything
        result = SiteResult(problem.weight) if everything else method(problem, chosen)
        if not torch.isfinite(result.weight).all():
            raise NumericalError("the compensated weight holds NaN or Inf")
        before, after = relative_errors(problem.weight, problem.gram, kept, result)
        if above(after, before, problem.weight.dtype):
            record("the relative error lies above the slice's")
    errors = {"error_before": before, "error_after": after}
    return _in_units(result, units, {**errors, **result.diagnostics, "events": events})


def _check_finite(problem: SiteProblem) -> None:
    problem.gram.check_finite()
    if not torch.isfinite(problem.weight).all():
        raise NumericalError("the weight holds NaN or Inf")
    if problem.value is not None and not torch.isfinite(problem.value).all():
        raise NumericalError("the value weight holds NaN or Inf")


def _in_units(
    result: SiteResult, units: tuple[float, float], diagnostics: dict[str, Any]
) -> SiteResult:
    """The result of a moderate problem in the units of the original one."""
    own, inputs = units
    bias = None if result.bias is None else result.bias * own * inputs
    if bias is not None and not torch.isfinite(bias).all():
        raise NumericalError("the bias overflows: solve in float64")
    W = result.weight * own
    if not torch.isfinite(W).all():
        raise NumericalError("the compensated weight overflows: solve in float64")
    return SiteResult(W, bias, diagnostics)


def _moderate(problem: SiteProblem) -> tuple[SiteProblem, tuple[float, float]]:
    """The problem in units in which no product over- or underflows, and the units.

    Powers of two, so that nothing is rounded: of the weight, and of the inputs. Both are 1 unless
    sizes are extreme for the dtype: products of four factors must stay in its range.
    """
    weight, gram = problem.weight, problem.gram
    limit = torch.finfo(weight.dtype).max ** EXTREME
    units = [power_of_two(weight), power_of_two(gram.xx.diagonal())]
    units[1] = 2.0 ** (math.frexp(units[1])[1] // 2)
    for number, power in enumerate((1, 2)):
        if 1 / limit < units[number] ** power < limit:
            units[number] = 1.0
    own, inputs = units
    if own != 1.0:
        weight = weight / own
    if inputs != 1.0:
        centred = None if gram.centred is None else gram.centred / inputs**2
        gram = replace(gram, xx=gram.xx / inputs**2, x=gram.x / inputs, centred=centred)
    return replace(problem, weight=weight, gram=gram), (own, inputs)


def relative_errors(
    weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet, result: SiteResult
) -> tuple[float, float]:
    """`𝓛` of the slice and of a compensation, bias included, on any statistics (METHODS §4).

    On the statistics that the compensation was made from this is the fit; on others, such as
    held-out ones, it says how well the fit carries over.
    """
    yy = output_energy(weight, gram.xx)
    if not math.isfinite(yy):
        raise NumericalError("the energy of the dense output overflows: solve in float64")
    before = relative_error(weight, gram.xx, kept, kept_columns(weight, kept), yy)
    after = relative_error(weight, gram.xx, kept, result.weight, yy)
    if result.bias is not None and yy > 0:
        residual = weight @ gram.x - result.weight @ gram.x[kept.indices]
        after += float(result.bias @ (gram.tokens * result.bias - 2 * residual)) / yy
    return before, max(after, 0.0)  # below 0 by rounding alone
