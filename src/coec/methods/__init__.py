"""Compensations: what replaces the kept columns of a consumer, as pure functions.

A compensation is a function of a `SiteProblem` and of its options that returns a `SiteResult`; what
else must be known of it, a `Method` declares. Add one by writing the function and listing it in
`methods.py`; nothing else knows their names.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.devices import is_finite
from coec.errors import NumericalError
from coec.events import record, recording
from coec.linalg.spd import semidefinite
from coec.methods.method import COMPENSATIONS, Method
from coec.methods.objective import above, kept_columns, relative_errors
from coec.types import Gram, KeptSet, SiteProblem, SiteResult

__all__ = ["COMPENSATIONS", "Method", "compensate", "relative_errors"]

FEW = 8
"""Tokens for every kept column from which on a compensation is taken as it is
(docs/lab/LOG.md)."""


def compensate(
    weight: Float[Tensor, "m d"],
    gram: Gram,
    kept: KeptSet | Int[Tensor, " k"],
    *,
    method: str | Method | Callable[..., SiteResult] = "coec",
    value_weight: Float[Tensor, "k h"] | None = None,
    target: Float[Tensor, "m d"] | None = None,
    solve_dtype: torch.dtype | None = None,
    written: torch.dtype | None = None,
    **options: Any,
) -> SiteResult:
    """Replace the kept columns of one weight from second-order statistics (METHODS §§4, 5).

    Args:
        weight: `W₀`, the dense consumer (`down_proj` or `o_proj`), outputs × inputs.
        gram: statistics of its inputs, one channel per column of W₀.
        kept: indices of the columns that stay, sorted; or a KeptSet.
        method: a name in COMPENSATIONS, a function `(problem, *, options) -> SiteResult`, or a
            `Method`, where that must declare something.
        value_weight: for an attention output projection: the pruned value projection's rows, one
            per kept column; given to methods that need it.
        target: T, if the outputs should be `T x` and not `W₀ x`, as on the inputs of a
            pruned model: see `SiteProblem.weight`. Errors are relative to it, and the slice's may
            be above 1; with every column kept there is still something to compensate.
        solve_dtype: of the products of long iterations; by default that of the statistics.
            Everything else is float64.
        written: dtype in which the weight will be stored: errors are of the rounded weight.
        options: of the method; unknown ones are errors.

    Returns:
        SiteResult: weight m×k in the dtype of the statistics, bias (or None), diagnostics with the
        untempered relative error before and after and every safeguard that fired. With fewer
        than eight tokens for every kept column, results are drawn back to the slice.

    Raises:
        OptionError: an unknown method or option, one out of range, shapes that do not fit, or a
            bias that it did not declare.
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
        # Inputs → float64, semidefinite Gram → the method's W̃
        problem = _prepared(problem, method)
        if problem.nothing_to_compensate:
            result = SiteResult(problem.dense)
        else:
            result = _drawn_back(problem, method(problem, chosen), method)
        if not is_finite(result.weight):
            raise NumericalError("the compensated weight holds NaN or Inf")
        # 𝓛 of the slice and of W̃, untempered, of the weights as they are written: a named method
        # that loses to the slice gives way to it; a user's own function is only reported.
        slice_, rounded = _rounded(problem, result, written)
        before, after = relative_errors(slice_, problem.gram, kept, rounded, target=problem.weight)
        if above(after, before, problem.dense.dtype):
            rise = "the relative error lies above the slice's"
            if method not in COMPENSATIONS.values():
                record(rise)
            else:
                record(f"{rise}: slice kept")
                W = kept_columns(problem.dense, kept)
                result, after = SiteResult(W, diagnostics=result.diagnostics), before
    errors = {"error_before": before, "error_after": after}
    diagnostics = {**errors, **result.diagnostics, "events": events}
    return _cast(replace(result, diagnostics=diagnostics), gram.xx.dtype)


def _rounded(
    problem: SiteProblem, result: SiteResult, dtype: torch.dtype | None
) -> tuple[Float[Tensor, "m d"], SiteResult]:
    """Return the dense weight and a result as they are in the dtype that is written.

    A result that does not fit the dtype stays as it is: it is refused when it is cast.
    """
    if dtype is None:
        return problem.dense, result

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).to(tensor)

    W = rounded(result.weight)
    if not is_finite(W):
        return problem.dense, result
    bias = None if result.bias is None else rounded(result.bias)
    return rounded(problem.dense), SiteResult(W, bias)


def _drawn_back(problem: SiteProblem, result: SiteResult, method: Method) -> SiteResult:
    """Return `W_K + θ (W̃ − W_K)` with `θ = min(1, N / 8k)`: few tokens tell little (METHODS §4)."""
    share = problem.gram.tokens / (FEW * len(problem.kept.indices))
    if share >= 1 or method.shrinks:
        return result
    record(f"few tokens: drawn back to the slice; {FEW} for every kept column are enough")
    W_K = kept_columns(problem.dense, problem.kept)
    return replace(
        result,
        weight=W_K + share * (result.weight - W_K),
        bias=None if result.bias is None else share * result.bias,
        diagnostics={**result.diagnostics, "followed": share},
    )


def _prepared(problem: SiteProblem, method: Method) -> SiteProblem:
    """Return the problem in float64, its Grams semidefinite, without parts that nobody needs."""
    gram = problem.gram.to(torch.float64)
    value = problem.value if "value" in method.needs else None
    like = gram.xx
    return replace(
        problem,
        dense=problem.dense.to(like),
        gram=replace(gram, xx=semidefinite(like)),
        value=None if value is None else value.to(like),
        target=None if problem.target is None else problem.target.to(like),
    )


def _check_finite(problem: SiteProblem) -> None:
    problem.gram.check_finite()
    tensors = {"weight": problem.dense, "value weight": problem.value, "target": problem.target}
    for name, tensor in tensors.items():
        if tensor is not None and not is_finite(tensor):
            raise NumericalError(f"the {name} holds NaN or Inf")


def _cast(result: SiteResult, dtype: torch.dtype) -> SiteResult:
    """Return a result in this dtype; raises NumericalError if it does not fit."""
    bias = None if result.bias is None else result.bias.to(dtype)
    W = result.weight.to(dtype)
    for name, tensor in {"bias": bias, "compensated weight": W}.items():
        if tensor is not None and not is_finite(tensor):
            raise NumericalError(f"the {name} overflows: solve in float64")
    return replace(result, weight=W, bias=bias)
