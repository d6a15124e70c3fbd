"""Rounds, errors and angles inside the modules of a model."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from coec.experiments.declarations import Declaration, Series
from coec.experiments.reporting.axes import SITES, Context, in_order, of_module, rows_of
from coec.experiments.reporting.drawing import Curve, Figure, Panel, role
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.values import (
    NO_DATUM,
    Datum,
    Table,
    amount,
    grouped,
    method_name,
    percent,
    significant,
)
from coec.experiments.rows import AnglesOfRow, Row

_CURVES = 300
"""Curves drawn in one panel; of more, evenly spaced ones."""
_ROUNDING = 1e-9
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23}
"""A step is rounding if it raises a curve by at most this fraction of it, or by 16 eps of the dtype
of the solver (a relative error is a difference of numbers of size 1); the solver does the same."""


def geometry(item: Declaration, context: Context) -> list[Table]:
    """Draw mean principal angles between original, pruned and repaired weights' frames."""
    rows, body = rows_of(item, context), []
    for row in rows:
        for site in SITES:
            measured = [s.geometry for s in row.sites if s.site == site and s.geometry]
            if measured:
                labels = (Datum(row.model), Datum(method_name(row)), Datum(site))
                body.append((*labels, *_angles(measured)))
    heads = (
        "Model", "Method", "Site", "Modules", "O–P, degrees", "O–C, degrees", "P–C, degrees",
        "O–C above O–P", "Discrepancy, mean", "Discrepancy, max",
    )  # fmt: skip
    table = Table(item.table, heads, tuple(body), 3, item.notes, protocol(rows))
    return [table] if body else []


def _angles(measured: Sequence[AnglesOfRow]) -> tuple[Datum, ...]:
    def known(name: str) -> list[float]:
        return [v for v in (getattr(angles, name) for angles in measured) if v is not None]

    means = [
        amount(statistics.fmean(known(name)) if known(name) else None, 1)
        for name in ("angle_op", "angle_oc", "angle_pc")
    ]
    pairs = [(g.angle_op, g.angle_oc) for g in measured]
    compared = [(op, oc) for op, oc in pairs if op is not None and oc is not None]
    above, total = sum(oc > op for op, oc in compared), len(compared)
    moved = known("discrepancy")
    return (
        Datum(str(len(measured)), len(measured)),
        *means,
        Datum(f"{above} of {total}", above / total) if compared else NO_DATUM,
        significant(statistics.fmean(moved) if moved else None, 2),
        significant(max(moved, default=None), 2),
    )


def _curves(rows: Iterable[Row], name: str) -> list[Sequence[float]]:
    """Return the per-round values of every module that has at least two."""
    curves = (getattr(site, name) for row in rows for site in row.sites)
    return [values for values in curves if len(values) > 1]


def non_increasing(values: Sequence[float], eps: float = _EPS["float64"]) -> bool:
    """Tell whether no step raises the curve by more than rounding."""
    return all(after <= before * (1 + _ROUNDING) + 16 * eps for before, after in pairwise(values))


def falling(rows: Iterable[Row], name: str) -> tuple[int, int]:
    """Count the modules whose curves never rise, and all modules with curves.

    Objectives count from the second value on: the first is the slice's, on rows of its own.
    """
    first = 1 if name == "objectives_per_round" else 0
    fell = [
        non_increasing(values[first:], _EPS.get(row.setting("solve_dtype"), _EPS["float64"]))
        for row in rows
        for values in _curves([row], name)
    ]
    return sum(fell), len(fell)


def rounds(item: Declaration, context: Context) -> list[Figure]:
    """Draw the error by round relative to the slice's: a grey line per module, their mean in blue.

    A module that has stopped keeps its last value in the mean.
    """
    rows, panels, zero, largest = rows_of(item, context), [], 0, 0
    for model, subset in grouped(rows, lambda r: r.model).items():
        curves = _curves(subset, "errors_per_round")
        relative = [[value / curve[0] for value in curve] for curve in curves if curve[0] > 0]
        zero, largest = zero + len(curves) - len(relative), max(largest, len(curves))
        if relative:
            panels.append(_rounds_panel(model, relative))
    if not panels:
        return []
    sentences = [
        f"{title}: {fell:,} of {count:,} modules never rise, up to rounding."
        for title, name in (
            ("Tempered errors", "errors_per_round"),
            ("Objectives, with the alignment penalty", "objectives_per_round"),
        )
        for fell, count in [falling(rows, name)]
        if count
    ]
    sentences += [f"Not drawn, because their slice has no error: {zero}."] if zero else []
    if largest > _CURVES:
        sentences.append(
            f"Of more than {_CURVES} modules, evenly spaced ones are drawn; mean and counts are "
            "over all of them."
        )
    return [Figure(item.figure, tuple(panels), tuple(sentences), protocol(rows))]


def _rounds_panel(model: str, relative: Sequence[Sequence[float]]) -> Panel:
    longest = max(map(len, relative))
    padded = [[*values, *[values[-1]] * (longest - len(values))] for values in relative]
    mean = [statistics.fmean(column) for column in zip(*padded)]
    drawn = relative[:: -(-len(relative) // _CURVES)]
    grey = [Curve(range(len(v)), v, role="faint", width=0.7) for v in drawn]
    grey[0] = replace(grey[0], label="a module")
    blue = Curve(range(longest), mean, "mean of the modules", "mean", width=2.2)
    title = f"{model}, {len(relative)} modules"
    label = "Round (0: slice; 1: left rotation and rescale)"
    return Panel(title, (*grey, blue), label, "Tempered error / slice's", whole_x=True)


def blocks(item: Declaration, context: Context) -> list[Figure]:
    """Draw quantities of the modules by block, at the highest sparsity of one selection."""
    chosen, panels = _same_slice(rows_of(item, context)), []
    for model, rows in grouped(chosen, lambda r: r.model).items():
        best = _one_per_repair(rows)
        for site, name in SITES.items():
            lines = [c for series in item.series for c in _by_block(best, site, series)]
            if len([line for line in lines if line.x]) > 1:
                panel = Panel(f"{model}, {name}", tuple(lines), "Block", item.x_label)
                panels.append(replace(panel, from_zero=True, whole_x=True))
    if not panels:
        return []
    words = {
        "selection": chosen[-1].setting("selection"), "sparsity": percent(chosen[-1].sparsity),
        "compensation": chosen[-1].setting("compensation"),
    }  # fmt: skip
    caption = tuple(note.format_map(words) for note in item.notes)
    return [Figure(item.figure, tuple(panels), caption, protocol(chosen))]


def _by_block(rows: Sequence[Row], site: str, series: Series) -> list[Curve]:
    """Return the last repair's line; where the series has no label a line for every repair."""
    curves = []
    for row in rows if not series.label else rows[-1:]:
        repair = str(row.setting("compensation"))
        if not series.label and repair == "none":
            continue
        values = [(s.block, of_module(s, series.value or "")) for s in row.sites if s.site == site]
        points = [(float(block), value) for block, value in values if value is not None]
        colour = series.role if series.label else role(repair)
        x, y = [block for block, _ in points], [value for _, value in points]
        curves.append(Curve(x, y, series.label or repair, colour, series.line, series.marker))
    return curves


def _same_slice(rows: Sequence[Row]) -> list[Row]:
    """Choose rows whose kept units are the same: one selection, one sparsity."""
    repaired = [row for row in rows if row.sites]
    highest = max((row.sparsity for row in repaired), default=0.0)
    at = [row for row in repaired if row.sparsity == highest]
    selections = {row.setting("selection"): None for row in at}
    selection = "rcpu" if "rcpu" in selections else next(iter(selections), None)
    return sorted((row for row in at if row.setting("selection") == selection), key=in_order)


def _one_per_repair(rows: Sequence[Row]) -> list[Row]:
    """Choose, of one model's rows, the best of every repair on the best row's calibration.

    Another calibration keeps other units, whose errors do not compare.
    """

    def perplexity(row: Row) -> float:
        value = row.measured("perplexity")
        return float("inf") if value is None else value

    def calibration(row: Row) -> tuple[Any, ...]:
        return row.calibration.windows_sha256, row.setting("holdout")

    best = min(rows, key=perplexity)
    comparable = [row for row in rows if calibration(row) == calibration(best)]
    repairs = grouped(comparable, lambda r: r.setting("compensation"))
    return [min(rows_of_repair, key=perplexity) for rows_of_repair in repairs.values()]
