"""Solve a block: statistics and weights in, smaller tensors and a report of every site out."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from coec.compensation import compensate
from coec.devices import hand_back
from coec.errors import NumericalError, OptionError
from coec.events import recording
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import Cut, cut_block, value_rows
from coec.pipeline.guard import Judge
from coec.planning import Plan
from coec.planning.run import Run
from coec.selection import SELECTIONS, column_scores, keep_highest, unit_scores
from coec.settings.fields import SEEDS
from coec.streaming.dense_stream import Measured
from coec.types import Gram, KeptSet, SiteResult

ERRORS = ("error_before", "error_after")
UNSEEN = "no token was routed here: units chosen by magnitude, slice kept"


@dataclass(frozen=True, eq=False)
class SolvedBlock:
    """A block after selection and compensation.

    Attributes:
        block: its layout.
        tensors: the tensors that the checkpoint stores of it, by full names, in the output dtype.
        kept: the kept units of every site, by `Site.key`.
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
    for site in measured.block.sites:
        statistics = SiteStatistics(
            measured.grams.pop(site.name), measured.holdout.pop(site.name, None)
        )
        cut, row = solve_site(site, measured.tensors, statistics, run)
        cuts.append(cut)
        rows.append(row)
    tensors = cut_block(measured.tensors, cuts, run.written)
    hand_back()
    return assemble(measured.block, tensors, cuts, rows, run.plan)


@dataclass(eq=False)
class SiteStatistics:
    """Statistics of the inputs of one site's consumer.

    Attributes:
        gram: over the windows fitted on; taken out when it is used, as it is large.
        held_out: over held-out windows; None where there are none.
        target: as in `compensate`; None where the inputs are the dense model's.
        held_out_target: the target over the held-out windows.
    """

    gram: Gram | None
    held_out: Gram | None = None
    target: Tensor | None = None
    held_out_target: Tensor | None = None


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
) -> tuple[Cut, JsonDict]:
    """Return the kept units and compensated weights of one site, and its row for the report.

    Args:
        site: the site.
        tensors: those of its block.
        statistics: of its consumer's inputs.
        run: the plan, and where and in which dtypes it is carried out.
        written: dtype of the weights whose errors are reported; that of the run by default.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    began = time.perf_counter()
    with naming(site.consumer):
        cut, diagnostics = _solve_site(site, tensors, statistics, run, written or run.written)
    row = {
        "module": site.consumer,
        "block": site.block,
        "site": site.kind,
        "units_before": site.units,
        "units_after": len(cut.units.indices),
        **dict.fromkeys(ERRORS),
        "events": [],
        **diagnostics,
        "seconds": time.perf_counter() - began,
    }
    _check_recordable(row)
    return cut, row


def assemble(
    block: BlockLayout,
    tensors: dict[str, Tensor],
    cuts: Sequence[Cut],
    rows: list[JsonDict],
    plan: Plan,
) -> SolvedBlock:
    """Return a solved block of its cut tensors, completed to those of the output format."""
    kept = {cut.site.key: cut.units.indices.cpu() for cut in cuts}
    return SolvedBlock(block, _as_planned(tensors, plan, block), kept, rows)


def _solve_site(
    site: Site,
    tensors: Mapping[str, Tensor],
    statistics: SiteStatistics,
    run: Run,
    written: torch.dtype,
) -> tuple[Cut, JsonDict]:
    plan = run.plan
    weight = tensors[site.weight].to(run.device)
    fitted, statistics.gram = statistics.gram, None
    assert fitted is not None
    held_out = statistics.held_out
    if held_out is not None and not held_out.tokens:
        held_out = None
    fitted.check_finite()
    if held_out is not None:
        held_out.check_finite()
    gram = fitted + held_out if held_out is not None and plan.recipe.judges_are_fitted else fitted
    with recording() as events:
        units = _kept(site, weight, gram, plan)
    if units.everything and statistics.target is None:
        return Cut(site, units, None), {"events": events}
    counts = {"tokens": gram.tokens} if site.routed else {}
    kept = site.kept_columns(units)
    if not gram.tokens:  # of no tokens there is no error
        result = compensate(weight, gram, kept, method="none")
        unknown = {**counts, **result.diagnostics, **dict.fromkeys(ERRORS)}
        return Cut(site, units, result), {**unknown, "events": [*events, UNSEEN]}
    with recording() as later:
        values = value_rows(tensors, site, units) if "value" in run.recipe.method.needs else None
        result = _compensated(
            run, SiteGrams(weight, kept, gram, fitted, held_out, values), statistics, site, written
        )
    events = list(dict.fromkeys([*events, *result.diagnostics.get("events", []), *later]))
    return Cut(site, units, result), {**counts, **result.diagnostics, "events": events}


@dataclass(frozen=True, eq=False)
class SiteGrams:
    """The consumer of a site, its kept columns, and the Grams of its inputs.

    Attributes:
        weight: `W₀`.
        kept: the kept columns.
        gram: what the compensation is fitted on in the end.
        fitted: the part of it that held-out windows may judge.
        held_out: the Gram of those windows; None where there are none.
        value: the pruned value projection, where the method needs it.
    """

    weight: Tensor
    kept: KeptSet
    gram: Gram
    fitted: Gram
    held_out: Gram | None
    value: Tensor | None


def _compensated(
    run: Run, grams: SiteGrams, statistics: SiteStatistics, site: Site, written: torch.dtype
) -> SiteResult:
    """Return the compensated consumer, drawn back to the slice where tokens are few."""
    recipe, method = run.recipe, run.recipe.method
    needs_held_out = "held_out" in method.needs

    def compensated(sums: Gram) -> SiteResult:
        return compensate(
            grams.weight,
            sums,
            grams.kept,
            method=method,
            value_weight=grams.value,
            held_out=grams.held_out if needs_held_out else None,
            target=statistics.target,
            solve_dtype=run.solve,
            **recipe.pruning.options,
        )

    kept, device = grams.kept, grams.gram.x.device
    judge = Judge(
        grams.weight.to(grams.gram.x), KeptSet(kept.indices.to(device), kept.size), grams.gram,
        None if needs_held_out else grams.held_out, statistics.target, statistics.held_out_target,
    )  # fmt: skip
    result = compensated(grams.gram)
    if recipe.calibration.guard and judge.few and not needs_held_out:
        all_fitted = grams.gram is grams.fitted
        judged = (lambda: result) if all_fitted else (lambda: compensated(grams.fitted))
        unjudged = 1.0 if method.shrinks else judge.trust
        result = judge.guarded(
            result,
            judged,
            unjudged=unjudged if site.routed else 0.0,
            windows=recipe.calibration.windows,
        )
    elif grams.gram is grams.fitted:
        result = judge.with_held_out_errors(result)
    by_name = isinstance(recipe.pruning.compensation, str)
    return judge.as_written(result, written, checked=by_name)


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
        seed=block_seed(plan.recipe.calibration.seed, site.block),
    )
    return keep_highest(unit_scores(scores, site.units), keep)


def _check_recordable(row: JsonDict) -> None:
    """Raise OptionError where a method's diagnostics cannot stand in a report."""
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the compensation has diagnostics for {row['module']} that no report holds: {error}"
        ) from error


def block_seed(seed: int, block: int) -> int:
    """Return the seed of a block: a score that takes a seed draws other numbers in every block."""
    return (seed * 1_000_003 + block) % SEEDS


def _as_planned(tensors: dict[str, Tensor], plan: Plan, block: BlockLayout) -> dict[str, Tensor]:
    """Return exactly the tensors of the output format; biases that nobody computed are 0.

    Raises AssertionError for a tensor that the plan did not foresee: none is ever dropped.
    """
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
