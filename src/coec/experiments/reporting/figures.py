"""Which rows of a sweep make which figure. A figure without data is left out."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coec.experiments.records import number
from coec.experiments.reporting.comparison import in_order
from coec.experiments.reporting.inside import SITES, curves, falling
from coec.experiments.reporting.plots import Curve, Figure, Panel, Scale, role
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import (
    described,
    grouped,
    mean_of,
    percent,
    value_text,
    varying_within,
)
from coec.experiments.rows import Row

LINES = 300
"""Curves drawn in one panel; of more, evenly spaced ones."""

SEVERAL = "By block, of several cells of one repair the one of lowest perplexity is drawn."
MARKERS = {"none": "o", "bias": "s", "least-squares": "D", "rcpu": "^", "coec": "o"}
LINE_STYLES = ("-", "--", ":", "-.")


def _mean_perplexity(rows: Iterable[Row]) -> float | None:
    return mean_of(row.measured("perplexity") for row in rows)


def setting_figure(rows: Sequence[Row], name: str, title: str) -> Figure | None:
    """Perplexity by one numeric setting, a panel per model and sparsity, a line per repair."""
    known = [
        row
        for row in rows
        if number(row.setting(name)) is not None and row.measured("perplexity") is not None
    ]
    values = sorted({float(row.setting(name)) for row in known})
    if len(values) < 2:
        return None
    place, scale = places(values)
    ticks = tuple((place[value], value_text(value)) for value in values)
    panels = []
    ordered = sorted(known, key=lambda r: (r.sparsity, in_order(r)))
    by_model = {model: grouped(found, lambda r: r.sparsity) for model, found in _by_model(ordered)}
    for model, by_sparsity in by_model.items():
        for sparsity, found in by_sparsity.items():
            lines = _setting_lines(found, name, place)
            heading = f"{model}, {percent(sparsity)}"
            panels.append(Panel(heading, lines, name, "perplexity", x_scale=scale, x_ticks=ticks))
    return Figure(title, tuple(panels), settings=protocol(known, varies=(name,)))


def _by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return list(grouped(rows, lambda r: r.model).items())


def places(values: Sequence[float]) -> tuple[dict[float, float], Scale]:
    """Where values lie: a wide range is logarithmic, or evenly spaced if it holds a zero."""
    positive = [value for value in values if value > 0]
    wide = bool(positive) and positive[-1] >= 8 * positive[0]
    if wide and values[0] <= 0:
        return {value: float(i) for i, value in enumerate(values)}, "linear"
    return {value: value for value in values}, "log" if wide else "linear"


def _setting_lines(
    rows: Sequence[Row], name: str, place: Mapping[float, float]
) -> tuple[Curve, ...]:
    """A line per selection, repair and what else differs; seeds at one place are averaged."""

    def method(r: Row) -> tuple[Any, ...]:
        return r.setting("selection"), r.setting("compensation")

    others = [other for other in varying_within(rows, method) if other != name]
    many = len({row.setting("selection") for row in rows}) > 1
    lines = []
    lined = grouped(rows, lambda r: (*method(r), described(r, others)))
    for index, ((selection, comp, differs), group) in enumerate(lined.items()):
        by_value = grouped(group, lambda r: place[float(r.setting(name))])
        points = sorted((x, y) for x, at in by_value.items() if (y := _mean_perplexity(at)))
        label = (f"{selection} + {comp}" if many else str(comp)) + differs
        style = LINE_STYLES[index % len(LINE_STYLES)] if differs else "-"
        lines.append(_curve(points, label, role(comp), line=style, marker=MARKERS.get(comp, "o")))
    return tuple(lines)


def _curve(points: Sequence[tuple[float, float]], label: str, colour: str, **style: Any) -> Curve:
    return Curve([x for x, _ in points], [y for _, y in points], label, colour, **style)


def parameters_figure(results: Results, rows: Sequence[Row]) -> Figure | None:
    """Perplexity (log) by parameters, a panel per model, a line per selection and repair."""
    known = [
        row
        for row in rows
        if row.measured("perplexity") is not None and row.parameters.after is not None
    ]
    if len({row.sparsity for row in known}) < 2:
        return None
    largest = max(row.parameters.after or 0 for row in known)
    unit, word = (1e9, "billions") if largest >= 1e9 else (1e6, "millions")
    panels = []
    for model, found in grouped(sorted(known, key=in_order), lambda r: r.model).items():
        methods = grouped(found, lambda r: (r.setting("selection"), r.setting("compensation")))
        selections = list(dict.fromkeys(selection for selection, _ in methods))
        lines = []
        for (selection, comp), group in methods.items():
            style = LINE_STYLES[selections.index(selection) % len(LINE_STYLES)]
            at = grouped(group, lambda r: r.parameters.after)
            points = sorted(
                (x / unit, y) for x, same in at.items() if (y := _mean_perplexity(same))
            )
            label, marker = f"{selection} + {comp}", MARKERS.get(comp, "o")
            lines.append(_curve(points, label, role(comp), line=style, marker=marker))
        lines += _dense_point(results, model, unit)
        label = f"parameters, {word}"
        panels.append(Panel(model, tuple(lines), label, "perplexity", y_scale="log"))
    return Figure("Perplexity by parameters", tuple(panels), settings=protocol(known))


def _dense_point(results: Results, model: str, unit: float) -> list[Curve]:
    dense = results.dense.get(model)
    value = dense.measured("perplexity") if dense else None
    size = (dense.parameters.after or dense.parameters.before) if dense else None
    if value is None or size is None:
        return []
    return [Curve([size / unit], [value], "dense", "ink", "", "*")]


def convergence_figure(rows: Sequence[Row]) -> Figure | None:
    """Relative error by round, a panel per model: a grey line per module, their mean in blue.

    Errors are relative to the slice's, the first value. Where a module stopped, its last value
    goes on into the mean.
    """
    panels = []
    for model, found in grouped(rows, lambda r: r.model).items():
        relative = [
            [value / values[0] for value in values]
            for values in curves(found, "errors_per_round")
            if values[0] > 0
        ]
        if relative:
            panels.append(_convergence_panel(model, relative))
    if not panels:
        return None
    sentences = [
        f"{what}: {_falling(rows, name)}, up to rounding."
        for what, name in (
            ("Tempered errors", "errors_per_round"),
            ("Objectives, with the alignment penalty", "objectives_per_round"),
        )
        if curves(rows, name)
    ]
    sentences += _left_out(rows)
    return Figure("Convergence of every module", tuple(panels), tuple(sentences), protocol(rows))


def _convergence_panel(model: str, relative: Sequence[Sequence[float]]) -> Panel:
    longest = max(map(len, relative))
    padded = [[*values, *[values[-1]] * (longest - len(values))] for values in relative]
    mean = [statistics.fmean(column) for column in zip(*padded)]
    step = -(-len(relative) // LINES)
    shown = relative[::step]
    grey = [Curve(range(len(v)), v, role="faint", width=0.7) for v in shown]
    grey[0] = replace(grey[0], label="a module")
    blue = Curve(range(longest), mean, "mean of the modules", "mean", width=2.2)
    label = "0: slice; 1: left rotation and rescale; then rounds"
    title = f"{model}, {len(relative)} modules"
    return Panel(title, (*grey, blue), label, "tempered error / slice's", x_whole=True)


def _falling(rows: Sequence[Row], name: str) -> str:
    fell, count = falling(rows, name)
    return f"{fell:,} of {count:,} modules never rise"


def _left_out(rows: Sequence[Row]) -> list[str]:
    zero = sum(values[0] <= 0 for values in curves(rows, "errors_per_round"))
    counts = grouped(rows, lambda r: r.model).values()
    most = max((len(curves(found, "errors_per_round")) for found in counts), default=0)
    sentences = [f"Not drawn, because their slice has no error: {zero}."] if zero else []
    if most > LINES:
        sentences.append(
            f"Of more than {LINES} modules, evenly spaced ones are drawn; mean and counts are over "
            "all of them."
        )
    return sentences


def block_figure(rows: Sequence[Row]) -> Figure | None:
    """Error of every block, sliced and repaired, at the highest sparsity of one selection."""
    chosen = _same_slice([row for row in rows if row.sites])
    panels = []
    for model, several in grouped(chosen, lambda r: r.model).items():
        found = _one_per_repair(several)
        for site, name in SITES.items():
            lines = [
                _by_block(row, site, "error_after", comp, role(comp))
                for row in found
                if (comp := str(row.setting("compensation"))) != "none"
            ]
            sliced = _by_block(found[0], site, "error_before", "slice", "none", line="--")
            if sliced.x and lines:
                title, y_label = f"{model}, {name}", "relative output error"
                panels.append(_block_panel(title, (sliced, *lines), y_label))
    if not panels:
        return None
    first = chosen[0]
    caption = (
        f"Units kept by {first.setting('selection')} at {percent(first.sparsity)} sparsity, on the "
        "calibration data."
    )
    return Figure("Error by block", tuple(panels), (caption,), protocol(chosen))


def _block_panel(title: str, lines: tuple[Curve, ...], y_label: str) -> Panel:
    return Panel(title, lines, "block", y_label, from_zero=True, x_whole=True)


def _same_slice(rows: Sequence[Row]) -> list[Row]:
    """Rows whose kept units are the same: one selection, one sparsity."""
    if not rows:
        return []
    highest = max(row.sparsity for row in rows)
    at = [row for row in rows if row.sparsity == highest]
    selections = {row.setting("selection") for row in at}
    selection = "rcpu" if "rcpu" in selections else at[0].setting("selection")
    return sorted((row for row in at if row.setting("selection") == selection), key=in_order)


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


def _by_block(row: Row, site: str, name: str, label: str, colour: str, *, line: str = "-") -> Curve:
    points = [
        (float(s.block), value)
        for s in row.sites
        if s.site == site and (value := number(getattr(s, name))) is not None
    ]
    return _curve(points, label, colour, line=line, marker="o")


def angle_figure(rows: Sequence[Row]) -> Figure | None:
    """Principal angles to the original frame by block: of the pruned, and of the repaired."""
    measured = [row for row in rows if any(site.geometry for site in row.sites)]
    chosen = _same_slice(measured)
    panels = []
    for model, several in grouped(chosen, lambda r: r.model).items():
        found = _one_per_repair(several)
        for site, name in SITES.items():
            lines = tuple(
                Curve(*_angles(found[-1], site, key), label, colour, style, marker)
                for key, label, colour, style, marker in (
                    ("angle_op", "O–P, pruned", "none", "--", "s"),
                    ("angle_oc", "O–C, repaired", "coec", "-", "o"),
                )
            )
            if lines[0].x:
                title = f"{model}, {name}"
                panels.append(_block_panel(title, lines, "mean angle, degrees"))
    if not panels:
        return None
    last = chosen[-1]
    caption = (
        f"{last.setting('selection')} + {last.setting('compensation')} at "
        f"{percent(last.sparsity)} sparsity."
    )
    return Figure("Principal angles by block", tuple(panels), (caption,), protocol(chosen))


def _angles(row: Row, site: str, name: str) -> tuple[list[float], list[float]]:
    points = [
        (float(s.block), value)
        for s in row.sites
        if s.site == site and (value := number(getattr(s.geometry, name))) is not None
    ]
    return [x for x, _ in points], [y for _, y in points]
