"""`coec sweep` and `coec report`."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli import common
from coec.cli.common import CommandFlag, argument, given, switch, with_flags
from coec.cli.progress import showing_progress
from coec.cli.signals import interruptible
from coec.experiments import READY_GRIDS

if TYPE_CHECKING:
    from coec.experiments.grid import Cell
    from coec.experiments.sweep import Summary
    from coec.planning.recipe import Recipe

_RECIPE = (
    CommandFlag("calibration", str, "As in `coec prune`."),
    CommandFlag("text_column", str, "Column of both texts, where they are jsonl or parquet files."),
    CommandFlag("samples", int, "Calibration windows, unless the grid varies them."),
    CommandFlag("seq_len", int, "Tokens per calibration window."),
)
_EVALUATION = (
    CommandFlag("text", str, "Text to evaluate on, as in `coec eval`."),
    CommandFlag("eval_seq_len", int, "Tokens per evaluation window."),
    CommandFlag("max_windows", int, "Evaluate the first so many windows. Default: all."),
    CommandFlag(
        "tasks", str, "Zero-shot tasks, as in `coec eval`. Default: none.", metavar="NAMES"
    ),
    CommandFlag("tasks_data", str, "As in `coec eval`.", metavar="PATH"),
    CommandFlag("limit", int, "The first N items of every task. Default: all."),
)
_MODEL = CommandFlag(
    "model", list[str],
    "A dense model, besides those of the grid; may be given several times.", metavar="MODEL",
)  # fmt: skip
_RUNNING = (
    CommandFlag(
        "executor", str,
        "Where cells are run: here, one after another, or as tasks of a ray cluster. "
        "Default: here.",
    ),
    CommandFlag("address", str, "Address of a Ray cluster, as in `coec prune`."),
    common.DEVICE,
    CommandFlag(
        "statistics", list[Path],
        "Folder that `coec collect` wrote; may be given several times.",
    ),
)  # fmt: skip


_GEOMETRY = switch("geometry", "Compare frames with the dense model's, as in `coec analyze`.")
_KEEPING = (
    switch("keep_models", "Keep every pruned model in OUT/models."),
    switch("keep_statistics", "Keep the dense statistics in OUT/statistics."),
    switch("retry_failed", "Run failed cells again."),
)
_DRY_RUN = switch("dry_run", "List the cells and stop.")


@with_flags(
    _MODEL, *_RECIPE, *_EVALUATION, *_RUNNING,
    _GEOMETRY, *_KEEPING, _DRY_RUN, common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip
def sweep_command(
    grid: Annotated[
        str, argument(f"A TOML file, or a ready grid: {', '.join(READY_GRIDS)}.", "GRID")
    ],
    out: Annotated[
        Path | None, argument("Folder of the results; --dry-run needs none.", "OUT")
    ] = None,
    **flags: Any,
) -> None:
    """Run every cell of GRID into OUT, from one dense pass per model and calibration.

    If a sweep is killed, repeat the command: it resumes at the first missing cell.
    """
    common.check_out(out, flags)
    # Flags → settings of the cells, and of their evaluation, which a grid loses to
    trust = {"trust_remote_code": True} if flags["trust_remote_code"] else {}
    evaluation = given(flags, (*_EVALUATION, "text_column")) | trust
    if "eval_seq_len" in evaluation:
        evaluation["seq_len"] = evaluation.pop("eval_seq_len")
    if flags["geometry"]:
        evaluation["geometry"] = True
    common.quieten()
    from coec.experiments.grid import expand

    cells = expand(
        grid, models=flags["model"], settings=given(flags, _RECIPE) | trust, evaluate=evaluation
    )
    from coec.experiments.sweep import Running, sweep

    running = given(flags, _RUNNING)
    if out is None or flags["dry_run"]:
        Running(**running).check(cells)
        _show_cells(cells, flags["json"])
        return
    try:
        with showing_progress(flags["quiet"]) as advance:
            summary = sweep(cells, out, **running, **given(flags, _KEEPING), progress=advance)
    except KeyboardInterrupt:
        common.notes.print(f"finished cells are in {out}; the same command goes on with the rest")
        raise
    record = {**asdict(summary), "folder": str(summary.folder)}
    common.show(record, _summary(summary, out, kept=len(cells) - summary.ran), flags["json"])
    if summary.failed:
        raise typer.Exit(1)


def _summary(summary: "Summary", out: Path, kept: int) -> Iterator[str]:
    if summary.torn:
        common.notes.print("note: an unfinished last line of results.jsonl was dropped")
    earlier = f" ({kept} were there already)" if kept else ""
    yield f"{summary.done} cells done, {summary.failed} failed{earlier}"
    for reason, count in Counter(summary.reasons.values()).items():
        common.notes.print(f"failed, {count} cells: {common.spelled(reason)}")
    yield f"tables and figures: coec report {out}"


def _show_cells(cells: list["Cell"], as_json: bool) -> None:
    record = [
        {
            "cell": cell.id,
            "model": cell.subject.label,
            "grids": cell.grids,
            "labels": cell.labels,
            "settings": cell.recipe.record() if cell.recipe else None,
        }
        for cell in cells
    ]
    common.show(record, _listing(cells), as_json)


def _listing(cells: list["Cell"]) -> Iterator[str]:
    """Yield a line per cell in columns; rich's table takes seconds for thousands of rows."""
    # All columns but the last are as wide as their widest entry.
    lines = [("cell", "model", "grids", "what")]
    for cell in cells:
        lines.append((cell.id, cell.subject.label, ", ".join(cell.grids), _described(cell.recipe)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    for *short, last in lines:
        yield "  ".join([*(text.ljust(n) for text, n in zip(short, widths, strict=True)), last])
    yield f"\n{len(cells)} cells"


def _described(recipe: "Recipe | None") -> str:
    """Return the settings of a cell in words; of newer ones those that change something."""
    from coec.experiments.grid import NEWER

    if recipe is None:
        return "dense"
    pruning, calibration, record = recipe.pruning, recipe.calibration, recipe.record()
    newer = {name: record[name] for name in record if name in NEWER and record[name] != NEWER[name]}
    return (
        f"{pruning.sparsity:.0%} {pruning.selection} → {pruning.compensation}, "
        f"{calibration.samples} windows, seed {calibration.seed}"
        + "".join(f", {name} = {value}" for name, value in (newer | pruning.options).items())
    )


@with_flags(common.JSON)
def report_command(
    out: Annotated[Path, argument("Folder that a sweep wrote to.", "OUT")],
    **flags: Any,
) -> None:
    """Write the tables and figures of a sweep: report.csv, .md, .tex and .html in OUT.

    Figures are in OUT/figures too, as PDF and SVG.
    """
    from coec.experiments.reporting.report import write_report

    interruptible()
    written = write_report(out)
    figures = [str(path) for path in written.figures]
    paths = {path.suffix[1:]: str(path) for path in written.files}
    # By pandas and back: a NaN becomes null.
    cells = json.loads(written.cells.to_json(orient="records"))
    folders = dict.fromkeys(str(path.parent) for path in written.figures)
    lines = [f"{'written':<20} {path}" for path in (*paths.values(), *folders)]
    record = {"files": paths, "figures": figures, "cells": cells}
    common.show(record, [written.summary, *lines], flags["json"])
