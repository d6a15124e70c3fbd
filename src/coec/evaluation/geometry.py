"""The frames of every pruned module, one tensor at a time, and their summary (docs/ANALYSIS.md)."""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.devices import choose_device
from coec.errors import NumericalError, OptionError
from coec.evaluation.frames import compare_frames
from coec.evaluation.pair import Pair
from coec.events import Progress, recording
from coec.models.dense import Dense
from coec.models.layout import Site
from coec.models.surgery import value_rows
from coec.types import KeptSet

RANKS = {"attention": 16, "mlp": 64}
"""Sizes of the frames in the paper; experts take that of an MLP."""
NARROW_GAP = 1.01
"""Below this `σ_r / σ_{r+1}` rounding of the weights decides which direction is the r-th."""


def geometry(
    dense: str | Path | Dense | None,
    pruned: str | Path | Dense,
    *,
    ranks: dict[str, int] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Frames of every pruned consumer: `compare_frames` on `o_proj` and `down_proj` of every block.

    One dense and one compensated weight are in memory at a time; all is computed in float64.

    Args:
        dense: the dense model; None for the one that the pruned folder's report names.
        pruned: a folder that `coec.prune` wrote.
        ranks: size of the frames by site; None for 16 (attention) and 64 (mlp).
        device: `auto` (CUDA where there is one), or a torch device.
        progress: called with ("geometry", done, total).

    Returns:
        A JSON-ready dict per module: `module`, `site`, units before and after, the fields of
        `Frames`, `events`, and `reads_fitted`: whether what the module reads was fitted as well.
        There is no penalty then, which is of the values that the dense model has. Modules that keep
        every unit are left out.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> rows = coec.geometry("llama", "llama-70")
        >>> rows[0]["original_pruned"]["mean"], rows[0]["discrepancy"]
    """
    check_ranks(ranks or {})
    choose_device(device)
    return measure_geometry(Pair.open(dense, pruned), ranks, device, progress)


def check_ranks(ranks: dict[str, int]) -> None:
    """Raises OptionError unless every key is a site and every value a whole number from 1."""
    for site, rank in ranks.items():
        if site not in RANKS:
            raise OptionError(f"unknown site '{site}' in ranks; sites: {', '.join(RANKS)}")
        if not isinstance(rank, int) or rank < 1:
            raise OptionError(
                f"the rank of {site} must be a whole number of at least 1, got {rank!r}"
            )


def measure_geometry(
    pair: Pair,
    ranks: dict[str, int] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """`geometry` of a pair that is already open."""
    ranks = {**RANKS, **(ranks or {})}
    chosen = choose_device(device)
    modules = list(_pruned_modules(pair))
    rows = []
    for done, (site, units) in enumerate(modules, start=1):
        name = site.consumer
        weights = (_wide(c.tensor(site.weight), chosen) for c in (pair.dense, pair.pruned))
        same = pair.reads_the_same(site)
        value = _value(pair, site, units, chosen) if same else None
        columns = site.kept_columns(units)
        kept = KeptSet(columns.indices.to(chosen), columns.size)
        W0, W_tilde = weights
        try:
            with recording() as events:
                rank = ranks["mlp" if site.value is None else "attention"]
                frames = compare_frames(W0, kept, W_tilde, rank, value_weight=value)
        except NumericalError as error:
            raise NumericalError(f"{name}: {error}") from error
        rows.append(
            {
                "module": name,
                "site": site.kind,
                "units_before": units.size,
                "units_after": len(units.indices),
                **frames.as_dict(),
                "reads_fitted": not same,
                "events": events,
            }
        )
        if progress:
            progress("geometry", done, len(modules))
    return rows


def _pruned_modules(pair: Pair) -> Iterator[tuple[Site, KeptSet]]:
    for site in pair.dense.layout.sites:
        units = pair.kept(site)
        if not units.everything:
            yield site, units


def _wide(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, torch.float64)


def _value(pair: Pair, site: Site, units: KeptSet, device: torch.device) -> Tensor | None:
    if site.value is None:
        return None
    name = site.value.tensor
    rows = value_rows({name: pair.dense.tensor(name)}, site, units)
    return None if rows is None else _wide(rows, device)


Measure = tuple[Callable[[dict[str, Any]], float | None], Callable[..., Any]]

MEASURES: dict[str, Measure] = {
    "angle_original_pruned": (lambda row: row["original_pruned"]["mean"], max),
    "angle_original_compensated": (lambda row: row["original_compensated"]["mean"], max),
    "angle_pruned_compensated": (lambda row: row["pruned_compensated"]["mean"], max),
    "discrepancy": (lambda row: row["discrepancy"], max),
    "scale_change": (lambda row: row["scale_change"], max),
    "gap_dense": (lambda row: row["gap_dense"], min),
    "gap_pruned": (lambda row: row["gap_pruned"], min),
    "gap_compensated": (lambda row: row["gap_compensated"], min),
    "penalty_pruned": (lambda row: _penalty(row, "pruned"), max),
    "penalty_compensated": (lambda row: _penalty(row, "compensated"), max),
    "penalty_factor": (lambda row: _factor(row, "pruned", "compensated"), min),
    "weighted_penalty_pruned": (lambda row: _penalty(row, "weighted_pruned"), max),
    "weighted_penalty_compensated": (lambda row: _penalty(row, "weighted_compensated"), max),
    "weighted_penalty_factor": (
        lambda row: _factor(row, "weighted_pruned", "weighted_compensated"),
        min,
    ),
}
"""What is summed up: how to read it from a module's row, and which end of it is the worst."""


def _penalty(row: dict[str, Any], which: str) -> float | None:
    return None if row["penalty"] is None else row["penalty"][which]


def _factor(row: dict[str, Any], before: str, after: str) -> float | None:
    """By how much the penalty fell; None where nothing is left of it."""
    old, new = _penalty(row, before), _penalty(row, after)
    return old / new if old is not None and new else None


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per site and measure: mean, median, and the best and the worst module.

    Args:
        rows: from `geometry`.

    Returns:
        `{site: {"modules": count, measure: {"mean", "median", "best", "worst", "worst_module"}}}`;
        measures that no module of the site has are left out.
    """
    summary: dict[str, dict[str, Any]] = {}
    for site in RANKS:
        here = [row for row in rows if row["site"] == site]
        if not here:
            continue
        summary[site] = {"modules": len(here), "r": max(row["r"] for row in here)}
        for name, (read, worst_of) in MEASURES.items():
            found = [(value, row["module"]) for row in here if (value := read(row)) is not None]
            if not found:
                continue
            values = [value for value, _ in found]
            worst, module = worst_of(found, key=lambda pair: pair[0])
            summary[site][name] = {
                "mean": statistics.mean(values),
                "median": statistics.median(values),
                "best": min(values) if worst_of is max else max(values),
                "worst": worst,
                "worst_module": module,
            }
    return summary


def oddities(rows: list[dict[str, Any]]) -> list[str]:
    """What a reader of the summary should know: one sentence each.

    Args:
        rows: from `geometry`.
    """
    notes = []
    cases: dict[str, Callable[[dict[str, Any]], bool]] = {
        f"σ_r/σ_(r+1) is below {NARROW_GAP}: which directions the frames hold is all but "
        "arbitrary there": lambda row: any(
            row[f"gap_{weight}"] is not None and row[f"gap_{weight}"] < NARROW_GAP
            for weight in ("dense", "pruned", "compensated")
        ),
        "the frames hold all that the weights read, so O and P nearly coincide; ask for a smaller "
        "rank": lambda row: row["gap_pruned"] is None,
        "what the module reads was fitted to the dense model as well (reconstruct): directions of "
        "the compensated weight are those of changed inputs, and no alignment penalty is "
        "measured": lambda row: row["reads_fitted"],
        "compensation raised the alignment penalty": lambda row: (
            (factor := _factor(row, "pruned", "compensated")) is not None and factor < 1
        ),
    }
    for text, holds in cases.items():
        modules = [row["module"] for row in rows if holds(row)]
        if modules:
            notes.append(f"{text} ({len(modules)} of {len(rows)} modules, first: {modules[0]})")
    for row in rows:
        notes += [f"{row['module']}: {event}" for event in row["events"]]
    return notes
