"""The solving stage: a measured block in, its smaller tensors and an account of every site out."""

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coec.compensation import compensate
from coec.devices import choose_solve_dtype, hand_back
from coec.errors import NumericalError, OptionError
from coec.events import recording
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import Cut, cut_block, value_rows
from coec.pipeline.guard import Judge
from coec.planning import Plan
from coec.selection import SELECTIONS, column_scores, keep_highest, unit_scores
from coec.settings import SEEDS
from coec.streaming.dense_stream import Measured
from coec.types import Gram, KeptSet, SiteResult

ERRORS = ("error_before", "error_after")
UNSEEN = "no token was routed here: units chosen by magnitude, slice kept"


@dataclass(frozen=True, eq=False)
class Solved:
    """One block after selection and compensation.

    Attributes:
        block: which one.
        tensors: what the checkpoint stores of it, by full names, in the output dtype.
        kept: the kept units of every site, by `Site.key`.
        rows: the account of every site for the report, JSON-ready.
    """

    block: BlockLayout
    tensors: dict[str, Tensor]
    kept: dict[str, Tensor]
    rows: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class SolvedBlock:
    """A block that was solved, maybe by a process of a cluster.

    Attributes:
        solved: what is written of it.
        hashes: of the dense weights that were read for it, as in `Dense.hashes`.
    """

    solved: Solved
    hashes: dict[str, str]

    def signed(self) -> "SolvedBlock":
        """The same, with the name of this machine in the account of every site."""
        for row in self.solved.rows:
            row["host"] = socket.gethostname()
        return self


def solve_block(measured: Measured, plan: Plan, device: torch.device, dtype: torch.dtype) -> Solved:
    """Selects and compensates every site of a block, and cuts its tensors.

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
        cut, row = solve_site(site, measured.tensors, statistics, plan, device, dtype)
        cuts.append(cut)
        rows.append(row)
    tensors = cut_block(measured.tensors, cuts, dtype)
    hand_back()
    return assembled(measured.block, tensors, cuts, rows, plan)


@dataclass(eq=False)
class SiteStatistics:
    """What is known of the inputs of one site's consumer.

    Attributes:
        gram: over the windows fitted on; taken out when it is used, as it is large.
        held_out: over others; None where there are none.
        target: as in `compensate`; None where the inputs are the dense model's.
        held_out_target: the same over the held-out windows.
    """

    gram: Gram | None
    held_out: Gram | None = None
    target: Tensor | None = None
    held_out_target: Tensor | None = None


@contextmanager
def naming(module: str) -> Iterator[None]:
    """Says of which module a NumericalError is."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{module}: {error}") from error


def solve_site(
    site: Site,
    tensors: Mapping[str, Tensor],
    statistics: SiteStatistics,
    plan: Plan,
    device: torch.device,
    written: torch.dtype,
) -> tuple[Cut, dict[str, Any]]:
    """Selects the units of one site and compensates for the others; and the account of it.

    Args:
        site: which.
        tensors: of its block.
        statistics: of its consumer's inputs.
        plan: what was asked for.
        device: where to solve.
        written: the dtype of the written weights, which errors are of.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    began = time.perf_counter()
    with naming(site.consumer):
        cut, diagnostics = _solve_site(site, tensors, statistics, plan, device, written)
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


def assembled(
    block: BlockLayout,
    tensors: dict[str, Tensor],
    cuts: Sequence[Cut],
    rows: list[dict[str, Any]],
    plan: Plan,
) -> Solved:
    """A solved block of its cut tensors, which are completed to those of the output format."""
    kept = {cut.site.key: cut.units.indices.cpu() for cut in cuts}
    return Solved(block, _as_planned(tensors, plan, block), kept, rows)


def _solve_site(
    site: Site,
    tensors: Mapping[str, Tensor],
    statistics: SiteStatistics,
    plan: Plan,
    device: torch.device,
    written: torch.dtype,
) -> tuple[Cut, dict[str, Any]]:
    weight = tensors[site.weight].to(device)
    fitted, statistics.gram = statistics.gram, None
    assert fitted is not None
    held = statistics.held_out if statistics.held_out and statistics.held_out.tokens else None
    fitted.check_finite()
    if held is not None:
        held.check_finite()
    gram = fitted + held if held is not None and plan.judges_are_fitted else fitted
    with recording() as events:
        units = _kept(site, weight, gram, plan)
    if units.everything and statistics.target is None:
        return Cut(site, units, None), {"events": events}
    kept = site.kept_columns(units)
    counted = {"tokens": gram.tokens} if site.routed else {}
    if not gram.tokens:  # of no tokens there is no error
        result = compensate(weight, gram, kept, method="none")
        unknown = {**counted, **result.diagnostics, **dict.fromkeys(ERRORS)}
        return Cut(site, units, result), {**unknown, "events": [*events, UNSEEN]}
    recipe, method = plan.recipe, plan.recipe.method
    needs_held_out = "held_out" in method.needs

    def compensated(sums: Gram) -> SiteResult:
        return compensate(
            weight,
            sums,
            kept,
            method=method,
            value_weight=value_rows(tensors, site, units) if "value" in method.needs else None,
            held_out=held if needs_held_out else None,
            target=statistics.target,
            solve_dtype=choose_solve_dtype(recipe.pruning.solve_dtype, device),
            **recipe.pruning.options,
        )

    judge = Judge(
        weight.to(gram.x), KeptSet(kept.indices.to(gram.x.device), kept.size), gram,
        None if needs_held_out else held, statistics.target, statistics.held_out_target,
    )  # fmt: skip
    with recording() as drawn:
        result = compensated(gram)
        if recipe.calibration.guard and judge.few and not needs_held_out:
            judged = (lambda: result) if gram is fitted else (lambda: compensated(fitted))
            unjudged = 1.0 if method.shrinks else judge.trust
            result = judge.guarded(
                result,
                judged,
                unjudged=unjudged if site.routed else 0.0,
                windows=recipe.calibration.windows,
            )
        elif gram is fitted:
            result = judge.with_held_out_errors(result)
        named = isinstance(recipe.pruning.compensation, str)
        result = judge.as_written(result, written, checked=named)
    events = list(dict.fromkeys([*events, *result.diagnostics.get("events", []), *drawn]))
    return Cut(site, units, result), {**counted, **result.diagnostics, "events": events}


def _kept(site: Site, weight: Tensor, sums: Gram, plan: Plan) -> KeptSet:
    """The units that stay: those that were given, or else those of the highest scores."""
    given = None if plan.recipe.kept is None else plan.recipe.kept.of_site(site)
    if given is not None:
        return KeptSet(given.indices.to(sums.x.device), given.size)
    keep = plan.widths.of(site)
    scores = column_scores(
        plan.recipe.score if sums.tokens else SELECTIONS["magnitude"],
        weight.to(sums.xx),  # variances are differences of sums: scores want their float64
        sums,
        units=site.units,
        keep=keep,
        seed=own_seed(plan.recipe.calibration.seed, site.block),
    )
    return keep_highest(unit_scores(scores, site.units), keep)


def _check_recordable(row: dict[str, Any]) -> None:
    """Raises OptionError where a method's diagnostics cannot stand in a report."""
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the compensation has diagnostics for {row['module']} that no report holds: {error}"
        ) from error


def own_seed(seed: int, block: int) -> int:
    """A score that takes a seed gets one of its own in every block."""
    return (seed * 1_000_003 + block) % SEEDS


def _as_planned(tensors: dict[str, Tensor], plan: Plan, block: BlockLayout) -> dict[str, Tensor]:
    """Exactly the tensors of the output format: biases it demands and nobody computed are 0.

    A tensor that the plan did not foresee is an error of this program: none is ever dropped.
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
    found = {name: tensor.shape for name, tensor in (tensors | zeros).items()}
    if found != planned:
        odd = sorted(name for name in {**found, **planned} if found.get(name) != planned.get(name))
        raise AssertionError(f"{odd[0]}: {found.get(odd[0])}, planned {planned.get(odd[0])}")
    return tensors | zeros
