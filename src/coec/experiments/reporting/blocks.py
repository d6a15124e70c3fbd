"""What happened inside the modules: rounds, errors and angles by block."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from coec.experiments.declarations import Declaration, Series
from coec.experiments.reporting.axes import SITES, Context, of_module, sequential, shown
from coec.experiments.reporting.plots import Curve, Figure, Panel, role
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    Cell,
    Table,
    amount,
    grouped,
    method_name,
    percent,
    significant,
)
from coec.experiments.rows import Geometry, Row

LINES = 300
"""Curves drawn in one panel; of more, evenly spaced ones."""

RISE = 1e-9
EPS = {"float64": 2.0**-52, "float32": 2.0**-23}
"""A step that raises a curve by at most this fraction of it, or by 16 eps of what it was solved in
(a relative error is a difference of numbers of size 1), is rounding; so it is for the solver."""


def geometry(item: Declaration, context: Context) -> list[Table]:
    """Mean principal angles between the frames of the original, pruned and repaired weights."""
    rows, body = shown(item, context), []
    for row in rows:
        for site in SITES:
            measured = [s.geometry for s in row.sites if s.site == site and s.geometry]
            if measured:
                labels = (Cell(row.model), Cell(method_name(row)), Cell(site))
                body.append((*labels, *_geometry_cells(measured)))
    heads = (
        "Model", "Method", "Site", "Modules", "O–P, degrees", "O–C, degrees", "P–C, degrees",
        "O–C above O–P", "Discrepancy, mean", "Discrepancy, max",
    )  # fmt: skip
    table = Table(item.table, heads, tuple(body), 3, item.notes, protocol(rows))
    return [table] if body else []


def _geometry_cells(measured: Sequence[Geometry]) -> tuple[Cell, ...]:
    def known(name: str) -> list[float]:
        return [v for v in (getattr(one, name) for one in measured) if v is not None]

    means = [
        amount(statistics.fmean(known(name)) if known(name) else None, 1)
        for name in ("angle_op", "angle_oc", "angle_pc")
    ]
    pairs = [(g.angle_op, g.angle_oc) for g in measured]
    compared = [(op, oc) for op, oc in pairs if op is not None and oc is not None]
    above = sum(oc > op for op, oc in compared)
    moved = known("discrepancy")
    mean, largest = (statistics.fmean(moved), max(moved)) if moved else (None, None)
    return (
        Cell(str(len(measured)), len(measured)),
        *means,
        Cell(f"{above} of {len(compared)}", above / len(compared)) if compared else Cell(ABSENT),
        *(Cell(ABSENT) if v is None else Cell(significant(v, 2), v) for v in (mean, largest)),
    )


def curves(rows: Iterable[Row], name: str) -> list[list[float]]:
    """The per-round values of every module that has at least two."""
    found = [list(getattr(site, name)) for row in rows for site in row.sites]
    return [values for values in found if len(values) > 1]


def non_increasing(values: Sequence[float], eps: float = EPS["float64"]) -> bool:
    """Whether no step raises the curve by more than rounding."""
    return all(after <= before * (1 + RISE) + 16 * eps for before, after in pairwise(values))


def falling(rows: Iterable[Row], name: str) -> tuple[int, int]:
    """How many modules' curves never rise, and how many there are.

    Objectives count from the second value on: the first is the slice's, on rows of its own.
    """
    first = 1 if name == "objectives_per_round" else 0
    fell = [
        non_increasing(values[first:], EPS.get(row.setting("solve_dtype"), EPS["float64"]))
        for row in rows
        for values in curves([row], name)
    ]
    return sum(fell), len(fell)


def rounds(item: Declaration, context: Context) -> list[Figure]:
    """Relative error by round, a panel per model: a grey line per module, their mean in blue.

    Errors are relative to the slice's, the first value. Where a module stopped, its last value
    goes on into the mean.
    """
    rows, panels, zero, most = shown(item, context), [], 0, 0
    for model, found in grouped(rows, lambda r: r.model).items():
        known = curves(found, "errors_per_round")
        relative = [[value / one[0] for value in one] for one in known if one[0] > 0]
        zero, most = zero + len(known) - len(relative), max(most, len(known))
        if relative:
            panels.append(_rounds_panel(model, relative))
    if not panels:
        return []
    sentences = [
        f"{what}: {fell:,} of {count:,} modules never rise, up to rounding."
        for what, name in (
            ("Tempered errors", "errors_per_round"),
            ("Objectives, with the alignment penalty", "objectives_per_round"),
        )
        for fell, count in [falling(rows, name)]
        if count
    ]
    sentences += [f"Not drawn, because their slice has no error: {zero}."] if zero else []
    if most > LINES:
        sentences.append(
            f"Of more than {LINES} modules, evenly spaced ones are drawn; mean and counts are over "
            "all of them."
        )
    return [Figure(item.figure, tuple(panels), tuple(sentences), protocol(rows))]


def _rounds_panel(model: str, relative: Sequence[Sequence[float]]) -> Panel:
    longest = max(map(len, relative))
    padded = [[*values, *[values[-1]] * (longest - len(values))] for values in relative]
    mean = [statistics.fmean(column) for column in zip(*padded)]
    shown_ones = relative[:: -(-len(relative) // LINES)]
    grey = [Curve(range(len(v)), v, role="faint", width=0.7) for v in shown_ones]
    grey[0] = replace(grey[0], label="a module")
    blue = Curve(range(longest), mean, "mean of the modules", "mean", width=2.2)
    label = "0: slice; 1: left rotation and rescale; then rounds"
    title = f"{model}, {len(relative)} modules"
    return Panel(title, (*grey, blue), label, "tempered error / slice's", x_whole=True)


def blocks(item: Declaration, context: Context) -> list[Figure]:
    """Quantities of the modules by block, at the highest sparsity of one selection."""
    chosen, panels = _same_slice(shown(item, context)), []
    for model, several in grouped(chosen, lambda r: r.model).items():
        found = _one_per_repair(several)
        for site, name in SITES.items():
            lines = [c for series in item.series for c in _by_block(found, site, series)]
            if len([line for line in lines if line.x]) > 1:
                panel = Panel(f"{model}, {name}", tuple(lines), "block", item.x_label)
                panels.append(replace(panel, from_zero=True, x_whole=True))
    if not panels:
        return []
    last = chosen[-1]
    words = {
        "selection": last.setting("selection"), "compensation": last.setting("compensation"),
        "sparsity": percent(last.sparsity),
    }  # fmt: skip
    caption = tuple(note.format_map(words) for note in item.notes)
    return [Figure(item.figure, tuple(panels), caption, protocol(chosen))]


def _by_block(rows: Sequence[Row], site: str, series: Series) -> list[Curve]:
    """The last repair's line; where the series has no label a line for every repair."""
    made = []
    for row in rows if not series.label else rows[-1:]:
        comp = str(row.setting("compensation"))
        if not series.label and comp == "none":
            continue
        named = [(s.block, of_module(s, series.value or "")) for s in row.sites if s.site == site]
        x, y = [float(b) for b, v in named if v is not None], [v for _, v in named if v is not None]
        colour = series.role if series.label else role(comp)
        made.append(Curve(x, y, series.label or comp, colour, series.line, series.marker))
    return made


def _same_slice(rows: Sequence[Row]) -> list[Row]:
    """Rows whose kept units are the same: one selection, one sparsity."""
    known = [row for row in rows if row.sites]
    highest = max((row.sparsity for row in known), default=0.0)
    at = [row for row in known if row.sparsity == highest]
    selections = {row.setting("selection"): None for row in at}
    selection = "rcpu" if "rcpu" in selections else next(iter(selections), None)
    return sorted((row for row in at if row.setting("selection") == selection), key=sequential)


def _one_per_repair(rows: Sequence[Row]) -> list[Row]:
    """Of one model's rows the best of every repair, on the calibration of the best of all.

    Another calibration keeps other units, whose errors do not compare.
    """

    def place(row: Row) -> float:
        value = row.measured("perplexity")
        return float("inf") if value is None else value

    def calibration(row: Row) -> tuple[Any, ...]:
        return row.calibration.windows_sha256, row.setting("holdout")

    best = min(rows, key=place)
    same = [row for row in rows if calibration(row) == calibration(best)]
    repairs = grouped(same, lambda r: r.setting("compensation"))
    return [min(found, key=place) for found in repairs.values()]
