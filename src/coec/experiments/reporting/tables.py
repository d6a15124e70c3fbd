"""Tables of lines by columns, as a grid declares them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import isnan
from typing import Any

from coec.experiments.declarations import METRICS, Declaration
from coec.experiments.reporting.axes import (
    Axes,
    Context,
    labels,
    matches,
    mean_over_sites,
    quantity,
    rows_of,
    sort_key,
    words,
)
from coec.experiments.reporting.pairs import paired
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.published import with_columns
from coec.experiments.reporting.values import (
    ABSENT,
    FORMATS,
    NO_DATUM,
    Datum,
    Footnotes,
    Table,
    amount,
    grouped,
    measurement,
    significant,
    stressed,
    varying,
)
from coec.experiments.rows import Row


def fits(item: Declaration, context: Context) -> bool:
    """Tell whether the rows are such that the table says what it is declared to say.

    At most the seed differs between cells of one entry, where that is required; and some cell has
    a label, where lines are labels.
    """
    if "label" in item.rows:
        return any(context.grid in row.labels for row in context.rows)
    names = [*item.each, *item.rows, *_settings(item)]
    places = grouped(context.rows, lambda row: (row.model, *map(row.setting, names)))
    return not item.single or all({*varying(alike)} <= {"seed"} for alike in places.values())


def pivot(item: Declaration, context: Context) -> list[Table]:
    """Draw a table for every value of `each`, and for every quantity that is no column."""
    tables: list[Table | None] = []
    rows = [r for r in rows_of(item, context) if None not in map(r.setting, _settings(item))]
    for values in [item.values] if "value" in item.columns else [(name,) for name in item.values]:
        if any(quantity(row, name) for row in rows for name in values):
            shown_rows = [
                r for r in rows if r.status == "failed" or any(quantity(r, n) for n in values)
            ]
            for keys, subset in Axes(item, context.grid, shown_rows).split(item.each):
                tables.append(_Pivot(item, context, keys, subset, values).table())
    return [table for table in tables if table is not None]


def _settings(item: Declaration) -> list[str]:
    """Return the settings among the axes of the columns."""
    return [name for name in item.columns if name not in ("model", "value")]


@dataclass(frozen=True)
class _Pivot:
    """A table: its place among several, its rows, and the quantities that it shows of them."""

    item: Declaration
    context: Context
    keys: Mapping[str, Any]
    rows: Sequence[Row]
    values: tuple[str, ...]

    def table(self) -> Table | None:
        """Return the table; None where no entry has a number or a failure."""
        item, metric, notes = self.item, self.values[0], Footnotes()
        axes = Axes(item, self.context.grid, self.rows)
        lines = axes.grouped(*item.rows)
        body = self._body(list(lines.values()), notes)
        pairings = paired(item, list(lines), body, metric) if item.ours else []
        body = self._stressed(body)
        over, extra = self._extra(list(lines.values()), body, notes)
        if all(entry.text == ABSENT for line in (*body, *extra) for entry in line):
            return None
        heads = [head for name in item.rows for head in axes.heads(name)]
        firsts = [[e for n, key in zip(item.rows, keys) for e in labels(n, key)] for keys in lines]
        top, dense = self._dense(len(heads), notes)
        varies = _settings(item) if len(item.columns) == 1 else []
        told_apart = axes.differing if {"others", "method", "repair"} & {*item.rows} else ()
        table = Table(
            title(item, self.keys, metric, self.rows),
            (*heads, *map(self._head, self.columns), *item.extra),
            (*top, *((*first, *line, *last) for first, line, last in zip(firsts, body, extra))),
            labels=len(heads),
            notes=(*over, *(pairing.sentence for pairing in pairings), *item.notes, *notes.lines),
            settings=protocol([*self.rows, *dense], varies=(*varies, *told_apart)),
        )
        return with_columns(table, item, self.context, metric)

    @cached_property
    def columns(self) -> list[dict[str, Any]]:
        """Places of the columns: every combination of the values of their axes."""
        models = dict.fromkeys(row.model for row in self.rows)
        if "model" not in self.item.sort:
            models = dict.fromkeys(r.model for r in self.context.rows if r.model in models)
        axes: dict[str, Sequence[Any]] = {"model": list(models), "value": self.values}
        rows = [row for row in self.rows if not self._reference(row)]
        for name in _settings(self.item):
            axes[name] = sorted({row.setting(name) for row in rows}, key=partial(sort_key, name))
        names = self.item.columns
        return [dict(zip(names, place)) for place in product(*(axes[name] for name in names))]

    def _reference(self, row: Row) -> bool:
        return bool(self.item.reference) and matches(row, self.item.reference)

    def _body(self, lines: Sequence[Sequence[Row]], notes: Footnotes) -> list[list[Datum]]:
        """Return the entries of every line, a column each."""
        from pandas import DataFrame

        cells = DataFrame(
            [
                (line, column, row)
                for line, rows in enumerate(lines)
                for row in rows
                for column, place in enumerate(self.columns)
                if not self._reference(row) and self._stands(row, place)
            ],
            columns=["line", "column", "row"],
        )
        table = (
            cells.groupby(["line", "column"])["row"]
            .agg(list)
            .unstack()
            .reindex(index=range(len(lines)), columns=range(len(self.columns)))
        )
        return [
            [
                self._entry(rows if isinstance(rows, list) else [], place, notes)
                for rows, place in zip(line, self.columns)
            ]
            for line in table.itertuples(index=False)
        ]

    def _stands(self, row: Row, place: Mapping[str, Any]) -> bool:
        settings = all(row.setting(name) == place[name] for name in _settings(self.item))
        return settings and place.get("model", row.model) == row.model

    def _entry(self, rows: Sequence[Row], place: Mapping[str, Any], notes: Footnotes) -> Datum:
        name = place.get("value", self.values[0])
        if name in METRICS:
            return measurement(rows, name, notes)
        if name == "capped":
            return _capped(rows)
        mean = mean_over_sites(rows, self.keys.get("site"), name)
        return amount(mean, FORMATS[name].digits)

    def _head(self, place: Mapping[str, Any]) -> str:
        """Fill in the template, without settings that are the same in all of several columns."""
        phrases = (self.item.head or ", ".join(f"{{{name}}}" for name in place)).split(", ")
        constant = [
            f"{{{name}}}" for name in _settings(self.item)
            if len({column[name] for column in self.columns}) == 1
        ]  # fmt: skip
        if len(phrases) > 1:
            phrases = [p for p in phrases if not any(name in p for name in constant)]
        value = FORMATS[place["value"]].head if "value" in place else ""
        return ", ".join(phrases).format_map(words(place) | {"value": value})

    def _stressed(self, body: list[list[Datum]]) -> list[list[Datum]]:
        if self.item.best == "row":
            return [stressed(line, self.values[0]) for line in body]
        if self.item.best == "column":
            names = [place.get("value", self.values[0]) for place in self.columns]
            columns = [stressed(list(column), name) for column, name in zip(zip(*body), names)]
            return [list(line) for line in zip(*columns)]
        return body

    def _dense(self, width: int, notes: Footnotes) -> tuple[list[tuple[Datum, ...]], list[Row]]:
        """Return the line of the dense models, where it is declared, and their rows."""
        if not self.item.dense:
            return [], []
        dense = self.context.results.dense
        rows = [
            [dense[place["model"]]] if place["model"] in dense else [] for place in self.columns
        ]
        numbers = [measurement(row, self.values[0], notes) for row in rows]
        line = (Datum("dense"), *[NO_DATUM] * (width - 1), *numbers)
        return [line], [row for rows_of_model in rows for row in rows_of_model]

    def _extra(
        self, lines: Sequence[Sequence[Row]], body: list[list[Datum]], notes: Footnotes
    ) -> tuple[list[str], list[list[Datum]]]:
        """Return the columns at the end, and a sentence on the columns that a mean is over."""
        from pandas import DataFrame

        names, metric = list(self.item.extra.values()), FORMATS.get(self.values[0])
        if not names or metric is None:
            return [], [[] for _ in lines]
        table = DataFrame([[e.value for e in line] for line in body], dtype=float)
        complete = table.dropna(axis="columns")
        models = "models" if self.item.columns == ("model",) else "columns"
        heads = ", ".join(self._head(self.columns[i]) for i in complete) or "none"
        over = [f"Mean over the {models} that have every row: {heads}."] if "mean" in names else []
        spreads = table.max(axis=1) - table.min(axis=1)
        numbers = {
            "mean": complete.mean(axis=1),
            "median": table.median(axis=1),
            "spread": spreads.where(table.count(axis=1) > 1),
        }
        best = table.min(axis=1) if metric.better == "lower" else table.max(axis=1)
        entries = []
        for index, rows in enumerate(lines):
            reference = [row for row in rows if self._reference(row)]
            chosen = [s.gcv_lambda for r in reference for s in r.sites if s.gcv_lambda is not None]
            entry = measurement(reference, self.values[0], notes) if reference else NO_DATUM
            gap = None if entry.value is None else _known(entry.value - best[index])
            line = {
                n: amount(_known(column[index]), metric.digits) for n, column in numbers.items()
            }
            line["reference"], line["gap"] = entry, amount(gap, metric.digits, signed=True)
            line["gcv_lambda"] = significant(statistics.median(chosen) if chosen else None, 2)
            entries.append([line[name] for name in names])
        return over, entries


def _known(value: float) -> float | None:
    return None if isnan(value) else float(value)


def title(
    item: Declaration, keys: Mapping[str, Any], metric: str, rows: Sequence[Row], **names: Any
) -> str:
    """Fill in the title of a table."""
    name = FORMATS[metric].title
    if metric == "zero_shot":
        counts = {len(row.zero_shot.tasks) for row in rows if row.zero_shot}
        name = f"Zero-shot accuracy, mean of {'/'.join(map(str, sorted(counts)))} tasks, %"
    metric_name = f"{name} ({FORMATS[metric].better} is better)"
    return item.table.format_map({**words(keys), "metric": metric_name, **names})


def _capped(rows: Sequence[Row]) -> Datum:
    """Count the modules that went on until the cap on their rounds."""
    rounds = [
        (s.rounds, r.setting("rounds")) for r in rows for s in r.sites if s.rounds is not None
    ]
    reached = sum(count >= cap for count, cap in rounds)
    return Datum(f"{reached} of {len(rounds)}", reached / len(rounds)) if rounds else NO_DATUM


def spreads(item: Declaration, context: Context) -> list[Table]:
    """Draw, per compensation, the spread of the values of one cell along the columns' axis."""
    (name,), metric, rows = item.columns, item.values[0], rows_of(item, context)
    notes, by_repair = Footnotes(), dict[str, list[float]]()
    for line in grouped(rows, lambda r: (r.model, *map(r.setting, item.rows))).values():
        at = grouped(line, lambda r: r.setting(name)).values()
        values = [measurement(seeds, metric, notes).value for seeds in at]
        numbers = [value for value in values if value is not None]
        if len(numbers) > 1:
            repair = str(line[0].setting("compensation"))
            by_repair.setdefault(repair, []).append(max(numbers) - min(numbers))
    if not by_repair:
        return []
    body = tuple(
        (
            Datum(repair),
            Datum(str(len(s)), len(s)),
            amount(statistics.median(s)),
            amount(max(s)),
        )
        for repair, s in by_repair.items()
    )
    count = len({row.setting(name) for row in rows})
    table = Table(
        title(item, {}, metric, rows, count=count),
        ("Compensation", "Cells", "Median spread", "Largest spread"),
        body, notes=item.notes, settings=protocol(rows, varies=(name,)),
    )  # fmt: skip
    return [with_columns(table, item, context, metric)]
