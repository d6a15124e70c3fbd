"""The sweep: every cell of a grid, one dense pass per model and calibration, resumable."""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coec import ending
from coec.calibration.windows import source_digest
from coec.devices import choose_device
from coec.distributed.cluster import ClusterJobs, joined, shared_folder
from coec.errors import CalibrationError, CoecError, OptionError, OutputError, UnfinishedError
from coec.evaluation.zero_shot import check_tasks
from coec.events import RESUMING, Progress
from coec.execution import output
from coec.experiments.cell import (
    CellIdentity,
    CellJob,
    OpenSubject,
    SharedPass,
    head,
    identities,
    open_models,
    open_statistics,
    open_subjects,
    reason,
    resolved,
    run,
)
from coec.experiments.files import Store
from coec.experiments.grid import Cell
from coec.experiments.rows import NO_REASON, Row
from coec.models.dense import Dense
from coec.pipeline.collect import collect
from coec.planning.recipe import Recipe
from coec.settings.fields import without_effect
from coec.streaming.passes import depends_on
from coec.streaming.statistics import Statistics


@dataclass(frozen=True)
class Summary:
    """Result of a sweep: cells of the grid with a result and without, and reasons by cell.

    The cells that did not run this time had rows already; `torn` tells that an unfinished last line
    was dropped.
    """

    folder: Path
    done: int
    failed: int
    ran: int
    reasons: dict[str, str]
    torn: bool


@dataclass(frozen=True)
class Running:
    """Settings of a run of cells.

    Attributes:
        executor: `here`, cell after cell in this process, or `ray`, where every cell is a task;
            rows are in the grid's order all the same.
        address: of a Ray cluster, as in `prune`.
        statistics: results of `collect` on some of the models, whose cells then take their
            calibration from there; settings of the cells must agree.
        keep_models: keep every pruned model under `out/models/<cell>`.
        keep_statistics: keep `out/statistics`.
        retry_failed: run cells again whose row says that they failed.
    """

    executor: str = "here"
    address: str | None = None
    device: str = "auto"
    statistics: Sequence[str | Path | Statistics] = ()
    keep_models: bool = False
    keep_statistics: bool = False
    retry_failed: bool = False

    def check(self, cells: list[Cell]) -> str:
        """Check everything that needs no model and no text, and return the device.

        Raises:
            CoecError: a task is unknown, there is no such device or executor, or settings of it do
                not go together.
        """
        if self.executor not in ("here", "ray"):
            raise OptionError(f"executor must be one of here, ray, got {self.executor!r}")
        if self.executor == "here" and self.address is not None:
            raise without_effect("address", "executor = here")
        evaluations = (cell.subject.evaluation for cell in cells)
        for tasks, data in dict.fromkeys((e.tasks, e.tasks_data) for e in evaluations):
            if tasks:
                check_tasks(tasks, data)
        return str(choose_device(self.device))

    def remaining(self, group: list[Cell], store: Store) -> list[Cell]:
        """Return the cells without a row, and those whose failure is to be tried again."""
        rows = {cell.id: store.rows.get(cell.id) for cell in group}
        again = ("failed",) if self.retry_failed else ()
        return [c for c in group if (row := rows[c.id]) is None or row.status in again]

    @contextmanager
    def mapped(self, out: Path, device: str) -> Iterator[Callable[..., Iterable[Row]]]:
        """Give the `map` that runs the cells; OptionError where a cluster cannot carry them out."""
        if self.executor == "here":
            yield map
            return
        with joined(self.address) as cluster:
            with shared_folder(out) as look:
                cluster.check_nodes(look, look(), f"the folder '{out}'")
            yield ClusterJobs(cluster, cluster.device(device)).map


def sweep(
    cells: list[Cell], out: str | Path, *, progress: Progress | None = None, **settings: Any
) -> Summary:
    """Run every cell that has no row yet, and append its row to `out/results.jsonl`.

    The statistics of a model on a calibration are collected once and serve every cell; they and
    the pruned models are removed when no longer needed. A cell that fails is a row with the
    reason, and the rest goes on. Killed and run again, a sweep continues with the first missing
    cell.

    Args:
        cells: of `experiments.grid.expand`.
        out: the folder; created where it does not exist.
        progress: called with (phase, done, total).
        settings: fields of `Running`.

    Raises:
        CoecError: a model, a text or the folder cannot be used; nothing has run.
    """
    running = Running(**settings)
    device = running.check(cells)
    out = output.path_of(out)
    output.resolved(out)  # refuses what is no place
    if out.exists() and not out.is_dir():
        raise OutputError(f"'{out}' is a file: give a folder")
    for cell in cells:
        head(cell)
    # Models and texts are opened, and every plan is checked, before anything runs
    saved, models = open_statistics(running.statistics), open_models(cells)
    cells = resolved(cells, models, saved, device)
    subjects = open_subjects(cells, models, saved, device)
    identity_of = identities(cells, subjects)
    with running.mapped(out, device) as mapped, Store(out).writing() as store:
        _check_identities(cells, identity_of, store)
        # Cells without a row, by the dense pass that they share
        groups = _groups(cells, out)
        unfinished = {folder: running.remaining(group, store) for folder, group in groups.items()}
        _widen(cells, store)
        ran = sum(map(len, unfinished.values()))
        finished = len(cells) - ran
        if progress and ran and finished:
            progress(f"{RESUMING} cells", finished, len(cells))
        for folder, group in unfinished.items():
            if not group:
                continue
            subject = subjects[group[0].subject]
            text = identity_of[group[0].id]["calibration text"]
            shared = _prepare(group, text, subject, folder, progress)
            models_folder = out.absolute() / "models"
            jobs = [
                CellJob(cell, subject, models_folder / cell.id, running.keep_models, device, shared)
                for cell in group
            ]
            for row in mapped(run, jobs):
                store.append(row.changed(identity=identity_of[row.cell]))
                finished += 1
                if progress:
                    progress("cells", finished, len(cells))
            if not running.keep_statistics:
                shutil.rmtree(folder, ignore_errors=True)
        _clear_leftovers(out, () if running.keep_statistics else groups)
        rows = [store.rows[cell.id] for cell in cells]
        reasons = {row.cell: row.error or NO_REASON for row in rows if row.status == "failed"}
        succeeded = len(rows) - len(reasons)
        return Summary(store.path.parent, succeeded, len(reasons), ran, reasons, store.torn)


def _check_identities(
    cells: list[Cell], identity_of: dict[str, CellIdentity], store: Store
) -> None:
    """Check that existing rows are of these very models and texts.

    Raises:
        OutputError: naming what changed since; rows of both would stand in one table.
    """
    # A cell of this grid must agree in all; another row of the model in the model.
    models = {cell.subject.label: identity_of[cell.id]["model"] for cell in cells}
    for row in store.rows.values():
        expected = identity_of.get(row.cell, {"model": models.get(row.model)})
        for name, digest in expected.items():
            if (name != "model" or digest is not None) and row.identity.get(name) != digest:
                raise OutputError(
                    f"the {name} of '{row.model}' is another one than that of the rows in "
                    f"'{store.path}': give another folder, or move that file away"
                )


def _widen(cells: list[Cell], store: Store) -> None:
    """Add grids to the rows of finished cells that did not belong to them when they ran."""
    for cell in cells:
        if row := store.rows.get(cell.id):
            grids = list(dict.fromkeys((*row.grids, *cell.grids)))
            wider = row.changed(grids=grids, labels={**row.labels, **cell.labels})
            if wider != row:
                store.append(wider)


def _groups(cells: list[Cell], out: Path) -> dict[Path, list[Cell]]:
    """Return cells by the folder of the statistics that they share, in the grid's order.

    A folder is named by the digest of all that its statistics depend on.
    """
    groups: dict[Path, list[Cell]] = {}
    for cell in cells:
        # All that the statistics depend on: the model, and the calibration of the cell.
        content: list[Any] = [cell.subject.label]
        if cell.recipe is not None:
            calibration = cell.recipe.calibration
            content.append(calibration.record() | {"calibration": str(calibration.source)})
        name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        groups.setdefault(out / "statistics" / name, []).append(cell)
    return groups


def _prepare(
    group: list[Cell],
    text: str | None,
    subject: OpenSubject,
    folder: Path,
    progress: Progress | None,
) -> SharedPass:
    """Get statistics for the group: saved ones, those of an interrupted sweep, or a dense pass.

    They must be of the text with the digest `text`: the rows say so. A group of cells that all run
    the models themselves needs none.
    """
    recipe = group[0].recipe
    if recipe is None:
        return SharedPass()
    began = time.perf_counter()
    try:
        # Saved statistics → those of an interrupted sweep → a dense pass
        statistics = subject.statistics
        if all(cell.runs_model for cell in group):
            digest = source_digest(recipe.calibration.source)
        else:
            statistics = statistics or _collected(folder, recipe, subject.dense, progress)
            digest = statistics.made_with["calibration"]
        if digest != text:
            raise CalibrationError(
                f"'{recipe.calibration.source}' was changed while the sweep ran: run again, into "
                "another folder"
            )
    except Exception as error:  # as in `cell.run`: out of memory, a full disk, a library's own
        ending.check()
        return SharedPass(error=reason(error))
    used = statistics.folder.absolute() if statistics else None
    return SharedPass(used, time.perf_counter() - began)


def _collected(folder: Path, recipe: Recipe, dense: Dense, progress: Progress | None) -> Statistics:
    """Use the statistics that an interrupted sweep left, or collect them."""
    if folder.exists():
        try:
            statistics = Statistics.open(folder)
            device = choose_device(recipe.runtime.device)
            statistics.check(depends_on(dense, recipe.calibration, device))
            return statistics
        except CoecError:
            shutil.rmtree(folder)
    try:
        return collect(dense, folder, recipe, progress=progress)
    except UnfinishedError:
        return collect(dense, folder, recipe, restart=True, progress=progress)


def _clear_leftovers(out: Path, statistics: Iterable[Path]) -> None:
    """Remove half-written output of an interrupted run, empty folders, and statistics."""
    for folder in statistics:
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("statistics", "models"):
        output.remove_leftovers(out / name)
        with contextlib.suppress(OSError):
            (out / name).rmdir()
