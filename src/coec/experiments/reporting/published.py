"""Numbers that others have printed, beside ours."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.publications import Printed, Publication, Size
from coec.experiments.reporting.axes import Axes, Context, sequential
from coec.experiments.reporting.cost import GIB, gflops, memory
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    grouped,
    measurement,
    method_name,
    percent,
)
from coec.experiments.rows import Row

HEADS = {"perplexity": "Perplexity", "zero_shot": "Zero-shot"}
UNITS = {"perplexity": "", "zero_shot": ", %"}


def normal_name(model: str, theirs: Publication) -> str:
    """A model's name without owner, case, and what hub names carry and they do not print."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    for prefix in theirs.prefixes:
        name = name.removeprefix(prefix)
    for suffix in theirs.suffixes:
        name = name.removesuffix(suffix)
    return name


def printed(row: Row, metric: str, theirs: Publication) -> float | None:
    """What they print for this model, method and sparsity; None if they do not."""
    model = normal_name(row.model, theirs)
    for block in theirs.comparison:
        names = [normal_name(name, theirs) for name in block.models]
        if (block.metric, block.sparsity) == (metric, round(row.sparsity, 4)) and model in names:
            by_repair = block.values.get(str(row.setting("selection")), {})
            numbers = by_repair.get(str(row.setting("compensation")))
            return None if numbers is None else numbers[names.index(model)]
    return None


def with_columns(table: Table, item: Declaration, context: Context, metric: str) -> Table:
    """A table with the published columns that it declares, where they were asked for."""
    theirs = context.compare
    part = theirs.columns.get(item.part) if theirs and item.published == context.published else None
    if theirs is None or part is None:
        return table
    own = {normal_name(row.model, theirs) for row in context.rows}
    same = own == {normal_name(model, theirs) for model in part.models}
    words = _words(part, theirs, "the same" if same else "other")
    columns = [column for column in part.columns if column.metric in (None, metric)]
    labels = [row[0].text for row in table.rows]
    if not any(label in column.values for column in columns for label in labels):
        return table
    beside = [
        [amount(column.values.get(label), SHOWN[column.metric or metric][1]) for column in columns]
        for label in labels
    ]
    return replace(
        table,
        heads=(*table.heads, *(column.head.format_map(words) for column in columns)),
        rows=tuple((*row, *more) for row, more in zip(table.rows, beside)),
        notes=(*table.notes, part.note.format_map(words)),
    )


def _words(part: Printed, theirs: Publication, which: str) -> dict[str, Any]:
    """What a note or a head of theirs may name."""
    models = ", ".join(part.models)
    return {**theirs.protocol, "which": which, "count": len(part.models), "models": models}


def _differences(rows: Sequence[Row], theirs: Publication) -> str:
    """Both protocols, in one note."""
    return f"Ours. {protocol(rows)} {_capital(theirs.name)}. {_protocol(theirs)}"


def _protocol(theirs: Publication) -> str:
    names = {name: _capital(name.replace("_", "-")) for name in theirs.protocol}
    return " ".join(f"{names[name]}: {value}." for name, value in theirs.protocol.items())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def beside(item: Declaration, context: Context) -> list[Table]:
    """Ours beside theirs, for every cell of a model that they have.

    Cells that differ in more than the seed have a line each.
    """
    theirs = context.compare
    if theirs is None:
        return []
    matched = [
        row for row in sorted(context.rows, key=lambda r: (r.model, r.sparsity, sequential(r)))
        if any(printed(row, metric, theirs) is not None for metric in HEADS)
    ]  # fmt: skip
    notes, body, axes = Footnotes(), [], Axes(item, context.grid, matched)

    def place(row: Row) -> tuple[Any, ...]:
        return row.model, row.sparsity, sequential(row), axes.differs(row)

    for found in grouped(matched, place).values():
        numbers = [
            cell for metric in HEADS
            for cell in (measurement(found, metric, notes),
                         amount(printed(found[0], metric, theirs), SHOWN[metric][1]))
        ]  # fmt: skip
        name = method_name(found[0]) + axes.differs(found[0])
        body.append((Cell(found[0].model), Cell(name), *numbers))
    heads = [
        f"{HEADS[m]}{more}{UNITS[m]}" for m in HEADS for more in ("", f", {theirs.short}")
    ]  # fmt: skip
    table = Table(
        item.table.format(published=theirs.name), ("Model", "Method", *heads), tuple(body), 2,
        notes.lines, _differences(matched, theirs),
    )  # fmt: skip
    return [table] if body else []


def alone(item: Declaration, context: Context) -> list[Table]:
    """Their tables by themselves, for sweeps that have no model of theirs."""
    theirs = context.compare
    if theirs is None or beside(item, context):
        return []
    made = []
    for part in theirs.columns.values():
        columns = [(column, column.metric) for column in part.columns if column.metric]
        if part.title and columns:
            heads = [f"{HEADS[metric]}{UNITS[metric]}" for _, metric in columns]
            body = tuple(
                (Cell(label), *(amount(c.values.get(label), SHOWN[m][1]) for c, m in columns))
                for label in dict.fromkeys(label for c, _ in columns for label in c.values)
            )
            note = part.alone.format_map(_words(part, theirs, "other"))
            made.append(
                Table(part.title, ("Configuration", *heads), body, 1, (note,), _protocol(theirs))
            )
    return made


def costs_beside(item: Declaration, context: Context) -> list[Table]:
    """Cost before and after pruning beside theirs, for the models whose cost they print."""
    theirs = context.compare
    source = theirs.efficiency if theirs else None
    if theirs is None or source is None:
        return []
    costs = {normal_name(model, theirs): cost for model, cost in source.models.items()}
    found = {
        row.model: row for row in context.results.rows
        if normal_name(row.model, theirs) in costs
        and round(row.sparsity, 4) == source.sparsity
        and None not in (row.parameters.before, row.parameters.after)
    }  # fmt: skip
    dense = context.results.dense
    body = [
        line for model, row in found.items()
        for line in _costs(row, dense.get(model), costs[normal_name(model, theirs)], theirs)
    ]  # fmt: skip
    who = _capital(theirs.short)
    table = Table(
        f"Cost at {percent(source.sparsity)} sparsity",
        ("Model", "Cost", "Dense", "Pruned", "Kept", f"{who}, dense", f"{who}, pruned", "Kept"),
        tuple(body), labels=2, settings=_differences(list(found.values()), theirs),
    )  # fmt: skip
    return [table] if body else []


def _costs(
    row: Row, dense: Row | None, size: Size, theirs: Publication
) -> Iterator[tuple[Cell, ...]]:
    """Parameters, operations and memory of one model: ours, theirs, and what was kept."""
    sizes = [row.parameters.before or 0, row.parameters.after or 0]
    held = [memory([dense] if dense else []), memory([row])]
    for name, their_own, ours in (
        ("Parameters, billions", size.parameters, [count / 1e9 for count in sizes]),
        ("GFLOPs per token", size.gflops, [gflops(count) for count in sizes]),
        (f"Memory, GiB ({theirs.name}: GB)", size.memory, [h and h / GIB for h in held]),
    ):
        cells = [cell for pair in (ours, their_own) for cell in _before_and_after(pair)]
        yield Cell(row.model), Cell(name), *cells


def _before_and_after(pair: Sequence[float | None]) -> tuple[Cell, ...]:
    before, after = pair
    kept = after / before if before and after else None
    share = Cell(ABSENT) if kept is None else Cell(f"{100 * kept:.1f} %", kept)
    return amount(before), amount(after), share
