"""Figures of points over settings, as a grid declares them. A figure without data is left out."""

from collections.abc import Mapping, Sequence
from math import inf

from coec.experiments.declarations import Declaration
from coec.experiments.records import number
from coec.experiments.reporting.axes import (
    Axes,
    Context,
    matches,
    mean_over_sites,
    quantity,
    shown,
    split,
    words,
)
from coec.experiments.reporting.plots import Curve, Figure, Panel, Scale, role
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import mean_of, value_text
from coec.experiments.rows import Row

MARKERS = {"none": "o", "bias": "s", "least-squares": "D", "rcpu": "^", "coec": "o"}
LINE_STYLES = ("-", "--", ":", "-.")
FAR = 1.25
"""Errors above so many times the slice's would leave no room to tell the others apart."""


def along(row: Row, name: str) -> float | None:
    """Where a row lies along a figure's x: the value of a setting, or the parameters left."""
    return number(row.parameters.after if name == "parameters" else row.setting(name))


def places(values: Sequence[float]) -> tuple[dict[float, float], Scale]:
    """Where values lie: a wide range is logarithmic, or evenly spaced if it holds a zero."""
    positive = [value for value in values if value > 0]
    wide = bool(positive) and positive[-1] >= 8 * positive[0]
    if wide and values[0] <= 0:
        return {value: float(i) for i, value in enumerate(values)}, "linear"
    return {value: value for value in values}, "log" if wide else "linear"


def lines(item: Declaration, context: Context) -> list[Figure]:
    """A quantity by `x`, a panel for every value of `each`, a line per repair or as declared."""
    name, what = item.x, item.values[0]
    known = [r for r in shown(item, context) if quantity(r, what) and along(r, name) is not None]
    levels = [series.where for series in item.series if series.level]
    varied = [row for row in known if not any(matches(row, where) for where in levels)]
    values = sorted({x for row in varied if (x := along(row, name)) is not None})
    if len(values) < 2:
        return []
    place, scale = places(values)
    ticks = tuple((place[value], value_text(value)) for value in values)
    label, unit = item.x_label or name, 1.0
    if name == "parameters":
        unit, word = (1e9, "billions") if values[-1] >= 1e9 else (1e6, "millions")
        place, scale, ticks = {value: value / unit for value in values}, "linear", ()
        label = f"parameters, {word}"
    panels = []
    for keys, found in split(known, item.each, item, context.grid):
        curves = (
            _named(item, found, place) if item.series else _by_method(item, context, found, place)
        )
        if item.dense:
            curves += _dense_point(context, keys["model"], unit)
        y_scale: Scale = "log" if item.y_log else "linear"
        heading = ", ".join(words(keys).values())
        panels.append(
            Panel(heading, tuple(curves), label, what.replace("_", " "), scale, y_scale, ticks)
        )
    return [Figure(item.figure, tuple(panels), item.notes, protocol(known, varies=(name,)))]


def _points(
    item: Declaration, rows: Sequence[Row], place: Mapping[float, float]
) -> tuple[list[float], list[float]]:
    """A point per place; several seeds at one are averaged."""
    at: dict[float, list[float]] = {}
    for row in rows:
        at.setdefault(place[along(row, item.x) or 0.0], []).extend(quantity(row, item.values[0]))
    means = sorted((x, y) for x, found in at.items() if (y := mean_of(found)) is not None)
    return [x for x, _ in means], [y for _, y in means]


def _named(item: Declaration, rows: Sequence[Row], place: Mapping[float, float]) -> list[Curve]:
    curves = []
    for series in item.series:
        found = [row for row in rows if matches(row, series.where)]
        x, y = _points(item, found, place) if not series.level else ([], [])
        if series.level and found:
            level = mean_of(value for row in found for value in quantity(row, item.values[0]))
            x, y = [min(place.values()), max(place.values())], [level or 0.0] * 2
        if x or not series.level:
            marker = "" if series.level else series.marker
            curves.append(Curve(x, y, series.label, series.role, series.line, marker))
    return curves


def _by_method(
    item: Declaration, context: Context, rows: Sequence[Row], place: Mapping[float, float]
) -> list[Curve]:
    """A line per method, in its compensation's colour; what else tells them apart is its style."""
    axes, curves = Axes(item, context.grid, rows), []
    alike = list(dict.fromkeys((row.setting("selection"), axes.differs(row)) for row in rows))
    for (label,), found in axes.grouped(item.lines).items():
        comp = str(found[0].setting("compensation"))
        index = alike.index((found[0].setting("selection"), axes.differs(found[0])))
        style, marker = LINE_STYLES[index % len(LINE_STYLES)], MARKERS.get(comp, "o")
        curves.append(
            Curve(*_points(item, found, place), value_text(label), role(comp), style, marker)
        )
    return curves


def _dense_point(context: Context, model: str, unit: float) -> list[Curve]:
    dense = context.results.dense.get(model)
    value = dense.measured("perplexity") if dense else None
    size = dense.parameters.after or dense.parameters.before if dense else None
    if value is None or size is None:
        return []
    return [Curve([size / unit], [value], "dense", "ink", "", "*")]


def bars(item: Declaration, context: Context) -> list[Figure]:
    """From fit to held-out error of every repair, a bar each."""
    rows, panels, beyond = shown(item, context), [], dict[str, None]()
    sizes = len({row.setting("samples") for row in rows}) > 1
    for keys, found in split(rows, item.each, item, context.grid):
        axes, ends = Axes(item, context.grid, found), []
        for (label,), at in axes.grouped(item.lines).items():
            fit, held, sliced = (
                mean_over_sites(at, keys.get("site"), name)
                for name in ("error_after", "holdout_after", "holdout_before")
            )
            if fit is None or held is None:
                continue
            if held > FAR * (inf if sliced is None else sliced):
                beyond[label] = None
            else:
                ends.append((label, str(at[0].setting("compensation")), fit, held))
        said = words(keys)
        if "samples" in said:
            said["samples"] += " windows"
        kept = [text for name, text in said.items() if name != "samples" or sizes]
        panels += [_bars(ends, ", ".join(kept))] if ends else []
    if not panels:
        return []
    caption = [*item.notes]
    if beyond:
        caption.append(
            f"Where a held-out error is above {FAR:g} times the slice's it is in the table only: "
            f"{'; '.join(beyond)}."
        )
    return [Figure(item.figure, tuple(panels), tuple(caption), protocol(rows))]


def _bars(ends: Sequence[tuple[str, str, float, float]], title: str) -> Panel:
    places = range(len(ends), 0, -1)
    joined = [
        Curve([fit, held], [y, y], role=role(comp), width=3.0)
        for y, (_, comp, fit, held) in zip(places, ends)
    ]
    fits = Curve([fit for *_, fit, _ in ends], places, "fit", "ink", "", "o", hollow=True)
    helds = Curve([held for *_, held in ends], places, "held out", "ink", "", "o")
    ticks = tuple((float(y), label) for y, (label, *_) in zip(places, ends))
    return Panel(title, (*joined, fits, helds), "relative output error", "", y_ticks=ticks)
