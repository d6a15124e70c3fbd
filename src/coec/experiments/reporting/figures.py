"""Figures of a grid: a metric along sparsity, or along the setting that the grid sweeps."""

import io
from collections.abc import Iterable
from math import ceil
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from pandas import DataFrame, to_numeric

from coec.experiments.reporting.frame import ABSENT, DENSE, METRICS

_STYLE: dict[Any, Any] = {
    "font.size": 9.5, "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e4e6e9",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "text.parse_math": False,
}  # fmt: skip
_WIDTH, _HEIGHT, _LINE = 4.0, 2.7, 0.21
"""Size of a panel, and the height of a line of the legend, in inches."""
_MARKERS = "os^Dvx"


def swept(lines: DataFrame, axes: list[str]) -> str | None:
    """Name the axis with the most numbers, one that every method has rather than another."""

    def rank(name: str) -> tuple[bool, int]:
        numbers = to_numeric(lines.loc[lines["method"] != DENSE, name], errors="coerce")
        return bool(numbers.notna().all()), numbers.nunique()

    ranks = {name: rank(name) for name in axes if name not in ("model", "method")}
    return max((name for name in ranks if ranks[name][1] > 1), key=ranks.__getitem__, default=None)


def draw(lines: DataFrame, axes: list[str], metric: str) -> dict[str, bytes]:
    """Draw a metric of `averages`, and return the files by suffix; none where nothing is swept.

    A panel is a model, at one sparsity unless that is swept; a line is a method, with the settings
    that tell it apart. One with fewer than two places along the swept axis is a level, as the dense
    model is.
    """
    x = swept(lines, axes)
    lines = lines.dropna(subset=[metric])
    if x is None or lines.empty:
        return {}
    # Panels by model and sparsity → lines by method and its settings → colours by line
    apart = ["model"] if x == "sparsity" else ["model", "sparsity"]
    lines = lines.assign(x=to_numeric(lines[x], errors="coerce"))
    lines.loc[lines["method"] == DENSE, "x"] = None
    names = [name for name in axes if name not in (*apart, x)]
    lines["line"] = [_line(names, values) for values in lines[names].itertuples(index=False)]
    colours = {line: f"C{n % 10}" for n, line in enumerate(dict.fromkeys(lines["line"]))}
    panels = list(lines.groupby(apart, sort=False))
    columns = min(len(panels), 3)
    height = _HEIGHT * ceil(len(panels) / columns) + _LINE * ceil(len(colours) / columns)
    with rc_context({**_STYLE, "svg.hashsalt": "coec"}):
        figure = Figure((_WIDTH * columns, height), layout="constrained")
        grid = figure.subplots(ceil(len(panels) / columns), columns, squeeze=False)
        handles: dict[str, Any] = {}
        for panel, (place, group) in zip(grid.flat, panels):
            model, *sparsity = place
            title = ", ".join([model, *(f"{100 * value:.4g} %" for value in sparsity)])
            panel.set(title=title, xlabel=x, ylabel=METRICS[metric].title)
            handles |= _plot(panel, group, metric, colours)
            _scale(panel, sorted(group["x"].dropna().unique()))
        for panel in grid.flat[len(panels) :]:
            panel.remove()
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
        return {suffix: _saved(figure, suffix) for suffix in ("pdf", "svg")}


def _line(names: list[str], values: Iterable[str]) -> str:
    method, *settings = values
    words = [f"{n} = {value}" for n, value in zip(names[1:], settings) if value != ABSENT]
    return ", ".join([method, *words])


def _plot(panel: Any, group: DataFrame, metric: str, colours: dict[str, str]) -> dict[str, Any]:
    handles = {}
    for number, (line, points) in enumerate(group.groupby("line", sort=False)):
        points = points.sort_values("x")
        if points["x"].nunique() < 2:
            drawn = panel.axhline(points[metric].mean(), color=colours[line], linestyle="--")
        else:
            marker = _MARKERS[number % len(_MARKERS)]
            (drawn,) = panel.plot(points["x"], points[metric], marker=marker, color=colours[line])
        handles[line] = drawn
    return handles


def _scale(panel: Any, values: list[float]) -> None:
    """Give every value a tick, if they are few, and stretch a wide range by logarithms."""
    positive = [value for value in values if value > 0]
    if positive and positive[-1] >= 8 * positive[0]:
        panel.set_xscale("symlog", linthresh=positive[0])
    if len(values) <= 10:
        panel.set_xticks(values, [f"{value:g}" for value in values])
    panel.minorticks_off()


def _saved(figure: Figure, suffix: str) -> bytes:
    """Return the file; no two runs differ."""
    buffer = io.BytesIO()
    date = {"pdf": "CreationDate", "svg": "Date"}[suffix]
    figure.savefig(buffer, format=suffix, metadata={date: None})
    return buffer.getvalue()
