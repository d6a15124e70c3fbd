"""Frames of every pruned module, one tensor at a time, and their summary (docs/ANALYSIS.md)."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.devices import choose_device
from coec.errors import NumericalError, OptionError
from coec.evaluation.frames import compare_frames
from coec.evaluation.pair import ModelPair
from coec.events import Progress, recording
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.layout import Site
from coec.models.surgery import value_rows
from coec.settings.fields import check_whole
from coec.types import KeptSet

RANKS = {"attention": 16, "mlp": 64}
"""Sizes of the frames in the paper; experts take that of an MLP."""
_NARROW_GAP = 1.01
"""Bound of `σ_r / σ_{r+1}` below which rounding of the weights decides the r-th direction."""


def geometry(
    dense: str | Path | Dense | None,
    pruned: str | Path | Dense | ModelPair,
    *,
    ranks: dict[str, int] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[JsonDict]:
    """Compare the frames of every pruned consumer, `o_proj` and `down_proj` of every block.

    One dense and one compensated weight are in memory at a time; all is computed in float64.

    Args:
        dense: the dense model; None for the one that the pruned folder's report names.
        pruned: a folder that `coec.prune` wrote; or both models, opened before.
        ranks: sizes of the frames by site; None for 16 (attention) and 64 (mlp).
        device: `auto` (CUDA where there is one), or a torch device.

    Returns:
        A JSON-ready dict per module that lost units: `module`, `site`, units before and after, the
        fields of `Frames`, `events`, and `reads_fitted`: whether the inputs of the module were
        fitted too. There is no penalty then, since it is defined by the dense model's values.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> rows = coec.geometry("llama", "llama-70")
        >>> rows[0]["original_pruned"]["mean"], rows[0]["discrepancy"]
    """
    ranks = {**RANKS, **(ranks or {})}
    check_ranks(ranks)
    chosen = choose_device(device)
    pair = ModelPair.open(dense, pruned)
    modules = [
        (site, units)
        for site in pair.dense.layout.sites
        if not (units := pair.units[site.key]).everything
    ]
    rows = []
    for number, (site, units) in enumerate(modules, start=1):
        rank = ranks["mlp" if site.value is None else "attention"]
        rows.append(_row(pair, site, units, rank, chosen))
        if progress:
            progress("geometry", number, len(modules))
    return rows


def check_ranks(ranks: dict[str, int]) -> None:
    """Raise OptionError unless every key is a site and every value a whole number from 1."""
    for site, rank in ranks.items():
        if site not in RANKS:
            raise OptionError(f"unknown site '{site}' in ranks; sites: {', '.join(RANKS)}")
        check_whole(f"the rank of {site}", rank)


def _row(pair: ModelPair, site: Site, units: KeptSet, rank: int, device: torch.device) -> JsonDict:
    W0, W_tilde = (
        model.tensor(site.weight).to(device, torch.float64) for model in (pair.dense, pair.pruned)
    )
    copied = pair.reads_the_same(site)
    value = _value(pair, site, units, device) if copied else None
    columns = site.kept_columns(units)
    kept = KeptSet(columns.indices.to(device), columns.size)
    try:
        with recording() as events:
            frames = compare_frames(W0, kept, W_tilde, rank, value_weight=value)
    except NumericalError as error:
        raise NumericalError(f"{site.consumer}: {error}") from error
    return {
        "module": site.consumer,
        "site": site.kind,
        "units_before": units.size,
        "units_after": len(units.indices),
        **asdict(frames),
        "reads_fitted": not copied,
        "events": events,
    }


def _value(pair: ModelPair, site: Site, units: KeptSet, device: torch.device) -> Tensor | None:
    if site.value is None:
        return None
    name = site.value.tensor
    rows = value_rows({name: pair.dense.tensor(name)}, site, units)
    return None if rows is None else rows.to(device, torch.float64)


_Measure = tuple[Callable[[JsonDict], float | None], Callable[..., Any]]

MEASURES: dict[str, _Measure] = {
    "angle_original_pruned": (lambda row: row["original_pruned"]["mean"], max),
    "angle_original_compensated": (lambda row: row["original_compensated"]["mean"], max),
    "angle_pruned_compensated": (lambda row: row["pruned_compensated"]["mean"], max),
    "discrepancy": (itemgetter("discrepancy"), max),
    "scale_change": (itemgetter("scale_change"), max),
    "gap_dense": (itemgetter("gap_dense"), min),
    "gap_pruned": (itemgetter("gap_pruned"), min),
    "gap_compensated": (itemgetter("gap_compensated"), min),
    "penalty_pruned": (lambda row: (row["penalty"] or {}).get("pruned"), max),
    "penalty_compensated": (lambda row: (row["penalty"] or {}).get("compensated"), max),
    "penalty_factor": (lambda row: _factor(row, ""), min),
    "weighted_penalty_pruned": (lambda row: (row["penalty"] or {}).get("weighted_pruned"), max),
    "weighted_penalty_compensated": (
        lambda row: (row["penalty"] or {}).get("weighted_compensated"), max,
    ),
    "weighted_penalty_factor": (lambda row: _factor(row, "weighted_"), min),
}  # fmt: skip
"""Function that reads a measure from a module's row, and max or min, which gives the worst."""


def _factor(row: JsonDict, variant: str) -> float | None:
    """Factor by which the penalty fell; None if it fell to 0."""
    penalty = row["penalty"]
    new = penalty and penalty[f"{variant}compensated"]
    return penalty[f"{variant}pruned"] / new if new else None


def summarize(rows: list[JsonDict]) -> dict[str, JsonDict]:
    """Summarize each measure of the rows of `geometry` by site, if any of its modules has it.

    Returns:
        `{site: {"modules": count, measure: {"mean", "median", "best", "worst", "worst_module"}}}`.
    """
    summary: dict[str, JsonDict] = {}
    for site in RANKS:
        modules = [row for row in rows if row["site"] == site]
        if not modules:
            continue
        summary[site] = {"modules": len(modules), "r": max(row["r"] for row in modules)}
        for name, (read, worst_of) in MEASURES.items():
            values = {row["module"]: v for row in modules if (v := read(row)) is not None}
            if not values:
                continue
            module = worst_of(values, key=values.__getitem__)
            summary[site][name] = {
                "mean": statistics.mean(values.values()),
                "median": statistics.median(values.values()),
                "best": (min if worst_of is max else max)(values.values()),
                "worst": values[module],
                "worst_module": module,
            }
    return summary


def oddities(rows: list[JsonDict]) -> list[str]:
    """List caveats about the rows of `geometry`, one sentence each."""
    notes = []
    cases: dict[str, Callable[[JsonDict], bool]] = {
        f"σ_r/σ_(r+1) is below {_NARROW_GAP}: which directions the frames hold is all but "
        "arbitrary there": lambda row: any(
            row[f"gap_{weight}"] is not None and row[f"gap_{weight}"] < _NARROW_GAP
            for weight in ("dense", "pruned", "compensated")
        ),
        "the frames hold all that the weights read, so O and P nearly coincide; ask for a smaller "
        "rank": lambda row: row["gap_pruned"] is None,
        "what the module reads was fitted to the dense model as well (reconstruct): directions of "
        "the compensated weight are those of changed inputs, and no alignment penalty is "
        "measured": lambda row: row["reads_fitted"],
        "compensation raised the alignment penalty": lambda row: (
            (factor := _factor(row, "")) is not None and factor < 1
        ),
    }
    for text, holds in cases.items():
        modules = [row["module"] for row in rows if holds(row)]
        if modules:
            notes.append(f"{text} ({len(modules)} of {len(rows)} modules, first: {modules[0]})")
    for row in rows:
        notes += [f"{row['module']}: {event}" for event in row["events"]]
    return notes
