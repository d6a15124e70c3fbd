"""Lists of cells, a line each: the best of them, the varied ones, and the full record."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from coec.events import duration
from coec.experiments.declarations import Declaration
from coec.experiments.reporting.axes import Context, in_order
from coec.experiments.reporting.protocol import DIGEST, listed, protocol
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.values import (
    ABSENT,
    FORMATS,
    GIB,
    Datum,
    Footnotes,
    Table,
    amount,
    count,
    grouped,
    measurement,
    method_name,
    percent,
    setting_entry,
    setting_text,
    share,
    significant,
    times,
    varying,
)
from coec.experiments.rows import Row
from coec.settings import Reconstruction

_DEFAULT_PRESET = Reconstruction().preset
_ENVIRONMENT = ("coec", "python", "torch", "transformers", "device", "machine")
Columns = Mapping[str, Callable[[Row], Datum]]
"""Entries of a list by head, as functions of a row."""

_CELL: Columns = {
    "Cell": lambda row: Datum(row.cell),
    "Model": lambda row: Datum(row.model),
    "Method": lambda row: Datum(method_name(row)),
}


def facts(results: Results) -> tuple[tuple[str, str], ...]:
    """Return the summary of a sweep, in name and value."""
    rows = results.rows
    failed = sum(row.status == "failed" for row in rows)
    grids = dict.fromkeys(grid for row in rows for grid in row.grids)
    versions = {name: listed(row.environment.get(name) for row in rows) for name in _ENVIRONMENT}
    return (
        ("Cells", f"{len(rows) - failed} done, {failed} failed"),
        ("Grids", ", ".join(grids) or ABSENT),
        ("Models", ", ".join(dict.fromkeys(row.model for row in rows))),
        ("Compute time", duration(_compute(rows))),
        ("Text overlap", _overlap(rows)),
        ("Environment", ", ".join(f"{n} {v}" for n, v in versions.items() if v)),
    )


def _compute(rows: Sequence[Row]) -> float:
    """Add up the seconds of all cells; those of a dense pass that several cells share, once."""
    passes: dict[tuple[Any, ...], float] = {}
    total = 0.0
    for row in rows:
        key = row.model, row.calibration.windows_sha256, row.setting("holdout")
        passes[key] = max(row.seconds.get("collecting", 0.0), passes.get(key, 0.0))
        total += sum(value for name, value in row.seconds.items() if name != "collecting")
    return total + sum(passes.values())


def _overlap(rows: Sequence[Row]) -> str:
    checked = sum(bool(row.overlap) for row in rows)
    flagged = sum(bool(row.overlap.flagged) for row in rows)
    if not checked:
        return "calibration and evaluation text were not compared"
    if not flagged:
        largest = 100 * max(row.overlap.share or 0.0 for row in rows)
        return (
            f"none of {checked} cells checked is flagged; the largest share of n-grams found in "
            f"both texts is {significant(largest).text} %"
        )
    return (
        f"FLAGGED in {flagged} of {checked} cells checked: the evaluation text shares "
        "passages with the calibration text, so perplexity there is too good"
    )


def _list(
    item: Declaration, rows: Sequence[Row], columns: Columns, labels: int, settings: str = ""
) -> list[Table]:
    body = tuple(tuple(column(row) for column in columns.values()) for row in rows)
    return [Table(item.table, tuple(columns), body, labels, item.notes, settings)] if rows else []


def best(item: Declaration, context: Context) -> list[Table]:
    """List the pruned model of lowest perplexity per model and sparsity, beside the dense one."""
    dense = context.results.dense
    pruned = [r for r in context.rows if r.measured("perplexity") is not None]
    ordered = sorted(pruned, key=lambda r: (r.model, r.sparsity, r.measured("perplexity")))
    groups = grouped(ordered, lambda r: (r.model, r.sparsity))

    def base(row: Row) -> float | None:
        return dense[row.model].measured("perplexity") if row.model in dense else None

    several = any(row.setting("preset") not in (None, _DEFAULT_PRESET) for row in pruned)
    preset: Columns = {"Preset": lambda row: setting_entry(row.setting("preset"))}
    columns: Columns = {
        "Model": _CELL["Model"],
        "Sparsity": lambda row: Datum(percent(row.sparsity), row.sparsity),
        **(preset if several else {}),
        "Selection": lambda row: setting_entry(row.setting("selection")),
        "Compensation": lambda row: Datum(_repaired(row)),
        "Perplexity": lambda row: amount(row.measured("perplexity")),
        "Dense": lambda row: amount(base(row)),
        "Pruned / dense": lambda row: times(row.measured("perplexity"), base(row)),
        "Parameters kept": lambda row: share(row.parameters.after, row.parameters.before),
    }
    settings = protocol([*pruned, *dense.values()])
    return _list(item, [rows[0] for rows in groups.values()], columns, 4 + several, settings)


def _repaired(row: Row) -> str:
    """Name the compensation, and the settings that run the pruned model beside the dense one."""
    settings = [(name, row.setting(name)) for name in ("propagate", "reconstruct", "final_norm")]
    names = [name if value is True else f"{name} {value}" for name, value in settings if value]
    return " + ".join([setting_text(row.setting("compensation")), *names])


def varied(item: Declaration, context: Context) -> list[Table]:
    """List the cells of a grid with the settings that vary, and what was measured."""
    rows, names, notes = context.rows, varying(context.rows), Footnotes()
    labelled = any(context.grid in row.labels for row in rows)
    metrics = ["perplexity"] + [
        metric for metric in ("zero_shot", "kl", "agreement")
        if any(row.measured(metric) is not None for row in rows)
    ]  # fmt: skip
    label: Columns = {"Label": lambda row: Datum(row.labels.get(context.grid, ABSENT))}
    columns: Columns = {
        "Model": _CELL["Model"],
        **(label if labelled else {}),
        **{name: partial(_setting, name) for name in names},
        **{FORMATS[metric].title: partial(_measured, metric, notes) for metric in metrics},
        "Parameters": lambda row: count(row.parameters.after),
    }
    tables = _list(item, rows, columns, 1 + labelled + len(names), protocol(rows, varies=names))
    return [replace(table, notes=(*table.notes, *notes.lines)) for table in tables]


def _setting(name: str, row: Row) -> Datum:
    return setting_entry(row.setting(name))


def _measured(metric: str, notes: Footnotes, row: Row) -> Datum:
    return measurement([row], metric, notes)


def cells(item: Declaration, context: Context) -> list[Table]:
    """List digests, sizes, seconds and memory of every cell."""
    rows = sorted(context.results.rows, key=lambda r: (r.model, r.sparsity, in_order(r)))

    def windows(row: Row) -> Datum:
        number, length = row.calibration.windows, row.calibration.seq_len
        return Datum(f"{number} × {length}" if number else ABSENT, number)

    columns: Columns = {
        **_CELL,
        "Status": lambda row: Datum(row.status),
        "Seed": lambda row: setting_entry(row.setting("seed")),
        "Parameters": lambda row: count(row.parameters.after),
        "Perplexity": lambda row: amount(row.measured("perplexity")),
        "Calibration": windows,
        "Windows sha256": lambda row: Datum((row.calibration.windows_sha256 or ABSENT)[:DIGEST]),
        "Collecting, s": lambda row: amount(row.seconds.get("collecting"), 1),
        "Pruning, s": lambda row: amount(row.seconds.get("pruning"), 1),
        "Evaluating, s": lambda row: amount(row.seconds.get("evaluating"), 1),
        "Peak memory, GiB": lambda row: amount(row.measured("memory")),
        "coec": lambda row: Datum(row.environment.get("coec", ABSENT)),
    }
    return _list(item, rows, columns, 4)


def failures(item: Declaration, context: Context) -> list[Table]:
    """List every failed cell and its reason."""
    failed = [row for row in context.results.rows if row.status == "failed"]
    return _list(item, failed, {**_CELL, "Reason": lambda row: Datum(row.error or ABSENT)}, 4)


def overlaps(item: Declaration, context: Context) -> list[Table]:
    """List the cells whose evaluation text repeats the calibration text."""
    columns: Columns = {
        **_CELL,
        "n": lambda row: count(row.overlap.n),
        "Windows with a shared n-gram": lambda row: count(row.overlap.shared),
        "Of": lambda row: count(row.overlap.windows),
        "Share of n-grams": lambda row: amount(row.overlap.share, 4),
    }
    return _list(item, [row for row in context.results.rows if row.overlap.flagged], columns, 3)


def settings(item: Declaration, context: Context) -> list[Table]:
    """List the settings that differ between cells; a note lists those that do not."""
    rows = context.results.rows
    names = varying(rows)
    every = [name for row in rows for name in row.settings.values]
    every += [name for row in rows for name in row.settings.options]
    constant = [
        f"{name} = {listed(row.setting(name) for row in rows) or ABSENT}"
        for name in dict.fromkeys(every)
        if name not in names
    ]
    columns: Columns = {
        "Cell": _CELL["Cell"],
        "Model": _CELL["Model"],
        **{name: partial(_setting, name) for name in names},
    }
    notes = [f"The same wherever it applies: {'; '.join(constant)}."] if constant else []
    tables = _list(item, rows, columns, len(columns))
    return [replace(table, notes=(*table.notes, *notes)) for table in tables]


def texts(item: Declaration, context: Context) -> list[Table]:
    """List every evaluation and calibration text, with its digest and how much was read."""
    uses: Counter[tuple[Any, ...]] = Counter()
    for row in context.results.rows:
        p, c = row.perplexity, row.calibration
        if p:
            uses["perplexity", p.text, p.text_sha256, p.windows, p.seq_len] += 1
        if c:
            uses["calibration", c.source, c.text_sha256, c.windows, c.seq_len] += 1
    body = tuple(
        (
            Datum(use),
            Datum(setting_text(text)),
            Datum(digest or ABSENT),
            *map(count, (*read, n)),
        )
        for (use, text, digest, *read), n in uses.items()
    )
    heads = ("Use", "Text", "sha256", "Windows", "Tokens each", "Cells")
    return [Table(item.table, heads, body, labels=3)] if body else []


def events(item: Declaration, context: Context) -> list[Table]:
    """List every safeguard that fired, how often, and in how many cells."""
    by_cell = [[e for site in row.sites for e in site.events] for row in context.results.rows]
    modules = Counter(event for events_of_cell in by_cell for event in events_of_cell)
    cells_of = Counter(event for events_of_cell in by_cell for event in set(events_of_cell))
    body = tuple((Datum(e), count(n), count(cells_of[e])) for e, n in modules.most_common())
    return [Table(item.table, ("Event", "Modules", "Cells"), body)] if body else []


def cost(item: Declaration, context: Context) -> list[Table]:
    """List parameters, operations, weights and memory per model, sparsity and size."""
    sized = [row for row in context.results.rows if row.parameters.after is not None]
    if all(row.dense for row in sized):
        return []
    ordered = sorted(sized, key=lambda r: (r.model, r.sparsity))
    groups = grouped(
        ordered, lambda r: (r.model, r.sparsity, r.parameters.after, r.cost.weight_bytes)
    )
    heads = (
        "Model", "Sparsity", "Compensations", "Parameters", "Of the dense",
        "GFLOPs per token", "Weights, GiB", "Memory, GiB",
    )  # fmt: skip
    notes = list(item.notes)
    if any(row.cost.peak_memory_bytes is not None for row in sized):
        devices = listed(row.environment.get("device") for row in sized) or "device unknown"
        notes.append(
            f"Memory: the most held while the perplexity was measured ({devices}); allocated on a "
            "GPU, resident in the whole process on a CPU, where Python and its libraries have a "
            "large share."
        )
    return [Table(item.table, heads, tuple(map(_cost_line, groups.values())), 3, tuple(notes))]


def _cost_line(rows: Sequence[Row]) -> tuple[Datum, ...]:
    first = rows[0]
    after, weights = first.parameters.after or 0, first.cost.weight_bytes
    peaks = [r.cost.peak_memory_bytes for r in rows if r.cost.peak_memory_bytes is not None]
    return (
        Datum(first.model),
        Datum("dense" if first.dense else percent(first.sparsity), first.sparsity),
        Datum(listed((row.setting("compensation") for row in rows), limit=8)),
        count(after),
        share(after, first.parameters.before),
        significant(2 * after / 1e9),
        significant(None if weights is None else weights / GIB),
        significant(max(peaks) / GIB if peaks else None),
    )
