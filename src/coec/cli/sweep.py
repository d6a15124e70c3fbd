"""`coec sweep`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coec.cli.common import Json, notes, progress_bars, results, setting
from coec.experiments.grid import READY, Cell, expand
from coec.experiments.sweep import sweep


def sweep_command(
    grid: Annotated[str, typer.Argument(help=f"A TOML file, or a ready grid: {', '.join(READY)}.")],
    out: Annotated[
        Path | None, typer.Argument(help="Folder of the results.", show_default=False)
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        setting("A dense model, besides those of the grid; may be given several times."),
    ] = None,
    calibration: Annotated[str | None, setting("As in `coec prune`.")] = None,
    text: Annotated[str | None, setting("To evaluate on, as in `coec eval`.")] = None,
    text_column: Annotated[
        str | None, setting("Of both texts, where they are jsonl or parquet files.")
    ] = None,
    samples: Annotated[
        int | None, setting("Calibration windows; a grid that varies them goes its own way.")
    ] = None,
    seq_len: Annotated[int | None, setting("Tokens per calibration window.")] = None,
    eval_seq_len: Annotated[int | None, setting("Tokens per evaluation window.")] = None,
    max_windows: Annotated[int | None, setting("Evaluate the first so many windows.")] = None,
    tasks: Annotated[str | None, setting("Zero-shot tasks, as in `coec eval`.")] = None,
    tasks_data: Annotated[str | None, setting("As in `coec eval`.")] = None,
    limit: Annotated[int | None, setting("The first so many items of every task.")] = None,
    geometry: Annotated[
        bool,
        typer.Option(
            "--geometry", help="Compare frames with the dense model's, as in `coec analyze`."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Cells solved at once, each in its own process.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep every pruned model in OUT/models.")
    ] = False,
    keep_statistics: Annotated[
        bool, typer.Option("--keep-statistics", help="Keep the dense statistics in OUT/statistics.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cells again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Run every cell of GRID into OUT, from one dense pass per model and calibration.

    Interrupted, the same command goes on with the first missing cell.
    """
    recipe = {
        "calibration": calibration, "text_column": text_column, "samples": samples,
        "seq_len": seq_len,
    }  # fmt: skip
    evaluation = {
        "text": text, "text_column": text_column, "seq_len": eval_seq_len,
        "max_windows": max_windows, "tasks": tasks, "tasks_data": tasks_data, "limit": limit,
        "geometry": geometry or None,
    }  # fmt: skip
    cells = expand(grid, models=model, settings=_given(recipe), evaluate=_given(evaluation))
    if dry_run:
        _show_cells(cells, as_json)
        return
    if out is None:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    try:
        with progress_bars() as advance:
            summary = sweep(
                cells, out, jobs=jobs, device=device, keep_models=keep_models,
                keep_statistics=keep_statistics, retry_failed=retry_failed, progress=advance,
            )  # fmt: skip
    except KeyboardInterrupt:
        notes.print(f"finished cells are in {out}; the same command goes on with the rest")
        raise
    if as_json:
        print(json.dumps({**asdict(summary), "folder": str(summary.folder)}))
        raise typer.Exit(1 if summary.failed else 0)
    if summary.torn:
        notes.print("note: an unfinished last line of results.jsonl was dropped")
    kept = len(cells) - summary.ran
    results.print(
        f"{summary.done} cells done, {summary.failed} failed"
        + (f" ({kept} were there already)" if kept else ""),
        markup=False,
    )
    for reason in dict.fromkeys(summary.reasons.values()):
        count = list(summary.reasons.values()).count(reason)
        notes.print(f"failed, {count} cells: {reason}", markup=False)
    results.print(f"tables and figures: coec report {out}", markup=False)
    if summary.failed:
        raise typer.Exit(1)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _show_cells(cells: list[Cell], as_json: bool) -> None:
    """One line per cell: what tells it apart."""
    if as_json:
        listing = [
            {
                "cell": cell.id,
                "model": cell.subject.label,
                "grids": cell.grids,
                "labels": cell.labels,
                "settings": cell.recipe.record() if cell.recipe else None,
            }
            for cell in cells
        ]
        print(json.dumps(listing))
        return
    table = Table("cell", "model", "grids", "what", box=None, header_style="bold")
    for cell in cells:
        recipe = cell.recipe
        what = "dense" if recipe is None else (
            f"{recipe.sparsity:.0%} {recipe.selection} → {recipe.compensation}, "
            f"{recipe.samples} windows, seed {recipe.seed}"
            + "".join(f", {k} = {v}" for k, v in recipe.options.items())
        )  # fmt: skip
        table.add_row(cell.id, cell.subject.label, ", ".join(cell.grids), what)
    results.print(table)
    results.print(f"\n{len(cells)} cells", markup=False)
