"""The summary on top of a report, and the full record at its end."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from coec.experiments.records import number
from coec.experiments.reporting.comparison import in_order
from coec.experiments.reporting.cost import GIB
from coec.experiments.reporting.protocol import DIGEST, listed, protocol
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import (
    ABSENT,
    Cell,
    Table,
    amount,
    decimals,
    grouped,
    method_name,
    percent,
    setting_cell,
    significant,
    value_text,
    varying,
)
from coec.experiments.rows import Row

ENVIRONMENT = ("coec", "python", "torch", "transformers", "device", "machine")


def facts(results: Results) -> tuple[tuple[str, str], ...]:
    """What was run, in name and value."""
    rows = results.rows
    failed = sum(row.status == "failed" for row in rows)
    grids = dict.fromkeys(grid for row in rows for grid in row.grids)
    environments = {name: listed(row.environment.get(name) for row in rows) for name in ENVIRONMENT}
    flagged = [row for row in rows if row.overlap.flagged]
    return (
        ("Cells", f"{len(rows) - failed} done, {failed} failed"),
        ("Grids", ", ".join(grids) or ABSENT),
        ("Models", ", ".join(dict.fromkeys(row.model for row in rows))),
        ("Compute time", duration(_compute(rows))),
        ("Text overlap", _overlap(results, flagged)),
        ("Environment", ", ".join(f"{n} {v}" for n, v in environments.items() if v)),
    )


def _compute(rows: Sequence[Row]) -> float:
    """Seconds of all cells; of a dense pass that several of them share, once."""
    passes: dict[tuple[Any, ...], float] = {}
    total = 0.0
    for row in rows:
        seconds = {name: number(value) or 0.0 for name, value in row.seconds.items()}
        collecting = seconds.pop("collecting", 0.0)
        key = row.model, row.calibration.windows_sha256, row.setting("holdout")
        passes[key] = max(collecting, passes.get(key, 0.0))
        total += sum(seconds.values())
    return total + sum(passes.values())


def _overlap(results: Results, flagged: Sequence[Row]) -> str:
    checked = sum(bool(row.overlap) for row in results.rows)
    if not checked:
        return "calibration and evaluation text were not compared"
    if not flagged:
        largest = max(number(row.overlap.share) or 0.0 for row in results.rows)
        return (
            f"none of {checked} cells checked is flagged; the largest share of n-grams found in "
            f"both texts is {significant(100 * largest)} %"
        )
    return (
        f"FLAGGED in {len(flagged)} of {checked} cells checked: the evaluation text shares "
        "passages with the calibration text, so perplexity there is too good"
    )


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def best_table(results: Results) -> Table | None:
    """Per model and sparsity: the pruned model of lowest perplexity, next to the dense one."""
    pruned = [r for r in results.rows if not r.dense and r.measured("perplexity") is not None]
    ordered = sorted(pruned, key=lambda r: (r.model, r.sparsity, r.measured("perplexity")))
    body = []
    for (model, sparsity), rows in grouped(ordered, lambda r: (r.model, r.sparsity)).items():
        best, dense = rows[0], results.dense.get(model)
        value = best.measured("perplexity")
        base = dense.measured("perplexity") if dense else None
        ratio = value / base if value is not None and base else None
        body.append((
            Cell(model), Cell(percent(sparsity), sparsity),
            Cell(value_text(best.setting("selection"))),
            Cell(value_text(best.setting("compensation"))), amount(value), amount(base),
            Cell(f"×{decimals(ratio, 3)}", ratio) if ratio else Cell(ABSENT), _kept(best),
        ))  # fmt: skip
    if not body:
        return None
    heads = (
        "Model", "Sparsity", "Selection", "Compensation", "Perplexity", "Dense", "Pruned / dense",
        "Parameters kept",
    )  # fmt: skip
    note = "Over all grids, so settings other than those shown differ too; see Record."
    used = protocol([*pruned, *results.dense.values()])
    return Table(
        "Lowest perplexity at every sparsity",
        heads,
        tuple(body),
        labels=4,
        notes=(note,),
        settings=used,
    )


def _kept(row: Row) -> Cell:
    before, after = row.parameters.before, row.parameters.after
    if not before or after is None:
        return Cell(ABSENT)
    return Cell(f"{100 * after / before:.1f} %", after / before)


def record_table(rows: Sequence[Row]) -> Table:
    """One line per cell: digests, sizes, seconds and memory."""
    ordered = sorted(rows, key=lambda r: (r.model, r.sparsity, in_order(r)))
    heads = (
        "Cell", "Model", "Method", "Status", "Seed", "Parameters", "Perplexity", "Calibration",
        "Windows sha256", "Collecting, s", "Pruning, s", "Evaluating, s", "Peak memory, GiB",
        "coec",
    )  # fmt: skip
    body = tuple(_record(row) for row in ordered)
    return Table("Every cell", heads, body, labels=4)


def _record(row: Row) -> tuple[Cell, ...]:
    after, seed = row.parameters.after, row.setting("seed")
    calibration = row.calibration
    windows = calibration.windows
    drawn = f"{windows} × {calibration.seq_len}" if windows else ABSENT
    peak = row.peak_memory_bytes
    return (
        Cell(row.cell), Cell(row.model), Cell(method_name(row)), Cell(row.status),
        Cell(value_text(seed), number(seed)),
        Cell(f"{after:,}", after) if after is not None else Cell(ABSENT),
        amount(row.measured("perplexity")),
        Cell(drawn, number(windows)), Cell((calibration.windows_sha256 or ABSENT)[:DIGEST]),
        *(amount(number(row.seconds.get(n)), 1) for n in ("collecting", "pruning", "evaluating")),
        amount(peak / GIB if peak is not None else None),
        Cell(row.environment.get("coec", ABSENT)),
    )  # fmt: skip


def text_table(rows: Sequence[Row]) -> Table | None:
    """Every evaluation and calibration text, with its digest and how much was read."""
    body: dict[tuple[Any, ...], int] = {}
    for row in rows:
        p, c = row.perplexity, row.calibration
        if p:
            read = (p.windows, p.seq_len)
            key = ("perplexity", value_text(p.text), p.text_sha256 or ABSENT, *read)
            body[key] = body.get(key, 0) + 1
        if c:
            read = (c.windows, c.seq_len)
            key = (
                "calibration",
                value_text(c.source),
                c.text_sha256 or ABSENT,
                *read,
            )
            body[key] = body.get(key, 0) + 1
    if not body:
        return None
    lines = tuple(
        (Cell(use), Cell(text), Cell(digest), _count(windows), _count(length), _count(cells))
        for (use, text, digest, windows, length), cells in body.items()
    )
    heads = ("Use", "Text", "sha256", "Windows", "Tokens each", "Cells")
    return Table("Texts", heads, lines, labels=3)


def _count(value: int | None) -> Cell:
    return Cell(ABSENT) if value is None else Cell(f"{value:,}", value)


def event_table(rows: Sequence[Row]) -> Table | None:
    """Every safeguard that fired, how often, and in how many cells."""
    times = Counter(e for row in rows for site in row.sites for e in site.events)
    if not times:
        return None
    cells = Counter(e for row in rows for e in {e for s in row.sites for e in s.events})
    body = tuple((Cell(e), _count(n), _count(cells[e])) for e, n in times.most_common())
    return Table("Safeguards that fired", ("Event", "Modules", "Cells"), body)


def failure_table(rows: Sequence[Row]) -> Table | None:
    """Every failed cell and its reason."""
    failed = [row for row in rows if row.status == "failed"]
    if not failed:
        return None
    body = tuple(
        (Cell(row.cell), Cell(row.model), Cell(method_name(row)), Cell(row.error or ABSENT))
        for row in failed
    )
    return Table("Failed cells", ("Cell", "Model", "Method", "Reason"), body, labels=4)


def overlap_table(rows: Sequence[Row]) -> Table | None:
    """Cells whose evaluation text repeats the calibration text."""
    flagged = [row for row in rows if row.overlap.flagged]
    if not flagged:
        return None
    body = tuple(
        (
            Cell(row.cell),
            Cell(row.model),
            Cell(method_name(row)),
            _count(row.overlap.n),
            _count(row.overlap.shared),
            _count(row.overlap.windows),
            amount(number(row.overlap.share), 4),
        )
        for row in flagged
    )
    heads = (
        "Cell",
        "Model",
        "Method",
        "n",
        "Windows with a shared n-gram",
        "Of",
        "Share of n-grams",
    )
    return Table("Evaluation text that repeats calibration text", heads, body, labels=3)


def settings_table(rows: Sequence[Row]) -> Table:
    """The settings that differ between cells, by cell; the note lists those that do not."""
    names = varying(rows)
    options = [name for row in rows for name in row.settings.options]
    every = dict.fromkeys([*(n for row in rows for n in row.settings.values), *options])
    same = [
        f"{name} = {listed(row.setting(name) for row in rows) or ABSENT}"
        for name in every
        if name not in names
    ]
    body = tuple(
        (Cell(row.cell), Cell(row.model), *(setting_cell(row.setting(n)) for n in names))
        for row in rows
    )
    note = f"The same wherever it applies: {'; '.join(same)}." if same else ""
    heads = ("Cell", "Model", *names)
    return Table("Settings that differ", heads, body, len(heads), (note,) if note else ())
