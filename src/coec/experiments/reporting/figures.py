"""Figures of points over settings, as a grid declares them, drawn by matplotlib."""

import io
import warnings
from dataclasses import dataclass
from math import ceil
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from pandas import DataFrame, MultiIndex, concat, to_numeric

from coec.experiments.declarations import QUANTITIES, Declaration
from coec.experiments.reporting.frame import (
    ABSENT,
    DENSE,
    Results,
    along,
    chosen,
    differing,
    each,
    matching,
    setting_text,
)
from coec.experiments.rows import SETTING_NAMES

AXIS_NAMES = {
    "sparsity": "Compression ratio", "samples": "Calibration sequences", "alpha": "α",
    "lambda_a": "λₐ", "delta": "δ", "rounds": "Cap on the rounds", "ridge": "Ridge λ",
    "rescale_ridge": "Ridge λ of the rescale", "seed": "Seed", "holdout": "Held-out share",
    "seq_len": "Tokens per sequence", "slices": "Slices",
    "block": "Block", "round": "Round (0: slice; 1: left rotation and rescale)",
}  # fmt: skip
"""Names along x; other settings keep the names of their flags."""
_COLOURS = {
    DENSE: "#1d2229", "none": "#737b86", "bias": "#b45309", "least-squares": "#2f7d4f",
    "rcpu": "#1f74c4", "coec": "#b3243a",
}  # fmt: skip
_OTHER_COLOUR = "#7c4dba"
_LINE_STYLES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v", "x")
_STYLE: dict[Any, Any] = {
    "font.size": 9.5, "axes.titlesize": 9.5, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#e4e6e9", "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "lines.markersize": 5,
    "text.parse_math": False,
}  # fmt: skip
_WIDTH, _HEIGHT, _LINE = 4.0, 2.7, 0.21
"""Size of one panel, and the height of a line of the legend, in inches."""


@dataclass(frozen=True)
class Figure:
    """Panels by title, each a table of y: lines by x, columns by compensation and label.

    The points of a repair that is not along x are the same for all x. Settings along x have a tick
    for every value.
    """

    title: str
    panels: dict[str, DataFrame]
    x_label: str
    y_label: str
    is_setting: bool
    y_log: bool
    notes: tuple[str, ...]


def figure(item: Declaration, cells: DataFrame, results: Results) -> list[Figure]:
    """Draw quantities by `x`: a panel per place along `each`; none where x does not vary."""
    if "values" not in item.model_fields_set:
        item = item.model_copy(update={"values": ["perplexity"]})
    data = chosen(item, cells, results).dropna(subset=["number"])
    levels = data[matching(data, item.reference)]
    data = data.drop(levels.index)
    x_label = AXIS_NAMES.get(item.x, item.x)
    if item.dense:
        dense = chosen(item.model_copy(update={"where": {}}), results.dense, results)
        data = concat([data, dense[dense["model"].isin(data["model"])]], ignore_index=True)
    if item.x not in data:
        return []
    data = data.assign(x=to_numeric(data[item.x], errors="coerce")).dropna(subset=["x"])
    if data.loc[~data["dense"], "x"].nunique() < 2:
        return []
    if item.x == "parameters":
        unit, word = (1e9, "billions") if data["x"].max() >= 1e9 else (1e6, "millions")
        data, x_label = data.assign(x=data["x"] / unit), f"Parameters, {word}"
    level_of = {tuple(places.values()): group for places, group in each(levels, item)}
    panels = {}
    for places, group in each(data, item):
        panel = _lines(item, group)
        if (level := level_of.get(tuple(places.values()))) is not None:
            words = ", ".join(setting_text(v) for values in item.reference.values() for v in values)
            for (compensation, label), value in _lines(item, level.assign(x=0.0)).iloc[0].items():
                panel[compensation, f"{label}, {words}"] = value
        panels[", ".join(places.values())] = panel
    y_label = " / ".join(QUANTITIES[name].title for name in item.values)
    is_setting = item.x in SETTING_NAMES
    notes = tuple(item.notes)
    return [Figure(item.figure, panels, x_label, y_label, is_setting, item.y_log, notes)]


def _lines(item: Declaration, cells: DataFrame) -> DataFrame:
    """Return the means of y by x, a column per repair with the settings that tell it apart."""
    pruned = cells[~cells["dense"]]
    axes = ["selection", "compensation"]
    names = [*axes, *differing(pruned, [*axes, *item.each, item.x])]
    several = pruned["selection"].nunique() > 1
    keys = [along(cells, name, item) for name in (*names, "value")]
    table = cells.groupby([*keys, "x"], observed=True)["number"].mean()
    table = table.unstack(list(range(len(keys))))

    def label(key: tuple[str, ...]) -> str:
        selection, compensation, *settings, value = key
        method = f"{selection} + {compensation}" if several else compensation
        words = [f"{n} = {text}" for n, text in zip(names[2:], settings) if text != ABSENT]
        words += [value] if len(item.values) > 1 else []
        return DENSE if compensation == DENSE else ", ".join([method, *words])

    table.columns = MultiIndex.from_tuples([(key[1], label(key)) for key in table.columns])
    return table


def draw(figure: Figure) -> dict[str, bytes]:
    """Return the whole figure as files by their suffix; no two runs differ."""
    columns = min(3 if len(figure.panels) > 4 else 2, len(figure.panels))
    lines = ceil(len(figure.panels) / columns)
    labels = dict.fromkeys(label for panel in figure.panels.values() for _, label in panel)
    in_legend = max(1, 52 * columns // (max(map(len, labels)) + 10))
    height = _HEIGHT * lines + _LINE * ceil(len(labels) / in_legend)
    files = {}
    with rc_context({**_STYLE, "svg.hashsalt": figure.title}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # labels are too long
        canvas = Canvas((_WIDTH * columns, height), layout="constrained")
        handles: dict[str, Any] = {}
        for index, (title, panel) in enumerate(figure.panels.items(), 1):
            axes = canvas.add_subplot(lines, columns, index)
            axes.set(title=title, xlabel=figure.x_label, ylabel=figure.y_label)
            _plot(axes, panel, handles)
            if figure.is_setting:
                _scale(axes.xaxis, [float(x) for x in panel.index])
            if figure.y_log:
                _scale(axes.yaxis, [])
        canvas.legend(handles.values(), handles, loc="outside lower center", ncols=in_legend)
        for suffix, date in (("pdf", "CreationDate"), ("svg", "Date")):
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=suffix, metadata={date: None})
            canvas.set_layout_engine("none")  # the first file has laid it out
            files[suffix] = buffer.getvalue()
    return files


def _plot(axes: Any, panel: DataFrame, handles: dict[str, Any]) -> None:
    """Draw a line per column: its compensation chooses the colour, and the next free style."""
    drawn: dict[str, int] = {}
    for (compensation, label), column in panel.items():
        points = column.dropna()
        style = drawn[compensation] = drawn.get(compensation, -1) + 1
        marker = "*" if compensation == DENSE else _MARKERS[style % len(_MARKERS)]
        (line,) = axes.plot(
            points.index, points, linestyle=_LINE_STYLES[style % len(_LINE_STYLES)],
            marker=marker, color=_COLOURS.get(compensation, _OTHER_COLOUR),
        )  # fmt: skip
        handles.setdefault(label, line)


def _scale(axis: Any, values: list[float]) -> None:
    """Make a wide axis logarithmic, with plain numbers; `values` have a tick each if they are few.

    Without values it is logarithmic however narrow it is.
    """
    positive = [value for value in values if value > 0]
    wide = not values or (len(positive) > 1 and max(positive) >= 8 * min(positive))
    set_scale = getattr(axis.axes, f"set_{axis.axis_name}scale")
    if wide and values and min(values) <= 0:
        set_scale("symlog", linthresh=min(positive))
    elif wide:
        set_scale("log")
        low, high = axis.get_data_interval()
        axis.set_major_locator(MaxNLocator(5) if high < 5 * low else LogLocator(subs=(1, 2, 5)))
    if 0 < len(values) <= 10:
        axis.set_ticks(values, [setting_text(value) for value in values])
    elif wide:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())
