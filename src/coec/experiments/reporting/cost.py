"""What the pruned models cost to run: parameters, operations, weights and memory."""

from collections.abc import Sequence
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.records import number
from coec.experiments.reporting.axes import Context
from coec.experiments.reporting.protocol import listed
from coec.experiments.reporting.tables import (
    ABSENT,
    Cell,
    Table,
    grouped,
    percent,
    significant,
)
from coec.experiments.rows import Row

GIB = 2**30


def gflops(parameters: float) -> float:
    """Billions of operations per token, two for every parameter."""
    return 2 * parameters / 1e9


def memory(rows: Sequence[Row]) -> float | None:
    """The most bytes that evaluating any of these models took; None where nobody measured it."""
    peaks = [number(row.cost.peak_memory_bytes) for row in rows]
    return max((peak for peak in peaks if peak is not None), default=None)


def cost(item: Declaration, context: Context) -> list[Table]:
    """One line per model, sparsity and number of parameters; the dense models' first."""
    sized = [row for row in context.results.rows if row.parameters.after is not None]
    if all(row.dense for row in sized):
        return []

    def place(r: Row) -> tuple[Any, ...]:
        return r.model, r.sparsity, r.parameters.after, r.cost.weight_bytes

    ordered = sorted(sized, key=lambda r: (r.model, r.sparsity))
    body = tuple(_line(found) for found in grouped(ordered, place).values())
    heads = (
        "Model", "Sparsity", "Compensations", "Parameters", "Of the dense",
        "GFLOPs per token", "Weights, GiB", "Memory, GiB",
    )  # fmt: skip
    notes = list(item.notes)
    if memory(sized) is not None:
        devices = listed(row.environment.get("device") for row in sized) or "device unknown"
        notes.append(
            f"Memory: the most held while the perplexity was measured ({devices}); allocated on a "
            "GPU, resident in the whole process on a CPU, where Python and its libraries have a "
            "large share."
        )
    return [Table(item.table, heads, body, 3, tuple(notes))]


def _line(rows: Sequence[Row]) -> tuple[Cell, ...]:
    first = rows[0]
    after, before = first.parameters.after or 0, first.parameters.before
    kept = Cell(f"{100 * after / before:.1f} %", after / before) if before else Cell(ABSENT)
    weights = number(first.cost.weight_bytes)
    return (
        Cell(first.model),
        Cell("dense" if first.dense else percent(first.sparsity), first.sparsity),
        Cell(listed((row.setting("compensation") for row in rows), limit=8)),
        Cell(f"{after:,}", after),
        kept,
        _shown(gflops(after)),
        _shown(None if weights is None else weights / GIB),
        _shown(None if (peak := memory(rows)) is None else peak / GIB),
    )


def _shown(value: float | None) -> Cell:
    return Cell(ABSENT) if value is None else Cell(significant(value), value)
