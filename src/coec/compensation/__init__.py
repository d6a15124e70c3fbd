"""Compensations: what replaces the kept columns of a consumer, as pure functions.

A compensation is any callable `(weight, gram, kept, *, options) -> Compensation`. Add one by
writing the function and listing it here; nothing else knows their names.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.compensation.closed_form import bias, least_squares, none, ridge_to_slice
from coec.compensation.coec import coec
from coec.compensation.objective import (
    above,
    kept_columns,
    output_energy,
    power_of_two,
    relative_error,
)
from coec.compensation.rcpu import rcpu
from coec.errors import NumericalError, OptionError
from coec.events import record, recording
from coec.linalg.spd import semidefinite
from coec.settings import plain
from coec.types import Compensation, Gram, KeptSet

COMPENSATIONS: dict[str, Callable[..., Compensation]] = {
    "coec": coec,
    "rcpu": rcpu,
    "bias": bias,
    "least-squares": least_squares,
    "ridge-to-slice": ridge_to_slice,
    "none": none,
}

SITE_ARGUMENTS = frozenset({"value_weight"})
"""Keyword arguments that describe the site, filled in by the caller, not options of the user."""


def adds_bias(method: Callable[..., Compensation]) -> bool:
    """Whether results carry a bias, which decides the output format before any work.

    A function of your own that returns one says so with an attribute: `f.adds_bias = True`.
    """
    return bool(getattr(method, "adds_bias", method is bias))


@functools.cache
def options_of(method: Callable[..., Compensation]) -> dict[str, inspect.Parameter]:
    """The options a compensation takes: its keyword-only parameters."""
    parameters = inspect.signature(method).parameters.values()
    return {
        p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in SITE_ARGUMENTS
    }


EXTREME = 0.2
"""Numbers beyond this power of the largest of their dtype are measured in units of their own."""

OPTIONS = frozenset(name for method in COMPENSATIONS.values() for name in options_of(method))
"""Names of all options of all compensations."""


def resolve(method: str) -> Callable[..., Compensation]:
    """The compensation of that name; raises OptionError with the known names."""
    if method not in COMPENSATIONS:
        raise OptionError(f"unknown compensation '{method}'; known: {', '.join(COMPENSATIONS)}")
    return COMPENSATIONS[method]


def check_options(method: str | Callable[..., Compensation], options: dict[str, Any]) -> None:
    """Raises OptionError unless the compensation takes every option, and its kind of value.

    Nor may an option other than its default be without effect beside the others: a method says
    which are with an attribute, `f.idle(all options) -> {option: why}`.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
    known = options_of(resolve(method) if isinstance(method, str) else method)
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = ", ".join(known) or "none"
        raise OptionError(
            f"compensation '{name}' has no option '{unknown[0]}'; its options: {takes}"
        )
    for option, value in options.items():
        expected = known[option].annotation
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if expected is float and not number:
            raise OptionError(f"{option} must be a number, got {value!r}")
        if expected is int and not (number and isinstance(value, int)):
            raise OptionError(f"{option} must be a whole number, got {value!r}")
        if get_origin(expected) is Literal and value not in get_args(expected):
            choices = ", ".join(get_args(expected))
            raise OptionError(f"{option} must be one of {choices}, got {value!r}")
    for option, why in idle_options(method, options).items():
        raise OptionError(f"{option} has no effect with {why}: leave it out, or change the other")


def idle_options(
    method: str | Callable[..., Compensation], options: dict[str, Any]
) -> dict[str, str]:
    """Those of the options that differ from their default to no effect, each with the reason."""
    function = resolve(method) if isinstance(method, str) else method
    if not hasattr(function, "idle"):
        return {}
    defaults = {option: parameter.default for option, parameter in options_of(function).items()}
    found: dict[str, str] = function.idle(defaults | options)
    return {o: why for o, why in found.items() if o in options and options[o] != defaults[o]}


def compensate(
    weight: Float[Tensor, "m d"],
    gram: Gram,
    kept: KeptSet | Int[Tensor, " k"],
    *,
    method: str | Callable[..., Compensation] = "coec",
    value_weight: Float[Tensor, "k h"] | None = None,
    **options: Any,
) -> Compensation:
    """Replaces the kept columns of one weight from second-order statistics (METHODS §§4, 5).

    Args:
        weight: `W₀`, the dense consumer (`down_proj` or `o_proj`), outputs × inputs.
        gram: statistics of its inputs in the dense model; their dtype is the working precision.
        kept: indices of the columns that stay, sorted; or a KeptSet.
        method: a name in COMPENSATIONS or a function of the same form.
        value_weight: for an attention output projection: the pruned value projection's rows, one
            per kept column; used by methods that take it.
        options: of the method; unknown ones are errors.

    Returns:
        Compensation: weight m×k, bias (or None), diagnostics with the untempered relative error
        before and after and every safeguard that fired.

    Raises:
        OptionError: an unknown method or option, one out of range, or shapes that do not fit.
        NumericalError: an input holds NaN or Inf, or numbers overflow in the statistics' dtype.

    Example:
        >>> result = compensate(W, Gram(xx=G, x=x, tokens=n), torch.arange(48), alpha=0.9)
        >>> result.weight.shape, result.diagnostics["error_after"]
    """
    options = {name: plain(value) for name, value in options.items()}
    check_options(method, options)
    method = resolve(method) if isinstance(method, str) else method
    kept = kept if isinstance(kept, KeptSet) else KeptSet(kept, weight.shape[-1])
    kept = KeptSet(kept.kept.to(gram.xx.device), kept.size)
    if weight.ndim != 2 or weight.shape[1] != len(gram.x) or kept.size != len(gram.x):
        raise OptionError(
            f"weight {tuple(weight.shape)}, statistics of {len(gram.x)} channels and a kept set "
            f"out of {kept.size} do not fit: the weight's columns are the channels"
        )
    gram.check_finite()
    if not torch.isfinite(weight).all():
        raise NumericalError("the weight holds NaN or Inf")
    if value_weight is not None and not torch.isfinite(value_weight).all():
        raise NumericalError("the value weight holds NaN or Inf")
    weight = weight.to(gram.xx)
    if value_weight is not None and "value_weight" in inspect.signature(method).parameters:
        options["value_weight"] = value_weight.to(gram.xx)

    with recording() as events:
        weight, gram, units = _moderate(weight, replace(gram, xx=semidefinite(gram.xx)))
        if kept.everything:
            result = Compensation(weight)
        else:
            result = method(weight, gram, kept, **options)
        if not torch.isfinite(result.weight).all():
            raise NumericalError("the compensated weight holds NaN or Inf")
        before, after = relative_errors(weight, gram, kept, result)
        if above(after, before, weight.dtype):
            record("the relative error lies above the slice's")
    diagnostics = {
        "error_before": before,
        "error_after": after,
        **result.diagnostics,
        "events": events,
    }
    own, inputs = units
    bias = None if result.bias is None else result.bias * own * inputs
    if bias is not None and not torch.isfinite(bias).all():
        raise NumericalError("the bias overflows: solve in float64")
    W = result.weight * own
    if not torch.isfinite(W).all():
        raise NumericalError("the compensated weight overflows: solve in float64")
    return Compensation(W, bias, diagnostics)


def _moderate(
    weight: Float[Tensor, "m d"], gram: Gram
) -> tuple[Float[Tensor, "m d"], Gram, tuple[float, float]]:
    """Weight and statistics in units in which no product over- or underflows, and the units.

    Powers of two, so that nothing is rounded: of the weight, and of the inputs. Both are 1 unless
    sizes are extreme for the dtype: products of four factors must stay in its range.
    """
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
    return weight, gram, (own, inputs)


def relative_errors(
    weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet, result: Compensation
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
        residual = weight @ gram.x - result.weight @ gram.x[kept.kept]
        after += float(result.bias @ (gram.tokens * result.bias - 2 * residual)) / yy
    return before, max(after, 0.0)  # below 0 by rounding alone
