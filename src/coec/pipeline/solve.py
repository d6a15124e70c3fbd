"""Solve a block: statistics and weights in, smaller tensors and a report of every site out."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from coec.compensation import compensate
from coec.devices import hand_back
from coec.errors import NumericalError, OptionError
from coec.events import record, recording
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import Cut, cut_block, value_rows, without_experts
from coec.pipeline.guard import Guard
from coec.planning import Plan
from coec.planning.run import Run
from coec.selection import (
    SELECTIONS,
    column_scores,
    expert_scores,
    keep_highest,
    unit_scores,
)
from coec.settings.fields import nth_seed
from coec.streaming.dense_stream import Measured
from coec.types import Gram, KeptSet, SiteResult

ERRORS = ("error_before", "error_after")
SINKS = "a thousandth of the tokens has more than half of the energy of the inputs"
UNSEEN = "no token was routed here: units chosen by magnitude, slice kept"


@dataclass(frozen=True, eq=False)
class SolvedBlock:
    """A block after selection and compensation.

    Attributes:
        block: its layout.
        tensors: the tensors that the checkpoint stores of it, by full names, in the output dtype.
        kept: the kept units of every site that stays, by `Site.key`; where experts go whole, by
            `BlockLayout.experts_key` those that stay.
        rows: the report's row of every site, JSON-ready.
    """

    block: BlockLayout
    tensors: dict[str, Tensor]
    kept: dict[str, Tensor]
    rows: list[JsonDict]

    def by(self, host: str | None) -> "SolvedBlock":
        """Note in every row the host that solved the block, where it is another."""
        if host is not None:
            for row in self.rows:
                row["host"] = host
        return self


def solve_block(measured: Measured, run: Run) -> SolvedBlock:
    """Select and compensate every site of a block, and cut its tensors.

    Depends on its arguments alone, and on no other block. The statistics are taken out of
    `measured`, so that each is freed as soon as it has been used.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    cuts, rows = [], []
    experts, scores = _kept_experts(measured, run)
    staying = measured.block.remaining(experts)
    for site in measured.block.sites:
        statistics = SiteStatistics(
            measured.grams.pop(site.name), measured.holdout.pop(site.name, None)
        )
        if site in staying:
            cut, row = solve_site(site, measured.tensors, statistics, run)
            cuts.append(cut)
        else:
            row = _row(site, 0, {})
        rows.append(row | scores.get(site.name, {}))
    tensors = cut_block(measured.tensors, cuts, run.written)
    hand_back()
    return assemble(measured.block, tensors, cuts, rows, run.plan, experts=experts)


def _kept_experts(measured: Measured, run: Run) -> tuple[KeptSet | None, dict[str, JsonDict]]:
    """Return the experts that stay, and what rows say of every expert by its site's name.

    None where no expert goes whole: nothing is said then.
    """
    keep = run.plan.widths.experts
    names = [site.name for site in measured.block.sites if site.routed]
    if keep is None or not names:
        return None, {}
    windows = [measured.grams]
    if run.recipe.fits_validation and measured.holdout:
        windows.append(measured.holdout)
    grams = [[sums[name] for sums in windows] for name in names]
    scores = expert_scores(grams)
    facts = {
        name: {"tokens": sum(gram.tokens for gram in sums), "score": float(score)}
        for name, sums, score in zip(names, grams, scores, strict=True)
    }
    with naming(f"the experts of block {measured.index}"):
        return keep_highest(scores, keep), facts


@dataclass(eq=False)
class SiteStatistics:
    """Statistics of the inputs of one site's consumer.

    Attributes:
        gram: over the windows fitted on; taken out when it is used, as it is large.
        validation: over the validation windows; None where there are none.
        target: as in `compensate`; None where the inputs are the dense model's.
        validation_target: the target over the validation windows.
    """

    gram: Gram | None
    validation: Gram | None = None
    target: Tensor | None = None
    validation_target: Tensor | None = None


@contextmanager
def naming(module: str) -> Iterator[None]:
    """Name the module in a NumericalError that the `with` block raises."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{module}: {error}") from error


def solve_site(
    site: Site,
    tensors: Mapping[str, Tensor],
    statistics: SiteStatistics,
    run: Run,
    written: torch.dtype | None = None,
    units: KeptSet | None = None,
) -> tuple[Cut, JsonDict]:
    """Return the kept units and compensated weights of one site, and its row for the report.

    Args:
        site: the site.
        tensors: those of its block.
        statistics: of its consumer's inputs.
        run: the plan, and where and in which dtypes it is carried out.
        written: dtype of the weights whose errors are reported; that of the run by default.
        units: those that stay; the run's selection chooses them by default.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    began = time.perf_counter()
    with naming(site.consumer):
        cut, diagnostics = _solve_site(
            site, tensors, statistics, run, written or run.written, units
        )
    row = _row(site, len(cut.units.indices), diagnostics, time.perf_counter() - began)
    _check_recordable(row)
    return cut, row


def _row(site: Site, units: int, diagnostics: JsonDict, seconds: float = 0.0) -> JsonDict:
    """Return a site's row for the report, by the number of units that it keeps."""
    return {
        "module": site.consumer,
        "block": site.block,
        "site": site.kind,
        "units_before": site.units,
        "units_after": units,
        **dict.fromkeys(ERRORS),
        "top_token_energy": None,
        "events": [],
        **diagnostics,
        "seconds": seconds,
    }


def assemble(
    block: BlockLayout,
    tensors: dict[str, Tensor],
    cuts: Sequence[Cut],
    rows: list[JsonDict],
    plan: Plan,
    *,
    experts: KeptSet | None = None,
) -> SolvedBlock:
    """Return a solved block of its cut tensors, completed to those of the output format.

    `experts` are those that stay, unless all do.
    """
    kept = {cut.site.key: cut.units.indices.cpu() for cut in cuts}
    if experts is not None:
        tensors = without_experts(tensors, block, experts)
        kept[block.experts_key] = experts.indices
    return SolvedBlock(block, _as_planned(tensors, plan, block), kept, rows)


def _solve_site(
    site: Site,
    tensors: Mapping[str, Tensor],
    statistics: SiteStatistics,
    run: Run,
    written: torch.dtype,
    units: KeptSet | None,
) -> tuple[Cut, JsonDict]:
    plan = run.plan
    weight = tensors[site.weight].to(run.device)
    # Taken out of its holder, so that the Gram is freed as soon as this site is solved.
    fitted, statistics.gram = statistics.gram, None
    assert fitted is not None
    validation = statistics.validation
    if validation is not None and not validation.tokens:
        validation = None
    fitted.check_finite()
    if validation is not None:
        validation.check_finite()
    # Validation windows are fitted on too, unless the user or a reconstruction holds them out.
    gram = fitted + validation if validation is not None and plan.recipe.fits_validation else fitted
    facts: JsonDict = {"top_token_energy": gram.top_token_energy}
    # Statistics → kept units
    with recording() as events:
        if gram.tokens >= 1000 and (gram.top_token_energy or 0.0) > 0.5:
            record(SINKS)
        units = _kept(site, weight, gram, plan) if units is None else units
    # Nothing goes and the inputs are the dense model's: the tensors stay bit for bit.
    if units.everything and statistics.target is None:
        return Cut(site, units, None), {**facts, "events": events}
    if site.routed:
        facts["tokens"] = gram.tokens
    kept = site.kept_columns(units)
    if not gram.tokens:  # of no tokens there is no error
        result = compensate(weight, gram, kept, method="none")
        unknown = {**facts, **result.diagnostics, **dict.fromkeys(ERRORS)}
        return Cut(site, units, result), {**unknown, "events": [*events, UNSEEN]}
    # Kept units and statistics → W̃, shrunk where tokens are few → its errors as written
    with recording() as later:
        method, options = run.recipe.method, run.recipe.pruning.options
        values = value_rows(tensors, site, units) if "value" in method.needs else None
        guard = Guard(
            weight.to(gram.x), KeptSet(kept.indices.to(gram.x.device), kept.size), gram,
            validation, statistics.target, statistics.validation_target,
        )  # fmt: skip

        def compensated(sums: Gram) -> SiteResult:
            return compensate(
                weight, sums, kept, method=method, value_weight=values,
                target=statistics.target, solve_dtype=run.solve, **options,
            )  # fmt: skip

        result = _guarded(compensated, guard, fitted, site, run)
        by_name = isinstance(run.recipe.pruning.compensation, str)
        result = guard.as_written(result, written, checked=by_name)
    events = list(dict.fromkeys([*events, *result.diagnostics.get("events", []), *later]))
    return Cut(site, units, result), {**facts, **result.diagnostics, "events": events}


def _guarded(
    compensated: Callable[[Gram], SiteResult],
    guard: Guard,
    fitted: Gram,
    site: Site,
    run: Run,
) -> SiteResult:
    """Return the compensated consumer, shrunk towards the slice where tokens are few.

    Args:
        compensated: returns the compensation fitted on a Gram.
        guard: with the Gram that it is fitted on in the end.
        fitted: the Gram of the windows fitted on alone; for a trial on the validation windows.
        site: of the consumer.
        run: how it is made.
    """
    recipe, method = run.recipe, run.recipe.method
    # Fitted on every window that may be; what validation windows try is fitted on `fitted`.
    result = compensated(guard.gram)
    if recipe.calibration.guard and guard.few:
        all_fitted = guard.gram is fitted
        untried = 1.0 if method.shrinks else guard.trust
        return guard.guarded(
            result,
            (lambda: result) if all_fitted else (lambda: compensated(fitted)),
            untried=untried if site.routed else 0.0,
            windows=recipe.calibration.samples,
        )
    return guard.with_validation_errors(result) if guard.gram is fitted else result


def _kept(site: Site, weight: Tensor, sums: Gram, plan: Plan) -> KeptSet:
    """Return the units that stay: those that were named, or else those of the highest scores."""
    given_units = None if plan.recipe.kept is None else plan.recipe.kept.of_site(site)
    if given_units is not None:
        return KeptSet(given_units.indices.to(sums.x.device), given_units.size)
    keep = plan.widths.of(site)
    scores = column_scores(
        plan.recipe.score if sums.tokens else SELECTIONS["magnitude"],
        weight.to(sums.xx),  # variances are differences of sums: scores want their float64
        sums,
        units=site.units,
        keep=keep,
        seed=nth_seed(plan.recipe.calibration.seed, site.block),
        ranges=site.ranges,
    )
    return keep_highest(unit_scores(scores, site.units), keep, site.ranges)


def _check_recordable(row: JsonDict) -> None:
    """Raise OptionError where a method's diagnostics cannot stand in a report."""
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the compensation has diagnostics for {row['module']} that no report holds: {error}"
        ) from error


def _as_planned(tensors: dict[str, Tensor], plan: Plan, block: BlockLayout) -> dict[str, Tensor]:
    """Return exactly the tensors of the output format; biases that nobody computed are 0.

    Raises AssertionError for a tensor that the plan did not foresee: none is ever dropped.
    """
    # Tensors as planned, exactly: a bias that the format demands and no method computed is 0.
    planned = {
        name: shape for name, shape in plan.pruned_shapes.items() if name.startswith(block.prefix)
    }
    dtype = next(iter(tensors.values())).dtype
    zeros = {
        name: torch.zeros(shape, dtype=dtype)
        for name, shape in planned.items()
        if name.endswith(".bias") and name not in tensors
    }
    shapes = {name: tensor.shape for name, tensor in (tensors | zeros).items()}
    if shapes != planned:
        names = {**shapes, **planned}
        odd = min(name for name in names if shapes.get(name) != planned.get(name))
        raise AssertionError(f"{odd}: {shapes.get(odd)}, planned {planned.get(odd)}")
    return tensors | zeros
