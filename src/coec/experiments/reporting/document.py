"""The report as a value: tables and figures in their order."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from coec.errors import OptionError
from coec.experiments.declarations import Declaration, items
from coec.experiments.publications import PUBLISHED, publication
from coec.experiments.reporting import figures, lists, modules, published, tables
from coec.experiments.reporting.axes import Context
from coec.experiments.reporting.drawing import Figure
from coec.experiments.reporting.pairs import pairs
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tasks import tasks
from coec.experiments.reporting.values import Table

DRAWINGS: Mapping[str, Callable[[Declaration, Context], Sequence[Table | Figure]]] = {
    "pivot": tables.pivot, "pairs": pairs, "spreads": tables.spreads, "varied": lists.varied,
    "best": lists.best, "tasks": tasks, "cost": lists.cost, "geometry": modules.geometry,
    "failures": lists.failures, "overlaps": lists.overlaps, "cells": lists.cells,
    "settings": lists.settings, "texts": lists.texts, "events": lists.events,
    "beside": published.beside, "costs beside": published.costs_beside, "alone": published.alone,
    "lines": figures.lines, "bars": figures.bars, "blocks": modules.blocks,
    "rounds": modules.rounds,
}  # fmt: skip
"""Functions that draw a table or a figure, by the name that a declaration calls them."""


@dataclass(frozen=True)
class ReportSection:
    """Heading with its tables and figures."""

    title: str
    anchor: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """Content of a report, in order; the same for every format."""

    title: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    sections: tuple[ReportSection, ...]

    def as_dict(self) -> dict[str, object]:
        """Return facts and tables, ready for JSON."""
        return {
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "sections": {s.title: [table.as_dict() for table in s.tables] for s in self.sections},
        }


@cache
def every(place: str) -> tuple[Declaration, ...]:
    """Return the declarations that every report has `before` and `after` those of its grids."""
    text = (Path(__file__).parent / "every.toml").read_text(encoding="utf-8")
    return items(tomllib.loads(text)[place], f"every.toml, {place}")


def document(results: Results, *, compare: str | None = None) -> Document:
    """Make the report on a sweep; with `compare`, published numbers of that name stand beside ours.

    Raises:
        OptionError: no numbers have that name.
    """
    if compare is not None and compare not in PUBLISHED:
        raise OptionError(f"no published numbers '{compare}': there is {', '.join(PUBLISHED)}")
    numbers = publication(compare) if compare else None
    pruned = tuple(row for row in results.rows if not row.dense)
    sweep = Context(results, pruned, "", numbers, compare or "")
    names = dict.fromkeys(grid for row in results.rows for grid in row.grids)
    declared = {name: results.declared.items(name) for name in names}
    claims: dict[str, set[str]] = {}
    for name, grid_items in declared.items():
        for item in grid_items:
            if item.drawing is None and results.grid(name):
                claims.setdefault(item.section, set()).add(name)
    sections = _sections(every("before"), sweep, claims)
    for name in names:
        rows = results.grid(name)
        if rows:
            sections += _grid(declared[name], replace(sweep, rows=rows, grid=name))
    sections += _sections(every("after"), sweep, claims)
    return Document("Report of a pruning sweep", lists.facts(results), results.notes, sections)


def _grid(declared: Sequence[Declaration], context: Context) -> tuple[ReportSection, ...]:
    """Draw what a grid declares; a list of its cells, where that is nothing or does not fit."""
    drawn = [item for item in declared if item.drawing is not None]
    sections: tuple[ReportSection, ...] = ()
    if all(tables.fits(item, context) for item in drawn):
        sections = _sections(drawn, context, {})
    if sections or (declared and not drawn):
        return sections
    title = f"Grid {context.grid}"
    return _sections([replace(item, section=title) for item in every("else")], context, {})


def _sections(
    declared: Sequence[Declaration], context: Context, claims: Mapping[str, set[str]]
) -> tuple[ReportSection, ...]:
    """Draw sections in the order of the declarations; one without content is left out."""
    published_by = context.publication.name if context.publication else ""
    sections = []
    for title, group in groupby(declared, key=lambda item: item.section):
        drawn: list[Table | Figure] = []
        text: dict[str, None] = {}
        grids = claims.get(title, set())
        rows = tuple(row for row in context.rows if not grids or grids & set(row.grids))
        for item in group:
            new = DRAWINGS[item.drawing or "pivot"](item, replace(context, rows=rows))
            drawn += new
            if new and item.text:
                text[item.text.replace("{published}", published_by)] = None
        if drawn:
            name = title.replace("{published}", published_by)
            anchor = context.grid or re.sub(r"\W+", "-", name.lower())
            section_tables = (t.without_empty_columns() for t in drawn if isinstance(t, Table))
            section_figures = (figure for figure in drawn if isinstance(figure, Figure))
            sections.append(
                ReportSection(
                    name, anchor, tuple(section_tables), tuple(section_figures), tuple(text)
                )
            )
    return tuple(sections)
