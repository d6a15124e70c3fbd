"""The ridge that cross-validation chooses for every module against one swept for all of them."""

import statistics
from collections.abc import Sequence
from typing import Any

from coec.experiments.records import number
from coec.experiments.reporting.comparison import in_order
from coec.experiments.reporting.figures import places
from coec.experiments.reporting.plots import Curve, Figure, Panel
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    described,
    grouped,
    mean_of,
    measurement,
    percent,
    significant,
    title_of,
    value_text,
    varying_within,
)
from coec.experiments.rows import Metric, Row

CHOSEN, SWEPT = "gcv", "fixed"
"""The rules of the rescale that are compared."""

EXPLAINED = (
    "λ is relative to the median mode energy of a module. A swept one is the same for all modules; "
    "cross-validation (GCV) chooses one for each."
)


def _compared(rows: Sequence[Row]) -> list[Row]:
    known = [row for row in rows if row.setting("rescale") in (CHOSEN, SWEPT)]
    return sorted(known, key=lambda r: (r.model, r.sparsity, in_order(r)))


def _kinds(rows: Sequence[Row]) -> dict[tuple[float, str], list[Row]]:
    """Rows by sparsity and by what they are besides their ridge."""

    def method(r: Row) -> tuple[Any, ...]:
        return r.model, r.sparsity, *in_order(r)

    names = [n for n in varying_within(rows, method) if n not in ("rescale", "rescale_ridge")]

    def kind(r: Row) -> tuple[float, str]:
        return r.sparsity, f"{r.setting('selection')} + {r.setting('compensation')}" + described(
            r, names
        )

    return grouped(rows, kind)


def _swept(rows: Sequence[Row]) -> dict[float, list[Row]]:
    """The rows of every swept ridge, in ascending order."""
    fixed = [row for row in rows if row.setting("rescale") == SWEPT]
    return dict(sorted(grouped(fixed, lambda r: float(r.setting("rescale_ridge"))).items()))


def ridge_tables(rows: Sequence[Row], metric: Metric) -> list[Table]:
    """Per model: the metric by swept ridge, by cross-validation, and how far they are apart."""
    compared = _compared(rows)
    if not _swept(compared) or not any(r.measured(metric) is not None for r in compared):
        return []
    return [_table(model, found, metric) for model, found in grouped(compared, _model).items()]


def _model(row: Row) -> str:
    return row.model


def _table(model: str, rows: Sequence[Row], metric: Metric) -> Table:
    notes, body, digits = Footnotes(), [], SHOWN[metric][1]
    ridges = list(_swept(rows))
    for (sparsity, name), found in _kinds(rows).items():
        at, chosen = _swept(found), [r for r in found if r.setting("rescale") == CHOSEN]
        swept = [measurement(at.get(ridge, []), metric, notes) for ridge in ridges]
        ours = measurement(chosen, metric, notes)
        known = [cell.value for cell in swept if cell.value is not None]
        best = (min if SHOWN[metric][2] == "lower" else max)(known) if known else None
        gap = ours.value - best if ours.value is not None and best is not None else None
        body.append((
            Cell(name), Cell(percent(sparsity), sparsity), *swept, ours,
            amount(gap, digits, signed=True), _typical(chosen),
        ))  # fmt: skip
    heads = (
        "Method", "Sparsity", *(f"λ = {value_text(ridge)}" for ridge in ridges),
        "GCV", "GCV − best swept", "GCV's λ, median",
    )  # fmt: skip
    title = f"{model}: {title_of(metric, rows)} by ridge of the rescale"
    return Table(title, heads, tuple(body), labels=2, notes=notes.lines, settings=protocol(rows))


def _typical(rows: Sequence[Row]) -> Cell:
    """The median over modules of the ridge that was chosen."""
    chosen = [number(site.gcv_lambda) for row in rows for site in row.sites]
    known = [value for value in chosen if value is not None]
    if not known:
        return Cell(ABSENT)
    middle = statistics.median(known)
    return Cell(significant(middle, 2), middle)


def ridge_figure(rows: Sequence[Row]) -> Figure | None:
    """Perplexity by swept ridge, and by cross-validation as a level."""
    known = [row for row in _compared(rows) if row.measured("perplexity") is not None]
    ridges = list(_swept(known))
    if len(ridges) < 2:
        return None
    place, scale = places(ridges)
    ticks = tuple((place[ridge], value_text(ridge)) for ridge in ridges)
    panels = []
    for model, by_model in grouped(known, _model).items():
        for (sparsity, name), found in _kinds(by_model).items():
            lines = _lines(found, place)
            heading = f"{model}, {percent(sparsity)}, {name}"
            label = "ridge λ of the rescale"
            panels.append(Panel(heading, lines, label, "perplexity", x_scale=scale, x_ticks=ticks))
    title = "Perplexity by ridge of the rescale"
    return Figure(title, tuple(panels), settings=protocol(known))


def _lines(rows: Sequence[Row], place: dict[float, float]) -> tuple[Curve, ...]:
    means = {r: mean_of(x.measured("perplexity") for x in at) for r, at in _swept(rows).items()}
    points = [(place[ridge], value) for ridge, value in means.items() if value is not None]
    swept = Curve([x for x, _ in points], [y for _, y in points], "one λ for all", "rcpu",
                  marker="o")  # fmt: skip
    chosen = [row.measured("perplexity") for row in rows if row.setting("rescale") == CHOSEN]
    level = mean_of(chosen)
    if level is None:
        return (swept,)
    ends = [min(place.values()), max(place.values())]
    return swept, Curve(ends, [level, level], "chosen by GCV", "coec", "--")
