"""The compensation of every site chosen by held-out error (METHODS §4)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from coec.compensation.closed_form import none, rcpu, ridge_to_slice
from coec.compensation.coec import coec
from coec.compensation.objective import relative_errors
from coec.errors import NumericalError, OptionError
from coec.events import record, recording
from coec.settings import CoecOptions, RidgeOptions
from coec.settings.options import Solver
from coec.types import Gram, SiteProblem, SiteResult

SOLVERS: tuple[Solver, ...] = ("gradient", "conjugate", "joint")
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)

CANDIDATES: dict[str, Callable[[SiteProblem], SiteResult]] = {
    "none": none,
    "rcpu": rcpu,
    **{f"coec solver={one}": partial(coec, options=CoecOptions(solver=one)) for one in SOLVERS},
    **{
        f"ridge-to-slice ridge={one:g}": partial(ridge_to_slice, options=RidgeOptions(ridge=one))
        for one in RIDGES
    },
}
"""What is tried, in this order: of equal errors the earlier wins."""


def auto(problem: SiteProblem) -> SiteResult:
    """The candidate with the lowest held-out error, fitted again on all windows.

    `min over CANDIDATES of 𝓛(W̃)` on the held-out statistics, every W̃ fitted on the others. The
    choice made, the held-out windows have nothing more to say, and are fitted on too.

    Source: this project.

    Returns:
        The weight; diagnostics hold what was `chosen`, the held-out errors of all `candidates`, and
        as `holdout_after` that of the chosen one before it was fitted on those windows, beside its
        own. A candidate that fails is left out, and an event says so.

    Raises:
        OptionError: the problem has no held-out statistics.
        NumericalError: every candidate failed.
    """
    held = problem.held_out
    if held is None:
        raise OptionError("compensation 'auto' needs held-out statistics: give held_out")
    found = [_tried(name, problem, held) for name in CANDIDATES]
    tried = {one.name: one for one in found if one is not None}
    everything = replace(problem, gram=problem.gram + held, held_out=None)
    for best in sorted(tried.values(), key=lambda one: one.after):
        try:
            result = CANDIDATES[best.name](everything)
        except NumericalError as error:
            record(f"{best.name} left out, on all windows: {error}")
            continue
        chosen = {
            "chosen": best.name,
            "candidates": {name: one.after for name, one in tried.items()},
            "holdout_before": best.before,
            "holdout_after": best.after,
        }
        return replace(result, diagnostics=result.diagnostics | chosen)
    raise NumericalError("every candidate of 'auto' failed")


@dataclass(frozen=True)
class _Tried:
    """A candidate fitted without the held-out windows: the slice's error on them, and its own."""

    name: str
    before: float
    after: float


def _tried(name: str, problem: SiteProblem, held: Gram) -> _Tried | None:
    """None, and an event, where the candidate fails.

    Its own events are left aside: what a candidate went through counts only where it is chosen, and
    then its second fit says so.
    """
    try:
        with recording():
            result = CANDIDATES[name](problem)
            errors = relative_errors(
                problem.weight, held, problem.kept, result, target=problem.target
            )
            return _Tried(name, *errors)
    except NumericalError as error:
        failure = error
    record(f"{name} left out: {failure}")
    return None
