"""The report as a value: which tables and figures, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coec.experiments.reporting import figures, inside, overfitting, paper, record, rescaling
from coec.experiments.reporting.comparison import comparison_tables, fits, pair_table
from coec.experiments.reporting.cost import cost_table
from coec.experiments.reporting.plots import Figure
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import SHOWN, Table
from coec.experiments.reporting.tasks import zero_shot_tables
from coec.experiments.reporting.variation import (
    ablation_tables,
    cap_table,
    curve_tables,
    generic_table,
    seed_tables,
)
from coec.experiments.rows import Row

CURVES = {
    "calibration-size": ("samples", "Calibration size"),
    "alpha": ("alpha", "Tempering exponent α"),
    "lambda-a": ("lambda_a", "Alignment weight λ_a"),
    "delta": ("delta", "Stopping tolerance δ"),
    "rounds": ("rounds", "Cap on the rounds"),
}
"""Grids that vary one setting: which, and what it is called."""

READY = ("main", "ablation", "seeds", "rescale-ridge", "overfitting", *CURVES)


@dataclass(frozen=True)
class Section:
    """A heading with its tables and figures."""

    title: str
    anchor: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """Everything a report says, in order; the same for every format."""

    title: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]

    def as_dict(self) -> dict[str, Any]:
        """Facts and tables, ready for JSON."""
        return {
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "sections": {
                section.title: [table.as_dict() for table in section.tables]
                for section in self.sections
            },
        }


def document(results: Results, *, compare: bool = False) -> Document:
    """The report on a sweep; with `compare`, the paper's numbers beside ours."""
    rows = results.rows
    sections = [
        _section("Best results", "best", [record.best_table(results)]),
        _main(results),
        _ablation(results, compare),
        *(_curve(results, grid) for grid in CURVES),
        _ridge(results),
        _seeds(results, compare),
        _overfitting(results),
        *_others(results),
        _section("Zero-shot accuracy by task", "tasks", zero_shot_tables(rows)),
        _inside(results),
        _section("Cost", "cost", [cost_table(rows)]),
        _paper(rows) if compare else None,
        _record(rows),
    ]
    kept = tuple(s for s in sections if s is not None and (s.tables or s.figures or s.text))
    return Document("Report of a pruning sweep", record.facts(results), results.notes, kept)


def _section(
    title: str,
    anchor: str,
    tables: Sequence[Table | None],
    drawn: Sequence[Figure | None] = (),
    text: Sequence[str] = (),
) -> Section:
    return Section(
        title,
        anchor,
        tuple(table.without_empty_columns() for table in tables if table is not None),
        tuple(figure for figure in drawn if figure is not None),
        tuple(text),
    )


def _main(results: Results) -> Section | None:
    rows = results.grid("main")
    if not rows or not fits(rows):
        return _generic(rows, "main") if rows else None
    tables = [table for metric in SHOWN for table in comparison_tables(results, rows, metric)]
    text = (
        "Bold marks the better of a selection's native repair and COEC on the same units, as "
        "printed; of a tie, both."
    )
    figure = figures.parameters_figure(results, rows)
    title = "Selections, repairs and sparsities"
    return _section(title, "main", [pair_table(rows), *tables], [figure], [text])


def _ablation(results: Results, compare: bool) -> Section | None:
    rows = results.grid("ablation")
    if not any("ablation" in row.labels for row in rows):
        return _generic(rows, "ablation") if rows else None
    tables: list[Table] = []
    for metric in SHOWN:
        found = ablation_tables(rows, "ablation", metric)
        tables += [paper.with_paper_ablation(t, metric) for t in found] if compare else found
    return _section("Ablation", "ablation", tables)


def _curve(results: Results, grid: str) -> Section:
    rows = results.grid(grid)
    name, title = CURVES[grid]
    tables: list[Table | None] = [t for m in SHOWN for t in curve_tables(rows, name, m)]
    tables += [cap_table(rows)] if name == "rounds" else []
    figure = figures.setting_figure(rows, name, f"Perplexity by {name}")
    text = ["Bold marks the best of a row, as printed."] if tables else []
    return _section(title, grid, tables, [figure], text)


def _seeds(results: Results, compare: bool) -> Section:
    tables = seed_tables(results.grid("seeds"))
    if compare and tables:
        tables = [paper.with_paper_seeds(tables[0]), *tables[1:]]
    return _section("Seeds", "seeds", tables)


def _ridge(results: Results) -> Section:
    rows = results.grid("rescale-ridge")
    tables = [table for metric in SHOWN for table in rescaling.ridge_tables(rows, metric)]
    text = [rescaling.EXPLAINED] if tables else []
    drawn = [rescaling.ridge_figure(rows)]
    return _section("Ridge of the rescale", "rescale-ridge", tables, drawn, text)


def _overfitting(results: Results) -> Section:
    rows = results.grid("overfitting") or tuple(r for r in results.rows if not r.dense)
    tables, figure = overfitting.overfitting_tables(rows), overfitting.overfitting_figure(rows)
    text = [overfitting.EXPLAINED] if tables else []
    return _section("Fit and held-out error", "overfitting", tables, [figure], text)


def _others(results: Results) -> list[Section]:
    names = dict.fromkeys(grid for row in results.rows for grid in row.grids)
    rows = {name: results.grid(name) for name in names if name not in READY}
    return [_generic(found, name) for name, found in rows.items() if found]


def _generic(rows: Sequence[Row], grid: str) -> Section:
    return _section(f"Grid {grid}", f"grid-{grid}", [generic_table(rows, grid)])


def _inside(results: Results) -> Section:
    """Of the main grid where there is one, so that ablated variants do not mix in."""
    pruned = results.grid("main") or tuple(row for row in results.rows if not row.dense)
    repaired = [row for row in pruned if row.setting("compensation") == "coec"]
    angled = [row for row in repaired if inside.has_geometry(row)]
    angled = angled or [r for r in results.rows if inside.has_geometry(r)]
    drawn = [
        figures.convergence_figure(repaired),
        figures.block_figure(pruned),
        figures.angle_figure(angled),
    ]
    tables = [inside.geometry_table(angled)]
    text = [figures.SEVERAL] if any(drawn[1:]) else []
    return _section("Inside the modules", "inside", tables, drawn, text)


def _paper(rows: Sequence[Row]) -> Section:
    table = paper.paper_table(rows)
    tables = [table, paper.efficiency_table(rows)]
    text: tuple[str, ...] = (
        "Numbers under different protocols do not compare in size; whether COEC is ahead of the "
        "native repair does.",
    )
    if table is None:
        tables = [paper.ablation_table()]
        text = ("No model of this sweep is in the paper's tables.",)
    return _section("Compared with the paper", "paper", tables, text=text)


def _record(rows: Sequence[Row]) -> Section:
    tables = [
        record.failure_table(rows),
        record.overlap_table(rows),
        record.record_table(rows),
        record.settings_table(rows),
        record.text_table(rows),
        record.event_table(rows),
    ]
    return _section("Record", "record", tables)
