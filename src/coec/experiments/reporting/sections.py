"""Sections of a report: one for every grid, then lists that concern all cells."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pandas import DataFrame, Series

from coec.experiments.reporting.figures import draw
from coec.experiments.reporting.frame import Table, averages, axes_of, of_grid, table_of
from coec.experiments.rows import NO_REASON, SETTING_NAMES, Row

_DRAWN = ("perplexity", "zero_shot")
"""Metrics that have a figure."""
_VARIES = "varies"


@dataclass(frozen=True)
class Section:
    """A heading, figures by the name of their file, and a table."""

    title: str
    table: Table
    figures: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)


def of_grids(cells: DataFrame) -> Iterator[Section]:
    """Yield a section for every grid in the order of the rows; what varies makes its lines."""
    # Grids in the order of their first rows
    grids = dict.fromkeys(name for names in cells["grids"] for name in names)
    for number, grid in enumerate(grids, 1):
        members = of_grid(cells, grid)
        if members.empty:
            continue
        axes = axes_of(members)
        lines = averages(members, axes)
        stem = "-".join([str(number), *re.findall(r"[a-z0-9]+", grid.lower())])[:80]
        figures = {f"{stem}-{name}": draw(lines, axes, name) for name in _DRAWN}
        figures = {name: files for name, files in figures.items() if files}
        yield Section(f"Grid {grid}", table_of(lines, axes), figures)


def of_all_cells(rows: Sequence[Row], cells: DataFrame) -> Iterator[Section]:
    """Yield tasks, failures and safeguards, where there are any, and the conditions by model."""
    places = [
        {"Model": row.model, "Method": method, "Sparsity": row.settings.sparsity, "Cell": row.cell}
        for row, method in zip(rows, cells["method"])
    ]
    events = Counter(event for row in rows for site in row.sites for event in site.events)
    lists = {
        "Zero-shot accuracy by task, % ± standard error": [
            place | _tasks(row) for place, row in zip(places, rows) if row.zero_shot.tasks
        ],
        "Failed cells": [
            place | {"Reason": row.error or NO_REASON}
            for place, row in zip(places, rows) if row.status == "failed"
        ],
        "Safeguards that fired": [
            {"Safeguard": event, "Modules": count} for event, count in events.most_common()
        ],
        "Conditions": _conditions(cells),
    }  # fmt: skip
    for title, lines in lists.items():
        if lines:
            yield Section(title, Table.plain(DataFrame(lines, dtype=object)))


def _tasks(row: Row) -> dict[str, str]:
    """Print the accuracies of a row."""
    texts = {}
    for name, task in row.zero_shot.tasks.items():
        if task.value is not None:
            error = "" if task.stderr is None else f" ± {100 * task.stderr:.1f}"
            texts[name] = f"{100 * task.value:.1f}{error}"
    return texts


def _conditions(cells: DataFrame) -> list[dict[str, object]]:
    """Return settings, texts and versions by model, but for what varies in all of them."""
    described = ("evaluation.", "calibration.", "environment.")
    names = [name for name in cells if name in SETTING_NAMES or name.startswith(described)]
    models = list(cells.groupby("model", sort=False))
    lines = [{model: _common(group[name]) for model, group in models} for name in names]
    return [
        {"Name": name} | line
        for name, line in zip(names, lines)
        if any(value not in (_VARIES, None) for value in line.values())
    ]


def _common(values: "Series[Any]") -> object:
    """Return what all cells have that have any."""
    distinct = values.dropna().unique()
    return _VARIES if len(distinct) > 1 else next(iter(distinct), None)
