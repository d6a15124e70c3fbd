"""`coec sweep`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coec.cli.common import (
    PATH,
    TEXT,
    WHOLE,
    Device,
    Json,
    TrustRemoteCode,
    argument,
    given,
    notes,
    quieten,
    results,
    setting,
    switch,
)
from coec.cli.progress import Quiet, showing_progress
from coec.cli.spelling import spelled

if TYPE_CHECKING:
    from coec.experiments.grid import Cell
    from coec.experiments.sweep import Summary

READY = (
    "ablation", "alpha", "calibration-size", "delta", "lambda-a", "main", "overfitting",
    "rescale-ridge", "rounds", "seeds",
)  # fmt: skip
"""Known without reading the folder of grids, which would make the help slow."""


def sweep_command(
    grid: Annotated[str, argument(f"A TOML file, or a ready grid: {', '.join(READY)}.", "GRID")],
    out: Annotated[
        Path | None, argument("Folder of the results; --dry-run needs none.", "OUT")
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        setting("A dense model, besides those of the grid; may be given several times.", "MODEL"),
    ] = None,
    calibration: Annotated[str | None, setting("As in `coec prune`.", TEXT)] = None,
    text: Annotated[str | None, setting("To evaluate on, as in `coec eval`.", TEXT)] = None,
    text_column: Annotated[
        str | None, setting("Of both texts, where they are jsonl or parquet files.", TEXT)
    ] = None,
    samples: Annotated[
        int | None,
        setting("Calibration windows; a grid that varies them goes its own way.", WHOLE),
    ] = None,
    seq_len: Annotated[int | None, setting("Tokens per calibration window.", WHOLE)] = None,
    eval_seq_len: Annotated[int | None, setting("Tokens per evaluation window.", WHOLE)] = None,
    max_windows: Annotated[
        int | None, setting("Evaluate the first so many windows. Default: all.", WHOLE)
    ] = None,
    tasks: Annotated[
        str | None, setting("Zero-shot tasks, as in `coec eval`. Default: none.", "NAMES")
    ] = None,
    tasks_data: Annotated[str | None, setting("As in `coec eval`.", PATH)] = None,
    limit: Annotated[
        int | None, setting("The first N items of every task. Default: all.", WHOLE)
    ] = None,
    geometry: Annotated[
        bool,
        switch("--geometry", "Compare frames with the dense model's, as in `coec analyze`."),
    ] = False,
    jobs: Annotated[
        int | None, setting("Cells solved at once, each in its own process. Default: 1.", WHOLE)
    ] = None,
    executor: Annotated[
        str,
        setting("Where cells are solved: processes, or a ray cluster. Default: processes.", TEXT),
    ] = "processes",
    address: Annotated[str | None, setting("Of a Ray cluster, as in `coec prune`.", TEXT)] = None,
    device: Device = None,
    statistics: Annotated[
        list[Path] | None,
        setting("What `coec collect` made of a model; may be given several times.", PATH),
    ] = None,
    keep_models: Annotated[
        bool, switch("--keep-models", "Keep every pruned model in OUT/models.")
    ] = False,
    keep_statistics: Annotated[
        bool, switch("--keep-statistics", "Keep the dense statistics in OUT/statistics.")
    ] = False,
    retry_failed: Annotated[bool, switch("--retry-failed", "Run failed cells again.")] = False,
    dry_run: Annotated[bool, switch("--dry-run", "List the cells and stop.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run every cell of GRID into OUT, from one dense pass per model and calibration.

    Interrupted, the same command goes on with the first missing cell.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    recipe = {
        "calibration": calibration, "text_column": text_column, "samples": samples,
        "seq_len": seq_len, "trust_remote_code": trust_remote_code or None,
    }  # fmt: skip
    evaluation = {
        "text": text, "text_column": text_column, "seq_len": eval_seq_len,
        "max_windows": max_windows, "tasks": tasks, "tasks_data": tasks_data, "limit": limit,
        "geometry": geometry or None, "trust_remote_code": trust_remote_code or None,
    }  # fmt: skip
    quieten()
    from coec.experiments.grid import expand

    cells = expand(grid, models=model, settings=given(recipe), evaluate=given(evaluation))
    from coec.experiments.sweep import check_plan, sweep

    if out is None or dry_run:
        check_plan(cells, jobs, executor, address, device or "auto")
        _show_cells(cells, as_json)
        return
    try:
        with showing_progress(quiet) as advance:
            summary = sweep(
                cells, out, jobs=jobs, executor=executor, address=address, device=device or "auto",
                statistics=statistics or (), keep_models=keep_models,
                keep_statistics=keep_statistics, retry_failed=retry_failed, progress=advance,
            )  # fmt: skip
    except KeyboardInterrupt:
        notes.print(f"finished cells are in {out}; the same command goes on with the rest")
        raise
    if as_json:
        print(json.dumps({**asdict(summary), "folder": str(summary.folder)}))
    else:
        _show_summary(summary, out, kept=len(cells) - summary.ran)
    if summary.failed:
        raise typer.Exit(1)


def _show_summary(summary: "Summary", out: Path, kept: int) -> None:
    """Print the numbers of cells, and the reasons of failures."""
    if summary.torn:
        notes.print("note: an unfinished last line of results.jsonl was dropped")
    results.print(
        f"{summary.done} cells done, {summary.failed} failed"
        + (f" ({kept} were there already)" if kept else ""),
        markup=False,
    )
    for reason in dict.fromkeys(summary.reasons.values()):
        count = list(summary.reasons.values()).count(reason)
        notes.print(f"failed, {count} cells: {spelled(reason)}", markup=False)
    results.print(f"tables and figures: coec report {out}", markup=False)


def _show_cells(cells: list["Cell"], as_json: bool) -> None:
    """Print a line per cell with the settings that tell it apart."""
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
    from coec.experiments.grid import NEWER

    lines = [("cell", "model", "grids", "what")]
    for cell in cells:
        recipe = cell.recipe
        settings = "dense" if recipe is None else (
            f"{recipe.pruning.sparsity:.0%} {recipe.pruning.selection} → "
            f"{recipe.pruning.compensation}, {recipe.calibration.samples} windows, "
            f"seed {recipe.calibration.seed}"
            + "".join(
                f", {name} = {value}"
                for name, value in recipe.record().items()
                if name in NEWER and value != NEWER[name]
            )
            + "".join(f", {k} = {v}" for k, v in recipe.pruning.options.items())
        )  # fmt: skip
        lines.append((cell.id, cell.subject.label, ", ".join(cell.grids), settings))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    for *short, last in lines:  # rich's table takes seconds for thousands of rows
        print("  ".join([*(text.ljust(n) for text, n in zip(short, widths, strict=True)), last]))
    print(f"\n{len(cells)} cells")
