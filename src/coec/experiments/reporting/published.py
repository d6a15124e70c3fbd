"""Published numbers beside ours."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.publications import Publication, PublishedColumns, PublishedCost
from coec.experiments.reporting.axes import Axes, Context, in_order
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.values import (
    FORMATS,
    GIB,
    Datum,
    Footnotes,
    Table,
    amount,
    grouped,
    measurement,
    method_name,
    percent,
    share,
)
from coec.experiments.rows import Row

_HEADS = {"perplexity": ("Perplexity", ""), "zero_shot": ("Zero-shot", ", %")}


def normal_name(model: str, publication: Publication) -> str:
    """Return a model's name without owner, case, and parts that the publication does not print."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    for prefix in publication.prefixes:
        name = name.removeprefix(prefix)
    for suffix in publication.suffixes:
        name = name.removesuffix(suffix)
    return name


def printed(row: Row, metric: str, publication: Publication) -> float | None:
    """Return the published number of this model, method and sparsity; None if there is none."""
    model = normal_name(row.model, publication)
    for table in publication.comparison:
        models = [normal_name(name, publication) for name in table.models]
        if (table.metric, table.sparsity) == (metric, round(row.sparsity, 4)) and model in models:
            by_repair = table.values.get(str(row.setting("selection")), {})
            numbers = by_repair.get(str(row.setting("compensation")))
            return None if numbers is None else numbers[models.index(model)]
    return None


def with_columns(table: Table, item: Declaration, context: Context, metric: str) -> Table:
    """Add the published columns that a table declares, where they were asked for."""
    publication = context.publication
    if publication is None or item.published != context.published:
        return table
    declared = publication.columns.get(item.beside)
    lines = [row[0].text for row in table.rows]
    columns = [c for c in declared.columns if c.metric in (None, metric)] if declared else []
    if declared is None or not any(line in c.values for c in columns for line in lines):
        return table
    ours = {normal_name(row.model, publication) for row in context.rows}
    theirs_too = ours == {normal_name(model, publication) for model in declared.models}
    words = _words(declared, publication, "the same" if theirs_too else "other")
    entries = [
        [amount(c.values.get(line), FORMATS[c.metric or metric].digits) for c in columns]
        for line in lines
    ]
    return replace(
        table,
        heads=(*table.heads, *(column.head.format_map(words) for column in columns)),
        rows=tuple((*row, *beside) for row, beside in zip(table.rows, entries)),
        notes=(*table.notes, declared.note.format_map(words)),
    )


def _words(columns: PublishedColumns, publication: Publication, which: str) -> Mapping[str, Any]:
    """Return the words that a note or a head of published columns may name."""
    models = ", ".join(columns.models)
    return {**publication.protocol, "which": which, "count": len(columns.models), "models": models}


def _both_protocols(rows: Sequence[Row], publication: Publication) -> str:
    name = _capital(publication.name)
    return f"Ours. {protocol(rows)} {name}. {_protocol(publication)}"


def _protocol(publication: Publication) -> str:
    sentences = publication.protocol.items()
    return " ".join(f"{_capital(name.replace('_', '-'))}: {text}." for name, text in sentences)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def beside(item: Declaration, context: Context) -> list[Table]:
    """Draw ours beside the published numbers, for every cell of a model that they have.

    Cells that differ in more than the seed have a line each.
    """
    publication = context.publication
    if publication is None:
        return []
    matched = [
        row for row in sorted(context.rows, key=lambda r: (r.model, r.sparsity, in_order(r)))
        if any(printed(row, metric, publication) is not None for metric in _HEADS)
    ]  # fmt: skip
    notes, body, axes = Footnotes(), [], Axes(item, context.grid, matched)

    def place(row: Row) -> tuple[Any, ...]:
        return row.model, row.sparsity, in_order(row), axes.differences(row)

    for rows in grouped(matched, place).values():
        entries = [
            Datum(rows[0].model),
            Datum(method_name(rows[0]) + axes.differences(rows[0])),
        ]
        for metric in _HEADS:
            number = printed(rows[0], metric, publication)
            entries.append(measurement(rows, metric, notes))
            entries.append(amount(number, FORMATS[metric].digits))
        body.append(tuple(entries))
    heads = [
        f"{name}{source}{unit}" for name, unit in _HEADS.values()
        for source in ("", f", {publication.short}")
    ]  # fmt: skip
    table = Table(
        item.table.format(published=publication.name), ("Model", "Method", *heads), tuple(body), 2,
        notes.lines, _both_protocols(matched, publication),
    )  # fmt: skip
    return [table] if body else []


def alone(item: Declaration, context: Context) -> list[Table]:
    """Draw published tables by themselves, for sweeps without a model of theirs."""
    publication, tables = context.publication, []
    if publication is None or beside(item, context):
        return []
    for declared in publication.columns.values():
        columns = [(c, c.metric) for c in declared.columns if c.metric]
        if declared.title and columns:
            heads = ["".join(_HEADS[metric]) for _, metric in columns]
            body = tuple(
                (
                    Datum(line),
                    *(amount(c.values.get(line), FORMATS[m].digits) for c, m in columns),
                )
                for line in dict.fromkeys(line for c, _ in columns for line in c.values)
            )
            notes = (declared.alone.format_map(_words(declared, publication, "other")),)
            heads = ["Configuration", *heads]
            settings = _protocol(publication)
            tables.append(Table(declared.title, tuple(heads), body, 1, notes, settings))
    return tables


def costs_beside(item: Declaration, context: Context) -> list[Table]:
    """Draw cost before and after pruning beside the published one, model by model."""
    publication = context.publication
    source = publication.efficiency if publication else None
    if publication is None or source is None:
        return []
    costs = {normal_name(model, publication): cost for model, cost in source.models.items()}
    rows = {
        row.model: row for row in context.results.rows
        if normal_name(row.model, publication) in costs
        and round(row.sparsity, 4) == source.sparsity
        and None not in (row.parameters.before, row.parameters.after)
    }  # fmt: skip
    dense = context.results.dense
    body = [
        line for model, row in rows.items()
        for line in _costs(row, dense.get(model), costs[normal_name(model, publication)],
                           f"Memory, GiB ({publication.name}: GB)")
    ]  # fmt: skip
    who = _capital(publication.short)
    heads = ("Model", "Cost", "Dense", "Pruned", "Kept", f"{who}, dense", f"{who}, pruned", "Kept")
    table = Table(
        f"Cost at {percent(source.sparsity)} sparsity", heads, tuple(body), labels=2,
        settings=_both_protocols(list(rows.values()), publication),
    )  # fmt: skip
    return [table] if body else []


def _costs(
    row: Row, dense: Row | None, cost: PublishedCost, memory: str
) -> Iterator[tuple[Datum, ...]]:
    """Yield parameters, operations and memory of one model: ours, published, and what was kept."""
    sizes = [(row.parameters.before or 0) / 1e9, (row.parameters.after or 0) / 1e9]
    peaks = [r.cost.peak_memory_bytes if r else None for r in (dense, row)]
    for name, published, ours in (
        ("Parameters, billions", cost.parameters, sizes),
        ("GFLOPs per token", cost.gflops, [2 * size for size in sizes]),
        (memory, cost.memory, [peak and peak / GIB for peak in peaks]),
    ):
        pairs = [(*map(amount, pair), share(pair[1], pair[0])) for pair in (ours, published)]
        yield Datum(row.model), Datum(name), *pairs[0], *pairs[1]
