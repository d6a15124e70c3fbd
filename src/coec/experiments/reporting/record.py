"""The summary on top of a report, and lists of cells: the best of them, and the full record."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from coec.events import duration
from coec.experiments.declarations import Declaration
from coec.experiments.reporting.axes import Context, sequential
from coec.experiments.reporting.cost import GIB
from coec.experiments.reporting.protocol import DIGEST, listed, protocol
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    count,
    decimals,
    grouped,
    measurement,
    method_name,
    percent,
    setting_cell,
    significant,
    value_text,
    varying,
)
from coec.experiments.rows import Row
from coec.settings import Reconstruction

DEFAULT = Reconstruction().preset
ENVIRONMENT = ("coec", "python", "torch", "transformers", "device", "machine")
Columns = Mapping[str, Callable[[Row], Cell]]
"""What a list says of every row, by head."""

CELL: Columns = {
    "Cell": lambda row: Cell(row.cell),
    "Model": lambda row: Cell(row.model),
    "Method": lambda row: Cell(method_name(row)),
}


def facts(results: Results) -> tuple[tuple[str, str], ...]:
    """What was run, in name and value."""
    rows = results.rows
    failed = sum(row.status == "failed" for row in rows)
    grids = dict.fromkeys(grid for row in rows for grid in row.grids)
    environments = {name: listed(row.environment.get(name) for row in rows) for name in ENVIRONMENT}
    return (
        ("Cells", f"{len(rows) - failed} done, {failed} failed"),
        ("Grids", ", ".join(grids) or ABSENT),
        ("Models", ", ".join(dict.fromkeys(row.model for row in rows))),
        ("Compute time", duration(_compute(rows))),
        ("Text overlap", _overlap(rows)),
        ("Environment", ", ".join(f"{n} {v}" for n, v in environments.items() if v)),
    )


def _compute(rows: Sequence[Row]) -> float:
    """Seconds of all cells; of a dense pass that several of them share, once."""
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
        largest = max(row.overlap.share or 0.0 for row in rows)
        return (
            f"none of {checked} cells checked is flagged; the largest share of n-grams found in "
            f"both texts is {significant(100 * largest)} %"
        )
    return (
        f"FLAGGED in {flagged} of {checked} cells checked: the evaluation text shares "
        "passages with the calibration text, so perplexity there is too good"
    )


def _list(
    item: Declaration, rows: Sequence[Row], columns: Columns, labels: int, settings: str = ""
) -> list[Table]:
    """A line per row; no table where there is none."""
    body = tuple(tuple(column(row) for column in columns.values()) for row in rows)
    table = Table(item.table, tuple(columns), body, labels, item.notes, settings)
    return [table] if rows else []


def best(item: Declaration, context: Context) -> list[Table]:
    """Per model and sparsity: the pruned model of lowest perplexity, next to the dense one."""
    dense = context.results.dense
    pruned = [r for r in context.rows if r.measured("perplexity") is not None]
    ordered = sorted(pruned, key=lambda r: (r.model, r.sparsity, r.measured("perplexity")))
    found = grouped(ordered, lambda r: (r.model, r.sparsity))

    def base(row: Row) -> float | None:
        return dense[row.model].measured("perplexity") if row.model in dense else None

    def ratio(row: Row) -> Cell:
        value, below = row.measured("perplexity"), base(row)
        times = value / below if value is not None and below else None
        return Cell(f"×{decimals(times, 3)}", times) if times else Cell(ABSENT)

    several = any(row.setting("preset") not in (None, DEFAULT) for row in pruned)
    preset: Columns = {"Preset": lambda row: Cell(value_text(row.setting("preset")))}
    columns: Columns = {
        "Model": CELL["Model"],
        "Sparsity": lambda row: Cell(percent(row.sparsity), row.sparsity),
        **(preset if several else {}),
        "Selection": lambda row: Cell(value_text(row.setting("selection"))),
        "Compensation": lambda row: Cell(_repaired(row)),
        "Perplexity": lambda row: amount(row.measured("perplexity")),
        "Dense": lambda row: amount(base(row)),
        "Pruned / dense": ratio,
        "Parameters kept": _kept,
    }
    used = protocol([*pruned, *dense.values()])
    return _list(item, [rows[0] for rows in found.values()], columns, 4 + several, used)


def _repaired(row: Row) -> str:
    """The compensation, and the settings that run the pruned model beside the dense one."""
    beyond = [(name, row.setting(name)) for name in ("propagate", "reconstruct", "final_norm")]
    said = [name if value is True else f"{name} {value}" for name, value in beyond if value]
    return " + ".join([value_text(row.setting("compensation")), *said])


def _kept(row: Row) -> Cell:
    before, after = row.parameters.before, row.parameters.after
    if not before or after is None:
        return Cell(ABSENT)
    return Cell(f"{100 * after / before:.1f} %", after / before)


def varied(item: Declaration, context: Context) -> list[Table]:
    """One line per cell of a grid: the settings that vary, and what was measured."""
    rows, names, notes = context.rows, varying(context.rows), Footnotes()
    labelled = any(context.grid in row.labels for row in rows)
    others = ("zero_shot", "kl", "agreement")
    known = [m for m in others if any(row.measured(m) is not None for row in rows)]
    metrics = ["perplexity", *known]
    label: Columns = {"Label": lambda row: Cell(row.labels.get(context.grid, ABSENT))}
    columns: Columns = {
        "Model": CELL["Model"],
        **(label if labelled else {}),
        **{name: partial(_setting, name) for name in names},
        **{SHOWN[m][0]: partial(_measured, m, notes) for m in metrics},
        "Parameters": lambda row: count(row.parameters.after),
    }
    made = _list(item, rows, columns, 1 + labelled + len(names), protocol(rows, varies=names))
    return [replace(table, notes=(*table.notes, *notes.lines)) for table in made]


def _setting(name: str, row: Row) -> Cell:
    return setting_cell(row.setting(name))


def _measured(metric: str, notes: Footnotes, row: Row) -> Cell:
    return measurement([row], metric, notes)


def cells(item: Declaration, context: Context) -> list[Table]:
    """One line per cell: digests, sizes, seconds and memory."""
    rows = sorted(context.results.rows, key=lambda r: (r.model, r.sparsity, sequential(r)))
    columns: Columns = {
        **CELL,
        "Status": lambda row: Cell(row.status),
        "Seed": lambda row: setting_cell(row.setting("seed")),
        "Parameters": lambda row: count(row.parameters.after),
        "Perplexity": lambda row: amount(row.measured("perplexity")),
        "Calibration": _drawn,
        "Windows sha256": lambda row: Cell((row.calibration.windows_sha256 or ABSENT)[:DIGEST]),
        "Collecting, s": lambda row: amount(row.seconds.get("collecting"), 1),
        "Pruning, s": lambda row: amount(row.seconds.get("pruning"), 1),
        "Evaluating, s": lambda row: amount(row.seconds.get("evaluating"), 1),
        "Peak memory, GiB": lambda row: amount(
            None if row.peak_memory_bytes is None else row.peak_memory_bytes / GIB
        ),
        "coec": lambda row: Cell(row.environment.get("coec", ABSENT)),
    }
    return _list(item, rows, columns, 4)


def _drawn(row: Row) -> Cell:
    windows, length = row.calibration.windows, row.calibration.seq_len
    return Cell(f"{windows} × {length}" if windows else ABSENT, windows)


def failures(item: Declaration, context: Context) -> list[Table]:
    """Every failed cell and its reason."""
    failed = [row for row in context.results.rows if row.status == "failed"]
    return _list(item, failed, {**CELL, "Reason": lambda row: Cell(row.error or ABSENT)}, 4)


def overlaps(item: Declaration, context: Context) -> list[Table]:
    """Cells whose evaluation text repeats the calibration text."""
    flagged = [row for row in context.results.rows if row.overlap.flagged]
    columns: Columns = {
        **CELL,
        "n": lambda row: count(row.overlap.n),
        "Windows with a shared n-gram": lambda row: count(row.overlap.shared),
        "Of": lambda row: count(row.overlap.windows),
        "Share of n-grams": lambda row: amount(row.overlap.share, 4),
    }
    return _list(item, flagged, columns, 3)


def settings(item: Declaration, context: Context) -> list[Table]:
    """The settings that differ between cells, by cell; the note lists those that do not."""
    rows = context.results.rows
    names = varying(rows)
    every = [name for row in rows for name in row.settings.values]
    every += [name for row in rows for name in row.settings.options]
    same = [
        f"{name} = {listed(row.setting(name) for row in rows) or ABSENT}"
        for name in dict.fromkeys(every)
        if name not in names
    ]
    columns: Columns = {
        "Cell": CELL["Cell"],
        "Model": CELL["Model"],
        **{name: partial(_setting, name) for name in names},
    }
    note = f"The same wherever it applies: {'; '.join(same)}."
    made = _list(item, rows, columns, len(columns))
    return [replace(table, notes=(*table.notes, *([note] if same else []))) for table in made]


def texts(item: Declaration, context: Context) -> list[Table]:
    """Every evaluation and calibration text, with its digest and how much was read."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in context.results.rows:
        p, c = row.perplexity, row.calibration
        if p:
            found["perplexity", p.text, p.text_sha256, p.windows, p.seq_len] += 1
        if c:
            found["calibration", c.source, c.text_sha256, c.windows, c.seq_len] += 1
    body = tuple(
        (Cell(use), Cell(value_text(text)), Cell(digest or ABSENT), *map(count, (*read, times)))
        for (use, text, digest, *read), times in found.items()
    )
    heads = ("Use", "Text", "sha256", "Windows", "Tokens each", "Cells")
    return [Table(item.table, heads, body, labels=3)] if body else []


def events(item: Declaration, context: Context) -> list[Table]:
    """Every safeguard that fired, how often, and in how many cells."""
    fired = [[e for site in row.sites for e in site.events] for row in context.results.rows]
    times = Counter(event for one in fired for event in one)
    cells = Counter(event for one in fired for event in set(one))
    body = tuple((Cell(e), count(n), count(cells[e])) for e, n in times.most_common())
    return [Table(item.table, ("Event", "Modules", "Cells"), body)] if body else []
