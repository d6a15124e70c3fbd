"""Figures as values, and their drawing by matplotlib: files, and SVG in the colours of a page."""

import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from coec.errors import OptionError

Scale = Literal["linear", "log"]
ROLE_COLOURS = {
    "ink": "#1d2229", "muted": "#767e89", "grid": "#e4e6e9", "faint": "#b9bec5", "mean": "#1a5f9e",
    "none": "#737b86", "bias": "#b45309", "least-squares": "#2f7d4f", "rcpu": "#1f74c4",
    "coec": "#b3243a", "other": "#7c4dba",
}  # fmt: skip
"""Colour by role, in files; the page defines `--plot-ROLE`, light and dark."""
_WIDTH, _HEIGHT = 4.0, 2.7
"""Size of one panel in inches."""
_LINE = 0.21
"""Height of a line of text in inches."""
_STYLE: dict[Any, Any] = {
    "font.size": 9.5, "axes.linewidth": 0.8, "text.color": ROLE_COLOURS["ink"],
    "text.parse_math": False,
    "axes.edgecolor": ROLE_COLOURS["muted"], "axes.labelcolor": ROLE_COLOURS["ink"],
    "xtick.color": ROLE_COLOURS["muted"], "ytick.color": ROLE_COLOURS["muted"],
    "xtick.labelcolor": ROLE_COLOURS["ink"], "ytick.labelcolor": ROLE_COLOURS["ink"],
    "grid.color": ROLE_COLOURS["grid"], "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5,
    "legend.frameon": False, "legend.fontsize": 9, "lines.markersize": 5,
}  # fmt: skip


def role(compensation: str) -> str:
    """Return the role of a compensation's colour."""
    return compensation if compensation in ROLE_COLOURS else "other"


@dataclass(frozen=True)
class Curve:
    """Points joined by a line, or not."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    role: str = "ink"
    line: str = "-"
    marker: str = ""
    hollow: bool = False
    width: float = 1.6


@dataclass(frozen=True)
class Panel:
    """Pair of axes; `whole_x` where x counts something. Ticks are (place, text)."""

    title: str
    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    x_ticks: tuple[tuple[float, str], ...] = ()
    y_ticks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False
    whole_x: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels with a title, and sentences under them."""

    title: str
    panels: tuple[Panel, ...]
    caption: tuple[str, ...] = ()
    settings: str = ""


def check_library(name: str) -> None:
    """Raise OptionError, which names what to install, where a library of the report is missing."""
    try:
        __import__(name)
    except ImportError:
        raise OptionError(f"the report needs {name}: pip install 'coec[report]'") from None


def pictures(figure: Figure) -> dict[str, bytes]:
    """Return the whole figure as files by their suffix; no two runs differ."""
    files = {}
    columns = min(3 if len(figure.panels) > 4 else 2, len(figure.panels))
    with _drawn(figure.panels, columns, {"svg.hashsalt": figure.title}) as canvas:
        for suffix, date in (("pdf", "CreationDate"), ("svg", "Date")):
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=suffix, metadata={date: None})
            canvas.set_layout_engine("none")  # the first file has laid it out
            files[suffix] = buffer.getvalue()
    return files


def page_svg(panel: Panel, prefix: str) -> str:
    """Return the panel as an SVG element whose colours and fonts come from the page.

    Ids that its elements refer to differ from those of other prefixes, and no two runs differ.
    """
    style = {"svg.fonttype": "none", "svg.hashsalt": prefix}
    with _drawn([replace(panel, title="")], 1, style) as canvas:
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern, replacement in (
        (r"(?s)<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", ""),  # style: of all pages
        (r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">'),
        (r'<g id="[^"]*"', "<g"),
        (r"xlink:href", "href"),
        (r"font-family: [^;\"]*(; )?", ""),
        (r'(?<=[ "])(-?\d+\.\d\d)\d+(?=[ "\n])', r"\1"),  # two decimals are below a pixel
    ):
        text = re.sub(pattern, replacement, text)
    for name, colour in ROLE_COLOURS.items():
        text = text.replace(colour, f"var(--plot-{name})")
    label = html.escape(f"{panel.title}: {panel.y_label} by {panel.x_label}")
    return text.replace('role="img"', f'role="img" aria-label="{label}"', 1)


@contextmanager
def _drawn(panels: Sequence[Panel], columns: int, style: dict[Any, Any]) -> Iterator[Any]:
    """Draw panels beside each other over one legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    labels = {c.label for panel in panels for c in panel.curves if c.label}
    longest = max(map(len, labels), default=0)
    legend_columns = max(1, 52 * columns // (longest + 10))
    legend = _LINE * ceil(len(labels) / legend_columns)
    height = max([_HEIGHT, *(0.9 + _LINE * len(panel.y_ticks) for panel in panels)])
    lines = ceil(len(panels) / columns)
    with rc_context({**_STYLE, **style}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # labels are too long
        canvas = Canvas((_WIDTH * columns, height * lines + legend), layout="constrained")
        handles: dict[str, Any] = {}
        for index, panel in enumerate(panels, 1):
            axes = canvas.add_subplot(lines, columns, index)
            for curve, line in zip(panel.curves, _plot(axes, panel)):
                if curve.label:
                    handles.setdefault(curve.label, line)
            _dress(axes, panel)
        if handles:
            canvas.legend(
                handles.values(), handles, loc="outside lower center", ncols=legend_columns
            )
        yield canvas


def _plot(axes: Any, panel: Panel) -> list[Any]:
    lines = []
    for curve in panel.curves:
        colour = ROLE_COLOURS[curve.role]
        lines += axes.plot(
            curve.x, curve.y, linestyle=curve.line or "none", color=colour, marker=curve.marker,
            linewidth=curve.width, markerfacecolor="none" if curve.hollow else colour,
        )  # fmt: skip
    return lines


def _dress(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, loc="right" if panel.y_ticks else "center")
    _scale(axes.xaxis, panel.x_scale, panel.x_ticks)
    _scale(axes.yaxis, panel.y_scale, panel.y_ticks)
    if panel.whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.margins(y=0.5 / len(panel.y_ticks) if panel.y_ticks else 0.08)
    axes.grid(axis="x" if panel.y_ticks and not panel.x_ticks else "y")


def _scale(axis: Any, scale: Scale, ticks: tuple[tuple[float, str], ...]) -> None:
    """Set the scale, with plain numbers: powers of ten say little over less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if scale == "log":
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        low, high = axis.get_data_interval()
        narrow = high < 5 * low
        axis.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())
    if ticks:
        axis.set_ticks([place for place, _ in ticks], [text for _, text in ticks])
