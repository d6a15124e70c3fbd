"""Error where a repair was fitted against error on windows held out, and the perplexities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from coec.experiments.reporting.comparison import in_order
from coec.experiments.reporting.inside import SITES, mean_over_sites
from coec.experiments.reporting.plots import Curve, Figure, Panel, role
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    described,
    grouped,
    lowest_bold,
    measurement,
    models_of,
    percent,
    varying_within,
)
from coec.experiments.rows import Row

EXPLAINED = (
    "Errors are means over the modules of a site. Bold marks the lowest perplexity, or the lowest "
    "held-out error, of a column, as printed."
)

FAR = 1.25
"""Errors above so many times the slice's would leave no room to tell the others apart."""

Repairs = Mapping[str, Mapping[Any, list[Row]]]
"""Rows by what a repair is called, then by the number of windows."""


def held_out(rows: Sequence[Row]) -> list[Row]:
    """The rows that have errors on held-out windows, in the order of the paper's tables."""
    measured = [row for row in rows if any(s.holdout_after is not None for s in row.sites)]
    return sorted(measured, key=lambda r: (r.model, r.sparsity, in_order(r)))


def _repairs(rows: Sequence[Row]) -> Repairs:
    """A repair is called by its name and by every option that tells it from another."""
    several = len({row.setting("selection") for row in rows}) > 1

    def place(r: Row) -> tuple[Any, ...]:
        return r.model, r.sparsity, *in_order(r), r.setting("samples")

    names = varying_within(rows, place)

    def label(r: Row) -> str:
        selection = f"{r.setting('selection')} + " if several else ""
        return f"{selection}{r.setting('compensation')}{described(r, names)}"

    return {
        name: grouped(found, lambda r: r.setting("samples"))
        for name, found in grouped(rows, label).items()
    }


def _sizes(rows: Sequence[Row]) -> dict[Any, str]:
    """The numbers of windows, with what to add to a head: nothing where there is only one."""
    sizes = sorted({row.setting("samples") or 0 for row in rows})
    return {size: f", {size} windows" if len(sizes) > 1 else "" for size in sizes}


def overfitting_tables(rows: Sequence[Row]) -> list[Table]:
    """Perplexities by sparsity; then fit and held-out errors by model, sparsity and site."""
    found = held_out(rows)
    by_sparsity = grouped(sorted(found, key=lambda r: r.sparsity), lambda r: r.sparsity)
    tables = [_perplexities(group, sparsity) for sparsity, group in by_sparsity.items()]
    for (model, sparsity), group in grouped(found, lambda r: (r.model, r.sparsity)).items():
        for site, name in SITES.items():
            title = f"{model}, {name}: relative output error at {percent(sparsity)} sparsity"
            tables.append(_errors(group, site, title))
    return [table for table in tables if table is not None]


def _perplexities(rows: Sequence[Row], sparsity: float) -> Table | None:
    if not any(row.measured("perplexity") is not None for row in rows):
        return None
    notes, repairs, sizes = Footnotes(), _repairs(rows), _sizes(rows)
    places = [(model, size) for model in models_of(rows) for size in sizes]
    body = []
    for label, by_size in repairs.items():
        at = [[r for r in by_size.get(size, []) if r.model == model] for model, size in places]
        body.append((Cell(label), *(measurement(found, "perplexity", notes) for found in at)))
    heads = ("Repair", *(f"{model}{sizes[size]}" for model, size in places))
    return Table(
        f"Perplexity with held-out windows at {percent(sparsity)} sparsity (lower is better)",
        heads, lowest_bold(body, range(1, len(heads)), SHOWN["perplexity"][1]),
        notes=notes.lines, settings=protocol(rows),
    )  # fmt: skip


def _errors(rows: Sequence[Row], site: str, title: str) -> Table | None:
    sizes, body = _sizes(rows), []
    for label, by_size in _repairs(rows).items():
        cells = [
            amount(mean_over_sites(by_size.get(size, []), site, name), 4)
            for size in sizes
            for name in ("error_after", "holdout_after")
        ]
        body.append((Cell(label), *cells))
    if not any(cell.value is not None for line in body for cell in line[1:]):
        return None
    heads = [f"{what}{size}" for size in sizes.values() for what in ("Fit", "Held out")]
    return Table(
        title, ("Repair", *heads), lowest_bold(body, range(2, len(heads) + 1, 2), 4),
        settings=protocol(rows),
    )  # fmt: skip


def overfitting_figure(rows: Sequence[Row]) -> Figure | None:
    """Fit and held-out error of every repair: a panel per model, sparsity, site and size."""
    panels, found, beyond = [], held_out(rows), dict[str, None]()
    for (model, sparsity), group in grouped(found, lambda r: (r.model, r.sparsity)).items():
        repairs = _repairs(group)
        for site, name in SITES.items():
            for size, words in _sizes(group).items():
                errors = _measured(repairs, site, size)
                drawn = [error for error in errors if error.held <= FAR * error.sliced]
                beyond |= {error.label: None for error in errors if error not in drawn}
                if drawn:
                    panels.append(_panel(drawn, f"{model}, {percent(sparsity)}, {name}{words}"))
    if not panels:
        return None
    caption = ["The longer the bar between the two, the more a repair overfits."]
    if beyond:
        caption.append(
            f"Where a held-out error is above {FAR:g} times the slice's it is in the table only: "
            f"{'; '.join(beyond)}."
        )
    return Figure("Fit against held-out error", tuple(panels), tuple(caption), protocol(found))


@dataclass(frozen=True)
class _Errors:
    """One repair's fit and held-out error, and what the slice has on the held-out windows."""

    label: str
    compensation: str
    fit: float
    held: float
    sliced: float


def _measured(repairs: Repairs, site: str, size: Any) -> list[_Errors]:
    found = []
    for label, by_size in repairs.items():
        at = by_size.get(size, [])
        fit, held, sliced = (
            mean_over_sites(at, site, name)
            for name in ("error_after", "holdout_after", "holdout_before")
        )
        if fit is not None and held is not None:
            compensation = str(at[0].setting("compensation"))
            found.append(_Errors(label, compensation, fit, held, inf if sliced is None else sliced))
    return found


def _panel(errors: Sequence[_Errors], title: str) -> Panel:
    places = range(len(errors), 0, -1)
    bars = [
        Curve([e.fit, e.held], [y, y], role=role(e.compensation), width=3.0)
        for y, e in zip(places, errors)
    ]
    fits = Curve([e.fit for e in errors], list(places), "fit", "ink", "", "o", hollow=True)
    helds = Curve([e.held for e in errors], list(places), "held out", "ink", "", "o")
    ticks = tuple((float(y), e.label) for y, e in zip(places, errors))
    return Panel(title, (*bars, fits, helds), "relative output error", "", y_ticks=ticks)
