"""Zero-shot accuracy task by task, with standard errors and the score of guessing."""

from collections.abc import Sequence

from coec.experiments.declarations import Declaration
from coec.experiments.reporting.axes import Context, in_order
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.values import (
    ABSENT,
    NO_DATUM,
    Datum,
    Table,
    grouped,
    method_name,
)
from coec.experiments.rows import Row, TaskOfRow


def tasks(item: Declaration, context: Context) -> list[Table]:
    """Draw, per model, the accuracy with its standard error on every task."""
    scored = [row for row in context.results.rows if row.zero_shot.tasks]
    by_model = grouped(scored, lambda r: r.model).items()
    return [_tasks(item.table.format(model=model), rows) for model, rows in by_model]


def _tasks(title: str, rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(task for row in rows for task in row.zero_shot.tasks))
    body = tuple(
        (
            Datum(method_name(row)), Datum(_grids(row)), Datum(row.cell),
            _accuracy(row.zero_shot.mean, row.zero_shot.mean_stderr),
            *(_task(row.zero_shot.tasks.get(task)) for task in names),
        )
        for row in sorted(rows, key=lambda r: (r.sparsity, in_order(r)))
    )  # fmt: skip
    heads = ("Method", "Grids", "Cell", "Mean", *(_head(task, rows) for task in names))
    return Table(title, heads, body, 3, tuple(_chance(rows, names)), protocol(rows))


def _grids(row: Row) -> str:
    """Name the grids of a cell, each with its label for the cell."""
    names = [f"{g}: {row.labels[g]}" if g in row.labels else g for g in row.grids]
    return ", ".join(names) or ABSENT


def _head(task: str, rows: Sequence[Row]) -> str:
    scores = [row.zero_shot.tasks[task] for row in rows if task in row.zero_shot.tasks]
    metrics = "/".join(dict.fromkeys(score.metric for score in scores if score.metric))
    items = "/".join(f"{n:,}" for n in dict.fromkeys(s.items for s in scores if s.items))
    details = ", ".join(text for text in (metrics, f"{items} items" if items else "") if text)
    return f"{task} ({details})" if details else task


def _task(score: TaskOfRow | None) -> Datum:
    return _accuracy(score.value, score.stderr) if score else NO_DATUM


def _accuracy(share: float | None, error: float | None) -> Datum:
    if share is None:
        return NO_DATUM
    spread = f" ± {100 * error:.1f}" if error is not None else ""
    return Datum(f"{100 * share:.1f}{spread}", 100 * share)


def _chance(rows: Sequence[Row], tasks: Sequence[str]) -> list[str]:
    """Say where a score tells nothing, because guessing does as well."""
    counts = {task: sum(task in row.zero_shot.at_chance for row in rows) for task in tasks}
    at_chance = [f"{task} in {n} of {len(rows)} cells" for task, n in counts.items() if n]
    sentences = [f"No better than guessing: {', '.join(at_chance)}."] if at_chance else []
    dense = [task for row in rows if row.dense for task in row.zero_shot.at_chance]
    if dense:
        sentences.append(
            f"The dense model itself scores no better than guessing on {', '.join(dense)}: "
            "differences between repairs there say little."
        )
    chances = {task: score.chance for row in rows for task, score in row.zero_shot.tasks.items()}
    levels = [f"{t} {100 * level:.1f}" for t, level in chances.items() if level is not None]
    return [*sentences, *([f"Guessing scores, in %: {', '.join(levels)}."] if levels else [])]
