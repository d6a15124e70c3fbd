"""Frames of every pruned module, one tensor at a time, and their summary (docs/lab/ANALYSIS.md)."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
        trained too. There is no penalty then, since it is defined by the dense model's values.

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
    pruned_sites = [site for site in pair.layout.sites if not pair.units[site.key].everything]
    rows = []
    for number, site in enumerate(pruned_sites, start=1):
        rank = ranks["mlp" if site.value is None else "attention"]
        rows.append(_row(pair, site, rank, chosen))
        if progress:
            progress("geometry", number, len(pruned_sites))
    return rows


def check_ranks(ranks: dict[str, int]) -> None:
    """Raise OptionError unless every key is a site and every value a whole number from 1."""
    for site, rank in ranks.items():
        if site not in RANKS:
            raise OptionError(f"unknown site '{site}' in ranks; sites: {', '.join(RANKS)}")
        check_whole(f"the rank of {site}", rank)


def _row(pair: ModelPair, site: Site, rank: int, device: torch.device) -> JsonDict:
    units = pair.units[site.key]
    W0, W_tilde = (
        model.tensor(name).to(device, torch.float64)
        for model, name in ((pair.dense, site.weight), (pair.pruned, pair.smaller[site.key].weight))
    )
    # Trained inputs have no penalty: it is defined by the values of the dense model.
    copied = pair.reads_the_same(site)
    value = None
    if copied and site.value is not None:
        name = site.value.tensor
        stored = value_rows({name: pair.dense.tensor(name)}, site, units)
        value = None if stored is None else stored.to(W0)
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


class Measure(NamedTuple):
    """Measure of a module: its place in a row, its line in a table, and its worst value.

    Attributes:
        label, average, form: what a table calls it, the average over modules that it shows, and
            the format of numbers.
        worst: max or min.
        path: place of the value in a module's row, or of two values whose ratio it is.
    """

    label: str
    average: str
    form: str
    worst: Callable[..., Any]
    path: str

    def read(self, row: JsonDict) -> float | None:
        """Read the measure from a module's row; None where it has none, or a factor of 0."""
        values: list[Any] = []
        for path in self.path.split(" / "):
            value: Any = row
            for name in path.split("."):
                value = None if value is None else value[name]
            values.append(value)
        if len(values) == 1:
            return values[0]
        return values[0] / values[1] if values[1] else None


_FALL = "penalty.pruned / penalty.compensated"
MEASURES = {
    "angle_original_pruned": Measure("angle O–P", "mean", "{:.1f}°", max, "original_pruned.mean"),
    "angle_original_compensated": Measure("angle O–C", "mean", "{:.1f}°", max,
        "original_compensated.mean"),
    "angle_pruned_compensated": Measure("angle P–C", "mean", "{:.1f}°", max,
        "pruned_compensated.mean"),
    "discrepancy": Measure("frame discrepancy", "mean", "{:.2%}", max, "discrepancy"),
    "scale_change": Measure("|log(s_C/s_P)|", "median", "{:.3f}", max, "scale_change"),
    "gap_dense": Measure("σ_r/σ_(r+1) dense", "median", "{:.4f}", min, "gap_dense"),
    "gap_pruned": Measure("… pruned", "median", "{:.4f}", min, "gap_pruned"),
    "gap_compensated": Measure("… compensated", "median", "{:.4f}", min, "gap_compensated"),
    "penalty_pruned": Measure("penalty pruned", "median", "{:.1e}", max, "penalty.pruned"),
    "penalty_compensated": Measure("… compensated", "median", "{:.1e}", max, "penalty.compensated"),
    "penalty_factor": Measure("… before/after", "median", "{:.1f}", min, _FALL),
    "weighted_penalty_pruned": Measure("s²-weighted pruned", "median", "{:.1e}", max,
        "penalty.weighted_pruned"),
    "weighted_penalty_compensated": Measure("… compensated", "median", "{:.1e}", max,
        "penalty.weighted_compensated"),
    "weighted_penalty_factor": Measure("… before/after", "median", "{:.1f}", min,
        "penalty.weighted_pruned / penalty.weighted_compensated"),
}  # fmt: skip


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
        for name, measure in MEASURES.items():
            values = {row["module"]: v for row in modules if (v := measure.read(row)) is not None}
            if not values:
                continue
            # max or min over modules by their value: the module of the worst one
            module = measure.worst(values, key=values.__getitem__)
            summary[site][name] = {
                "mean": statistics.mean(values.values()),
                "median": statistics.median(values.values()),
                "best": (min if measure.worst is max else max)(values.values()),
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
        "what the module reads was trained as well (reconstruct, recover): directions of "
        "the compensated weight are those of changed inputs, and no alignment penalty is "
        "measured": lambda row: row["reads_fitted"],
        "compensation raised the alignment penalty": lambda row: (
            (factor := MEASURES["penalty_factor"].read(row)) is not None and factor < 1
        ),
    }
    for text, holds in cases.items():
        modules = [row["module"] for row in rows if holds(row)]
        if modules:
            notes.append(f"{text} ({len(modules)} of {len(rows)} modules, first: {modules[0]})")
    for row in rows:
        notes += [f"{row['module']}: {event}" for event in row["events"]]
    return notes
