"""Figures as values, and their drawing as SVG that takes its colours from the page."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from xml.etree import ElementTree

from coec.errors import OptionError
from coec.experiments.declarations import Role

Scale = Literal["linear", "log"]
ROLES = get_args(Role)
"""What is drawn in a colour of its own; the page defines `--plot-ROLE`, light and dark."""


def role(compensation: str) -> str:
    """The colour of a compensation."""
    return compensation if compensation in ROLES else "other"


_SENTINELS = {role: f"#0102{index + 16:02x}" for index, role in enumerate(ROLES)}
WIDTH, HEIGHT = 4.0, 2.7
"""Of one panel, in inches of 72 points."""

LINE = 0.21
"""Height of a line of text beside a panel that has one per row, in inches."""


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
    """One pair of axes; `x_whole` where x counts something. Ticks, where given: (place, text)."""

    title: str
    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    x_ticks: tuple[tuple[float, str], ...] = ()
    y_ticks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False
    x_whole: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels with a title, and sentences under them."""

    title: str
    panels: tuple[Panel, ...]
    caption: tuple[str, ...] = ()
    settings: str = ""

    @property
    def legend(self) -> tuple[Curve, ...]:
        """A curve for everything that is drawn and named, once for all panels."""
        named = [curve for panel in self.panels for curve in panel.curves if curve.label]
        return tuple({_key(curve): curve for curve in reversed(named)}.values())[::-1]


def _key(curve: Curve) -> tuple[Any, ...]:
    return curve.label, curve.role, curve.line, curve.marker, curve.hollow


def check_matplotlib() -> None:
    """Raises OptionError, which names what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OptionError(
            "the report's figures need matplotlib: pip install 'coec[report]'"
        ) from None


def svg(panel: Panel, prefix: str) -> str:
    """The panel as an SVG element; every id in it starts with `prefix`, and no two runs differ."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 9.5, "axes.linewidth": 0.8,
        "text.color": _SENTINELS["ink"], "axes.edgecolor": _SENTINELS["muted"],
        "axes.labelcolor": _SENTINELS["ink"], "xtick.color": _SENTINELS["muted"],
        "ytick.color": _SENTINELS["muted"], "xtick.labelcolor": _SENTINELS["ink"],
        "ytick.labelcolor": _SENTINELS["ink"], "grid.color": _SENTINELS["grid"],
    }  # fmt: skip
    with rc_context(settings):
        height = max(HEIGHT, 0.7 + LINE * len(panel.y_ticks))
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        axes = canvas.subplots()
        _plot(axes, panel)
        _dress(axes, panel)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _themed(buffer.getvalue(), prefix, panel)


DASHES = {"-": "none", "--": "7 3", ":": "2 3", "-.": "7 3 2 3"}
SHAPES = {
    "o": '<circle cx="16" cy="7" r="4"/>',
    "s": '<rect x="12" y="3" width="8" height="8"/>',
    "D": '<path d="M16 2l5 5-5 5-5-5z"/>',
    "^": '<path d="M16 2.5l4.5 8h-9z"/>',
    "*": '<path d="M16 1l1.8 4 4.4.4-3.3 2.9 1 4.3-3.9-2.3-3.9 2.3 1-4.3-3.3-2.9 4.4-.4z"/>',
}
"""How the page draws a line and a marker in a legend; what matplotlib calls them."""


def swatch(curve: Curve) -> str:
    """The line and marker of a curve, to stand beside its label."""
    colour = f"var(--plot-{curve.role})"
    line = (
        f'<path d="M0 7h32" stroke-width="2" stroke-dasharray="{DASHES[curve.line]}"/>'
        if curve.line
        else ""
    )
    shape = SHAPES.get(curve.marker, "")
    fill = "none" if curve.hollow else colour
    return (
        f'<svg viewBox="0 0 32 14" width="32" height="14" aria-hidden="true" '
        f'style="stroke: {colour}; fill: {fill}">{line}{shape}</svg>'
    )


def _plot(axes: Any, panel: Panel) -> None:
    for curve in panel.curves:
        colour = _SENTINELS[curve.role]
        axes.plot(
            curve.x, curve.y, linestyle=curve.line or "none", color=colour, marker=curve.marker,
            markersize=5, linewidth=curve.width,
            markerfacecolor="none" if curve.hollow else colour,
        )  # fmt: skip


def _dress(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    _scale(axes.xaxis, panel.x_scale, panel.x_ticks)
    _scale(axes.yaxis, panel.y_scale, panel.y_ticks)
    if panel.x_whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.margins(y=0.5 / len(panel.y_ticks) if panel.y_ticks else 0.08)
    axes.grid(axis="x" if panel.y_ticks and not panel.x_ticks else "y", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axis: Any, scale: Scale, ticks: tuple[tuple[float, str], ...]) -> None:
    """The scale, with plain numbers: powers of ten say little over less than a decade."""
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


def _themed(text: str, prefix: str, panel: Panel) -> str:
    """The drawing without prologue, size, fonts and colours of its own; ids made the panel's."""
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):  # a style would reach the whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(
            {name: _attribute(name, value, prefix) for name, value in attributes.items()}
        )
        if element.tag == "g":
            element.attrib.pop("id", None)
    root.attrib.pop("width")
    root.attrib.pop("height")
    label = f"{panel.title}: {panel.y_label} by {panel.x_label}"
    root.attrib.update({"role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name in ("href", "clip-path"):
        return value.replace("#", f"#{prefix}-")
    if name in ("d", "x", "y", "transform"):  # two decimals are below a pixel
        rounded = re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", value)
        return " ".join(rounded.split())
    if name == "style":
        for role, sentinel in _SENTINELS.items():
            value = value.replace(sentinel, f"var(--plot-{role})")
        return re.sub(r"font-family: [^;]*;? ?", "", value)
    return value
