"""Tables of lines by columns, as a grid declares them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.reporting.axes import (
    Axes,
    Context,
    cells,
    matches,
    mean_over_sites,
    quantity,
    shown,
    sorting,
    split,
    words,
)
from coec.experiments.reporting.pairs import paired
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.published import with_columns
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    grouped,
    mean_of,
    measurement,
    significant,
    stressed,
    title_of,
)
from coec.experiments.rows import Row

NAMES = {
    "perplexity": "Perplexity", "zero_shot": "Zero-shot accuracy, %", "kl": "KL, nats",
    "agreement": "Same top token, %", "seconds": "Seconds", "memory": "GiB",
    "error_before": "Slice",
    "error_after": "Fit", "holdout_before": "Slice, held out", "holdout_after": "Held out",
    "capped": "At the cap", "angle_op": "O–P, degrees", "angle_oc": "O–C, degrees",
    "angle_pc": "P–C, degrees",
}  # fmt: skip
"""What a head calls a quantity of the modules."""


def fits(item: Declaration, context: Context) -> bool:
    """Whether the rows are such that the table says what it is declared to say.

    At most the seed differs between cells of one entry, where that is asked for; and some cell has
    a label, where lines are labels.
    """
    if "label" in item.rows:
        return any(context.grid in row.labels for row in context.rows)
    names = ["model", *item.each, *item.rows, *item.columns]
    places: dict[Any, set[str]] = {}
    for row in context.rows:
        place = (row.model, *(row.setting(name) for name in names))
        values = {**row.settings.values, "seed": None}
        places.setdefault(place, set()).add(repr((values, row.settings.options)))
    return not item.single or all(len(alike) == 1 for alike in places.values())


def pivot(item: Declaration, context: Context) -> list[Table]:
    """A table for every value of `each`, and for every quantity that is no column."""
    rows, tables = shown(item, context), []
    rows = [r for r in rows if all(r.setting(n) is not None for n in _settings(item.columns))]
    for values in [item.values] if "value" in item.columns else [(name,) for name in item.values]:
        if any(quantity(row, name) for row in rows for name in values):
            known = [r for r in rows if r.status == "failed" or any(quantity(r, n) for n in values)]
            for keys, found in split(known, item.each, item, context.grid):
                tables.append(_Pivot(item, context, keys, found, values).table())
    return [table for table in tables if table is not None]


def _settings(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in ("model", "value")]


@dataclass(frozen=True)
class _Pivot:
    """One table: where it stands among several, its rows, and what it shows of them."""

    item: Declaration
    context: Context
    keys: Mapping[str, Any]
    rows: Sequence[Row]
    values: tuple[str, ...]

    def table(self) -> Table | None:
        """The table; None where no entry has a number or a failure."""
        item, metric, notes = self.item, self.values[0], Footnotes()
        axes, columns = Axes(item, self.context.grid, self.rows), self._columns()
        lines = axes.grouped(*item.rows)
        body = [[self._entry(found, at, notes) for at in columns] for found in lines.values()]
        pairs = paired(item, list(lines), body, metric) if item.ours else []
        body = self._stressed(body, columns)
        over, extra = self._extra(list(lines.values()), body, columns, notes)
        if all(cell.text == ABSENT for line in (*body, *extra) for cell in line):
            return None
        heads = [head for name in item.rows for head in axes.heads(name)]
        labels = [[c for n, key in zip(item.rows, keys) for c in cells(n, key)] for keys in lines]
        top, dense = self._dense(columns, len(heads), notes)
        alone = _settings(item.columns) if len(item.columns) == 1 else []
        table = Table(
            title(item, self.keys, metric, self.rows),
            (*heads, *(self._head(at, columns) for at in columns), *item.extra),
            (*top, *((*one, *two, *three) for one, two, three in zip(labels, body, extra))),
            labels=len(heads),
            notes=(*over, *(pair.sentence for pair in pairs), *item.notes, *notes.lines),
            settings=protocol([*self.rows, *dense], varies=(*alone, *axes.told)),
        )
        return with_columns(table, item, self.context, metric)

    def _columns(self) -> list[dict[str, Any]]:
        """The places of the columns: every combination of the values of their axes."""
        models = [row.model for row in self.rows]
        if "model" not in self.item.sort:
            models = [row.model for row in self.context.rows if row.model in models]
        axes: list[Sequence[Any]] = []
        for name in self.item.columns:
            if name in ("model", "value"):
                axes.append(list(dict.fromkeys(models)) if name == "model" else self.values)
            else:
                own = [row for row in self.rows if not self._compared(row)]
                axes.append(sorted({row.setting(name) for row in own}, key=sorting))
        return [dict(zip(self.item.columns, at)) for at in product(*axes)]

    def _compared(self, row: Row) -> bool:
        return bool(self.item.reference) and matches(row, self.item.reference)

    def _entry(self, rows: Sequence[Row], at: Mapping[str, Any], notes: Footnotes) -> Cell:
        found = [
            row for row in rows
            if not self._compared(row) and row.model == at.get("model", row.model)
            and all(row.setting(name) == at[name] for name in _settings(list(at)))
        ]  # fmt: skip
        name = at.get("value", self.values[0])
        if name in SHOWN:
            return measurement(found, name, notes)
        if name == "capped":
            return _capped(found)
        return amount(mean_over_sites(found, self.keys.get("site"), name), 4)

    def _head(self, at: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]) -> str:
        """What the template says, without settings that are the same in all of several columns."""
        parts = (self.item.head or ", ".join(f"{{{name}}}" for name in at)).split(", ")
        same = [n for n in _settings(list(at)) if all(c[n] == at[n] for c in columns)]
        kept = [p for p in parts if len(parts) == 1 or not any(f"{{{n}}}" in p for n in same)]
        return ", ".join(kept).format_map(words(at) | {"value": NAMES.get(at.get("value", ""), "")})

    def _stressed(
        self, body: list[list[Cell]], columns: Sequence[Mapping[str, Any]]
    ) -> list[list[Cell]]:
        if self.item.best == "row":
            return [stressed(line, self.values[0]) for line in body]
        if self.item.best == "column":
            names = [at.get("value", self.values[0]) for at in columns]
            turned = [stressed(list(column), name) for column, name in zip(zip(*body), names)]
            return [list(line) for line in zip(*turned)]
        return body

    def _dense(
        self, columns: Sequence[Mapping[str, Any]], labels: int, notes: Footnotes
    ) -> tuple[list[tuple[Cell, ...]], list[Row]]:
        """The line of the dense models, where it is asked for, and their rows."""
        if not self.item.dense:
            return [], []
        dense = self.context.results.dense
        found = [[dense[at["model"]]] if at["model"] in dense else [] for at in columns]
        numbers = [measurement(rows, self.values[0], notes) for rows in found]
        line = (Cell("dense"), *[Cell(ABSENT)] * (labels - 1), *numbers)
        return [line], [row for rows in found for row in rows]

    def _extra(
        self, lines: Sequence[Sequence[Row]], body: Sequence[Sequence[Cell]],
        columns: Sequence[Mapping[str, Any]], notes: Footnotes,
    ) -> tuple[list[str], list[list[Cell]]]:  # fmt: skip
        """The columns at the end, and a sentence on what a mean is over."""
        names = list(self.item.extra.values())
        whole = [i for i in range(len(columns)) if all(line[i].value is not None for line in body)]
        what = "models" if self.item.columns == ("model",) else "columns"
        over = ", ".join(self._head(columns[i], columns) for i in whole) or "none"
        said = [f"Mean over the {what} that have every row: {over}."] if "mean" in names else []
        made = []
        for rows, line in zip(lines, body):
            compared = [row for row in rows if self._compared(row)]
            means = [line[i].value for i in whole]
            made.append([self._summary(name, line, means, compared, notes) for name in names])
        return said, made

    def _summary(
        self, name: str, line: Sequence[Cell], means: Sequence[float | None],
        compared: Sequence[Row], notes: Footnotes,
    ) -> Cell:  # fmt: skip
        """One entry at the end of a line."""
        _, digits, better = SHOWN[self.values[0]]
        known = [cell.value for cell in line if cell.value is not None]
        if name == "mean":
            return amount(mean_of(means), digits)
        if name == "median":
            return amount(statistics.median(known) if known else None, digits)
        if name == "spread":
            return amount(max(known) - min(known) if len(known) > 1 else None, digits)
        if name == "gcv_lambda":
            chosen = [s.gcv_lambda for r in compared for s in r.sites if s.gcv_lambda is not None]
            middle = statistics.median(chosen) if chosen else None
            return Cell(ABSENT) if middle is None else Cell(significant(middle, 2), middle)
        found = measurement(compared, self.values[0], notes)
        if name == "reference" or found.value is None or not known:
            return found if name == "reference" else Cell(ABSENT)
        best = min(known) if better == "lower" else max(known)
        return amount(found.value - best, digits, signed=True)


def title(
    item: Declaration, keys: Mapping[str, Any], metric: str, rows: Sequence[Row], **more: Any
) -> str:
    """The title of a table, its places filled in."""
    named = {"metric": title_of(metric, rows)} if metric in SHOWN else {}
    return item.table.format_map({**words(keys), **named, **more})


def _capped(rows: Sequence[Row]) -> Cell:
    """How many modules went on until the cap on their rounds."""
    taken = [(s.rounds, r.setting("rounds")) for r in rows for s in r.sites if s.rounds is not None]
    reached = sum(rounds >= cap for rounds, cap in taken)
    return Cell(f"{reached} of {len(taken)}", reached / len(taken)) if taken else Cell(ABSENT)


def spreads(item: Declaration, context: Context) -> list[Table]:
    """Per compensation: how far the values of one cell lie apart along the columns' axis."""
    (name,), metric, rows = item.columns, item.values[0], shown(item, context)
    notes, found = Footnotes(), dict[str, list[float]]()
    for line in grouped(rows, lambda r: (r.model, *map(r.setting, item.rows))).values():
        at = grouped(line, lambda r: r.setting(name)).values()
        values = [measurement(same, metric, notes).value for same in at]
        known = [value for value in values if value is not None]
        if len(known) > 1:
            spread = max(known) - min(known)
            found.setdefault(str(line[0].setting("compensation")), []).append(spread)
    if not found:
        return []
    body = tuple(
        (Cell(pruning), Cell(str(len(s)), len(s)), amount(statistics.median(s)), amount(max(s)))
        for pruning, s in found.items()
    )
    count = len({row.setting(name) for row in rows})
    table = Table(
        title(item, {}, metric, rows, count=count),
        ("Compensation", "Cells", "Median spread", "Largest spread"),
        body, notes=item.notes, settings=protocol(rows, varies=(name,)),
    )  # fmt: skip
    return [with_columns(table, item, context, metric)]
