"""The report as a value: which tables and figures, in which order."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from coec.errors import OptionError
from coec.experiments.declarations import Declaration, items, ready
from coec.experiments.publications import PUBLISHED, Publication, ready_published
from coec.experiments.reporting import blocks, figures, pivot, published, record
from coec.experiments.reporting.axes import Context
from coec.experiments.reporting.cost import cost
from coec.experiments.reporting.pairs import pairs
from coec.experiments.reporting.plots import Figure
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import Table
from coec.experiments.reporting.tasks import tasks

DRAWN: Mapping[str, Callable[[Declaration, Context], Sequence[Table | Figure]]] = {
    "pivot": pivot.pivot, "pairs": pairs, "spreads": pivot.spreads, "varied": record.varied,
    "best": record.best, "tasks": tasks, "cost": cost, "geometry": blocks.geometry,
    "failures": record.failures, "overlaps": record.overlaps, "cells": record.cells,
    "settings": record.settings, "texts": record.texts, "events": record.events,
    "beside": published.beside, "costs beside": published.costs_beside, "alone": published.alone,
    "lines": figures.lines, "bars": figures.bars, "blocks": blocks.blocks, "rounds": blocks.rounds,
}  # fmt: skip
"""How a table or a figure is drawn, by what a declaration calls it."""


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


@cache
def every(place: str) -> tuple[Declaration, ...]:
    """What every report has `before` and `after` what its grids declare."""
    text = (Path(__file__).parent / "every.toml").read_text(encoding="utf-8")
    return items(tomllib.loads(text)[place], f"every.toml, {place}")


def document(results: Results, *, compare: str | None = None) -> Document:
    """The report on a sweep; with `compare`, published numbers of that name beside ours.

    Raises:
        OptionError: no numbers are called so.
    """
    theirs = None
    if compare is not None:
        theirs = _published(results.declared.published, compare)
    pruned = tuple(row for row in results.rows if not row.dense)
    whole = Context(results, pruned, "", theirs, compare or "")
    names = dict.fromkeys(grid for row in results.rows for grid in row.grids)
    declared = {name: results.declared.grids.get(name) or ready(name) for name in names}
    claimed: dict[str, set[str]] = {}
    for name, own_items in declared.items():
        for item in own_items:
            if item.claims and results.grid(name):
                claimed.setdefault(item.section, set()).add(name)
    sections = _sections(every("before"), whole, claimed)
    for name in names:
        rows = results.grid(name)
        if rows:
            sections += _grid(declared[name], replace(whole, rows=rows, grid=name))
    sections += _sections(every("after"), whole, claimed)
    return Document("Report of a pruning sweep", record.facts(results), results.notes, sections)


def _published(own: Mapping[str, Publication], name: str) -> Publication:
    known = sorted({*own, *PUBLISHED})
    if name not in known:
        raise OptionError(f"no published numbers '{name}': there is {', '.join(known)}")
    return own.get(name) or ready_published(name)


def _grid(declared: Sequence[Declaration], context: Context) -> tuple[Section, ...]:
    """What a grid declares; a list of its cells, where that is nothing or they are not such."""
    own = [item for item in declared if not item.claims]
    made: tuple[Section, ...] = ()
    if all(pivot.fits(item, context) for item in own):
        made = _sections(own, context, {})
    if made or (declared and not own):
        return made
    title = f"Grid {context.grid}"
    return _sections([replace(item, section=title) for item in every("else")], context, {})


def _sections(
    declared: Sequence[Declaration], context: Context, claimed: Mapping[str, set[str]]
) -> tuple[Section, ...]:
    """Sections in the order of the declarations; one without anything in it is left out."""
    made = []
    for title, group in groupby(declared, key=lambda item: item.section):
        tables: list[Table] = []
        drawings: list[Figure] = []
        text: dict[str, None] = {}
        grids = claimed.get(title, set())
        rows = tuple(row for row in context.rows if not grids or grids & set(row.grids))
        for item in group:
            drawn = DRAWN[item.drawing or "pivot"](item, replace(context, rows=rows))
            tables += [one.without_empty_columns() for one in drawn if isinstance(one, Table)]
            drawings += [one for one in drawn if isinstance(one, Figure)]
            text |= dict.fromkeys(_named(item.text, context) for _ in drawn[:1] if item.text)
        if tables or drawings:
            name = _named(title, context)
            anchor = context.grid or re.sub(r"\W+", "-", name.lower())
            made.append(Section(name, anchor, tuple(tables), tuple(drawings), tuple(text)))
    return tuple(made)


def _named(text: str, context: Context) -> str:
    """With the name of what is compared with, where the text names it."""
    return text.replace("{published}", context.compare.name if context.compare else "")
