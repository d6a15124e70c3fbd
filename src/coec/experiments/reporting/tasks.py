"""Zero-shot accuracy task by task, with standard errors and what guessing scores."""

from collections.abc import Sequence
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.records import number
from coec.experiments.reporting.axes import Context, sequential
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import ABSENT, Cell, Table, grouped, method_name
from coec.experiments.rows import Row, Task


def tasks(item: Declaration, context: Context) -> list[Table]:
    """Per model: accuracy with its standard error on every task."""
    scored = [row for row in context.results.rows if row.zero_shot.tasks]
    by_model = grouped(scored, lambda r: r.model).items()
    return [_tasks(item.table.format(model=model), found) for model, found in by_model]


def _tasks(title: str, rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(task for row in rows for task in row.zero_shot.tasks))
    ordered = sorted(rows, key=lambda r: (r.sparsity, sequential(r)))
    body = []
    for row in ordered:
        cells = [_task_cell(row.zero_shot.tasks.get(task)) for task in names]
        mean = _accuracy(row.zero_shot.mean, row.zero_shot.mean_stderr)
        body.append((Cell(method_name(row)), Cell(_grids(row)), Cell(row.cell), mean, *cells))
    heads = ("Method", "Grids", "Cell", "Mean", *(_task_head(task, rows) for task in names))
    return Table(
        title,
        heads,
        tuple(body),
        labels=3,
        notes=tuple(_chance(rows, names)),
        settings=protocol(rows),
    )


def _grids(row: Row) -> str:
    """The grids a cell belongs to, with what they call it."""
    names = [f"{g}: {row.labels[g]}" if g in row.labels else g for g in row.grids]
    return ", ".join(names) or ABSENT


def _task_head(task: str, rows: Sequence[Row]) -> str:
    entries = [row.zero_shot.tasks[task] for row in rows if task in row.zero_shot.tasks]
    metrics = "/".join(dict.fromkeys(e.metric for e in entries if e.metric))
    items = "/".join(f"{n:,}" for n in dict.fromkeys(e.items for e in entries if e.items))
    inside = ", ".join(part for part in (metrics, f"{items} items" if items else "") if part)
    return f"{task} ({inside})" if inside else task


def _task_cell(entry: Task | None) -> Cell:
    return _accuracy(entry.value, entry.stderr) if entry else Cell(ABSENT)


def _accuracy(value: Any, error: Any) -> Cell:
    share, spread = number(value), number(error)
    if share is None:
        return Cell(ABSENT)
    shown = f" ± {100 * spread:.1f}" if spread is not None else ""
    return Cell(f"{100 * share:.1f}{shown}", 100 * share)


def _chance(rows: Sequence[Row], tasks: Sequence[str]) -> list[str]:
    """Where a score says nothing, because guessing does as well."""
    counts = {task: sum(task in row.zero_shot.at_chance for row in rows) for task in tasks}
    found = [f"{task} in {n} of {len(rows)} cells" for task, n in counts.items() if n]
    sentences = [f"No better than guessing: {', '.join(found)}."] if found else []
    dense = [t for row in rows if row.dense for t in row.zero_shot.at_chance]
    if dense:
        sentences.append(
            f"The dense model itself scores no better than guessing on {', '.join(dense)}: "
            "differences between repairs there say little."
        )
    guesses = {
        task: row.zero_shot.tasks[task].chance for row in rows for task in row.zero_shot.tasks
    }
    levels = [f"{t} {100 * level:.1f}" for t, level in guesses.items() if level is not None]
    return [*sentences, *([f"Guessing scores, in %: {', '.join(levels)}."] if levels else [])]
