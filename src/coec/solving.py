"""The solving stage: a measured block in, its smaller tensors and an account of every site out."""

import functools
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coec.calibration.stream import Measured
from coec.compensation import compensate, relative_errors
from coec.devices import DTYPES
from coec.errors import NumericalError, OptionError
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import Cut, cut_block, value_rows
from coec.planning import Plan
from coec.selection import keep_highest, unit_scores
from coec.settings import SEEDS
from coec.types import Gram, KeptSet, SiteResult

ERRORS = ("error_before", "error_after")


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


def solve_block(measured: Measured, plan: Plan, device: torch.device, dtype: torch.dtype) -> Solved:
    """Selects and compensates every site of a block, and cuts its tensors.

    Depends on its arguments alone, and on no other block. The statistics are taken out of
    `measured`, so that each is freed as soon as it has been used.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    cuts, rows = [], []
    for site in measured.block.sites:
        began = time.perf_counter()
        try:
            cut = _solve_site(measured, site, plan, device)
        except NumericalError as error:
            raise NumericalError(f"{site.consumer}: {error}") from error
        cuts.append(cut)
        rows.append(
            {
                "module": site.consumer,
                "block": site.block,
                "site": site.name,
                "units_before": site.units,
                "units_after": len(cut.units.indices),
                **dict.fromkeys(ERRORS),
                "events": [],
                **cut.result.diagnostics,
                "seconds": time.perf_counter() - began,
            }
        )
        _check_recordable(rows[-1])
    tensors = _as_planned(cut_block(measured.tensors, cuts, dtype), plan, measured.block, dtype)
    kept = {cut.site.key: cut.units.indices.cpu() for cut in cuts}
    return Solved(measured.block, tensors, kept, rows)


def _solve_site(measured: Measured, site: Site, plan: Plan, device: torch.device) -> Cut:
    recipe = plan.recipe
    weight = measured.tensors[site.weight].to(device)
    sums = measured.grams.pop(site.name)
    sums.check_finite()
    # Variances are differences of sums: scores want the float64 that these were summed in.
    scores = _seeded(recipe.score, recipe.calibration.seed, site.block)(weight.to(sums.xx), sums)
    gram = sums.to(DTYPES[recipe.repair.solve_dtype])
    del sums  # the largest matrix there is, unless it is the one that is used
    units = keep_highest(unit_scores(scores, site.units), plan.widths.of(site))
    if units.everything:
        return Cut(site, units, SiteResult(weight))
    needs_value = "value" in recipe.method.needs
    result = compensate(
        weight,
        gram,
        site.kept_columns(units),
        method=recipe.method,
        value_weight=value_rows(measured.tensors, site, units) if needs_value else None,
        **recipe.repair.options,
    )
    held = measured.holdout.pop(site.name, None)
    if held is not None:
        result = _with_holdout(result, weight, held, site.kept_columns(units))
    return Cut(site, units, result)


def _check_recordable(row: dict[str, Any]) -> None:
    """Raises OptionError where a method's diagnostics cannot stand in a report."""
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the compensation has diagnostics for {row['module']} that no report holds: {error}"
        ) from error


def _with_holdout(result: SiteResult, weight: Tensor, gram: Gram, kept: KeptSet) -> SiteResult:
    """Adds the error on the held-out windows to the diagnostics."""
    gram.check_finite()
    kept = KeptSet(kept.indices.to(gram.x.device), kept.size)
    wide = SiteResult(
        result.weight.to(gram.x), None if result.bias is None else result.bias.to(gram.x)
    )
    before, after = relative_errors(weight.to(gram.x), gram, kept, wide)
    held = {"holdout_before": before, "holdout_after": after}
    return replace(result, diagnostics={**result.diagnostics, **held})


def _seeded(score: Callable[..., Tensor], seed: int, block: int) -> Callable[..., Tensor]:
    """A score that takes a seed gets one of its own in every block."""
    if "seed" in inspect.signature(score).parameters:
        return functools.partial(score, seed=(seed * 1_000_003 + block) % SEEDS)
    return score


def _as_planned(
    tensors: dict[str, Tensor], plan: Plan, block: BlockLayout, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Exactly the tensors of the output format: biases it demands and nobody computed are 0.

    A tensor that the plan did not foresee is an error of this program: none is ever dropped.
    """
    planned = {
        name: shape for name, shape in plan.pruned_shapes.items() if name.startswith(block.prefix)
    }
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
