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
    rows_of,
    words,
)
from coec.experiments.reporting.drawing import Curve, Figure, Panel, Scale, role
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.values import FORMATS, mean_of, setting_text
from coec.experiments.rows import Row

AXIS_NAMES = {
    "sparsity": "Compression ratio", "samples": "Calibration sequences", "alpha": "α",
    "lambda_a": "λₐ", "delta": "δ", "rounds": "Cap on the rounds", "ridge": "Ridge λ",
    "rescale_ridge": "Ridge λ of the rescale", "seed": "Seed", "holdout": "Held-out share",
    "seq_len": "Tokens per sequence", "damping": "Damping", "slices": "Slices",
}  # fmt: skip
"""Names of settings along an axis; other settings keep the names of their flags."""
_MARKERS = {"none": "o", "bias": "s", "least-squares": "D", "rcpu": "^", "coec": "o"}
_LINE_STYLES = ("-", "--", ":", "-.")
_FAR = 1.25
"""Errors above so many times the slice's would leave no room to tell the others apart."""


def _along(row: Row, name: str) -> float | None:
    """Return the place of a row along x: the value of a setting, or the parameters left."""
    return number(row.parameters.after if name == "parameters" else row.setting(name))


def _places(values: Sequence[float]) -> tuple[dict[float, float], Scale]:
    """Place sorted values: a wide range is logarithmic, or evenly spaced if it holds a zero."""
    positive = [value for value in values if value > 0]
    wide = bool(positive) and positive[-1] >= 8 * positive[0]
    if wide and values[0] <= 0:
        return {value: float(i) for i, value in enumerate(values)}, "linear"
    return {value: value for value in values}, "log" if wide else "linear"


def lines(item: Declaration, context: Context) -> list[Figure]:
    """Draw a quantity by `x`: a panel per value of `each`, a line per repair or as declared."""
    x, y = item.x, item.values[0]
    rows = [r for r in rows_of(item, context) if quantity(r, y) and _along(r, x) is not None]
    levels = [series.only for series in item.series if series.level]
    varied = [row for row in rows if not any(matches(row, level) for level in levels)]
    values = sorted({place for row in varied if (place := _along(row, x)) is not None})
    if len(values) < 2:
        return []
    places, scale = _places(values)
    ticks = tuple((places[value], setting_text(value)) for value in values)
    label, unit = item.x_label or AXIS_NAMES.get(x, x), 1.0
    if x == "parameters":
        unit, word = (1e9, "billions") if values[-1] >= 1e9 else (1e6, "millions")
        places, scale, ticks = {value: value / unit for value in values}, "linear", ()
        label = f"Parameters, {word}"
    panels = []
    for keys, subset in Axes(item, context.grid, rows).split(item.each):
        draw = _declared_lines if item.series else _lines_by_method
        curves = draw(Axes(item, context.grid, subset), places)
        if item.dense:
            curves += _dense_point(context, keys["model"], unit)
        y_scale: Scale = "log" if item.y_log else "linear"
        heading = ", ".join(words(keys).values())
        panels.append(Panel(heading, tuple(curves), label, FORMATS[y].head, scale, y_scale, ticks))
    return [Figure(item.figure, tuple(panels), item.notes, protocol(rows, varies=(x,)))]


def _points(
    item: Declaration, rows: Sequence[Row], places: Mapping[float, float]
) -> tuple[list[float], list[float]]:
    """Return a point per place; several seeds at one are averaged."""
    values_at: dict[float, list[float]] = {}
    for row in rows:
        place = places[_along(row, item.x) or 0.0]
        values_at.setdefault(place, []).extend(quantity(row, item.values[0]))
    means = sorted((x, y) for x, values in values_at.items() if (y := mean_of(values)) is not None)
    return [x for x, _ in means], [y for _, y in means]


def _declared_lines(axes: Axes, places: Mapping[float, float]) -> list[Curve]:
    curves, item = [], axes.item
    for series in item.series:
        rows = [row for row in axes.rows if matches(row, series.only)]
        x, y = _points(item, rows, places) if not series.level else ([], [])
        if series.level and rows:
            level = mean_of(value for row in rows for value in quantity(row, item.values[0]))
            x, y = [min(places.values()), max(places.values())], [level or 0.0] * 2
        if x or not series.level:
            marker = "" if series.level else series.marker
            curves.append(Curve(x, y, series.label, series.role, series.line, marker))
    return curves


def _lines_by_method(axes: Axes, places: Mapping[float, float]) -> list[Curve]:
    """Draw a line per method in its compensation's colour; other settings choose its style."""
    styles = list(dict.fromkeys((r.setting("selection"), axes.differences(r)) for r in axes.rows))
    curves = []
    for (label,), rows in axes.grouped(axes.item.lines).items():
        repair = str(rows[0].setting("compensation"))
        index = styles.index((rows[0].setting("selection"), axes.differences(rows[0])))
        style, marker = _LINE_STYLES[index % len(_LINE_STYLES)], _MARKERS.get(repair, "o")
        x, y = _points(axes.item, rows, places)
        curves.append(Curve(x, y, setting_text(label), role(repair), style, marker))
    return curves


def _dense_point(context: Context, model: str, unit: float) -> list[Curve]:
    dense = context.results.dense.get(model)
    value = dense.measured("perplexity") if dense else None
    size = dense.parameters.after or dense.parameters.before if dense else None
    if value is None or size is None:
        return []
    return [Curve([size / unit], [value], "dense", "ink", "", "*")]


def bars(item: Declaration, context: Context) -> list[Figure]:
    """Draw a bar from fit to held-out error for every repair."""
    rows, panels, beyond = rows_of(item, context), [], dict[str, None]()
    several_sizes = len({row.setting("samples") for row in rows}) > 1
    for keys, subset in Axes(item, context.grid, rows).split(item.each):
        ends = []
        for (label,), at in Axes(item, context.grid, subset).grouped(item.lines).items():
            fit, holdout, slice_error = (
                mean_over_sites(at, keys.get("site"), name)
                for name in ("error_after", "holdout_after", "holdout_before")
            )
            if fit is None or holdout is None:
                continue
            if holdout > _FAR * (inf if slice_error is None else slice_error):
                beyond[label] = None
            else:
                ends.append((label, str(at[0].setting("compensation")), fit, holdout))
        texts = words(keys)
        if "samples" in texts:
            size = f"{texts.pop('samples')} windows"
            texts |= {"samples": size} if several_sizes else {}
        panels += [_bars(ends, ", ".join(texts.values()))] if ends else []
    if not panels:
        return []
    caption = [*item.notes]
    if beyond:
        caption.append(
            f"Where a held-out error is above {_FAR:g} times the slice's it is in the table only: "
            f"{'; '.join(beyond)}."
        )
    return [Figure(item.figure, tuple(panels), tuple(caption), protocol(rows))]


def _bars(ends: Sequence[tuple[str, str, float, float]], title: str) -> Panel:
    places = range(len(ends), 0, -1)
    joined = [
        Curve([fit, holdout], [y, y], role=role(repair), width=3.0)
        for y, (_, repair, fit, holdout) in zip(places, ends)
    ]
    fits = Curve([fit for *_, fit, _ in ends], places, "fit", "ink", "", "o", hollow=True)
    holdouts = Curve([end[-1] for end in ends], places, "held out", "ink", "", "o")
    ticks = tuple((float(y), label) for y, (label, *_) in zip(places, ends))
    return Panel(title, (*joined, fits, holdouts), "Relative output error", "", y_ticks=ticks)
