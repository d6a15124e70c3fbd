"""The sweep: every cell of a grid, one dense pass per model and calibration, resumable."""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.calibration.overlap import Overlap, overlap, passage_length
from coec.calibration.windows import source_digest
from coec.devices import choose_device
from coec.distributed.cluster import ClusterJobs, joined, shared_folder
from coec.errors import CalibrationError, CoecError, OptionError, OutputError, UnfinishedError
from coec.evaluation.zero_shot import check_tasks
from coec.events import RESUMING, Progress
from coec.execution.output import remove_leftovers
from coec.execution.workers import Executor, Workers
from coec.experiments.cell import Job, head, reason, run
from coec.experiments.declarations import write_declarations
from coec.experiments.grid import Cell
from coec.experiments.rows import NO_REASON, Row
from coec.experiments.store import Store
from coec.experiments.subjects import (
    Identity,
    Opened,
    identities,
    open_models,
    open_subjects,
    with_statistics,
)
from coec.models.dense import Dense
from coec.pipeline.collect import collect
from coec.planning.recipe import Recipe
from coec.settings import without_effect
from coec.streaming.measure import DensePass, depends_on
from coec.streaming.statistics import Statistics


@dataclass(frozen=True)
class Summary:
    """What a sweep did.

    Attributes:
        folder: of the results.
        done, failed: cells with a result, and without, of the whole grid.
        ran: cells that were run now; the others were there already.
        reasons: of the failures, by cell.
        torn: whether an unfinished last line was found and dropped.
    """

    folder: Path
    done: int
    failed: int
    ran: int
    reasons: dict[str, str]
    torn: bool


def sweep(
    cells: list[Cell],
    out: str | Path,
    *,
    jobs: int | None = None,
    executor: str = "processes",
    address: str | None = None,
    device: str = "auto",
    statistics: Sequence[str | Path | Statistics] = (),
    keep_models: bool = False,
    keep_statistics: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Runs every cell that has no row yet, and appends its row to `out/results.jsonl`.

    The statistics of a model on a calibration are collected once and serve every cell; they and
    the pruned models are removed when no longer needed. A cell that fails is a row with the
    reason, and the rest goes on. Killed and run again, it continues with the first missing cell.

    Args:
        cells: of `experiments.grid.expand`.
        out: the folder; created where it does not exist.
        statistics: what `collect` made of some of the models, whose cells then take their
            calibration from there; what the cells were given of it must agree.
        jobs: worker processes; rows are written in the grid's order all the same. 1 by default.
        executor: `processes` of this machine, or `ray`, where every cell is a task.
        address: of a Ray cluster, as in `prune`.
        keep_models: keep every pruned model under `out/models/<cell>`.
        keep_statistics: keep `out/statistics`.
        retry_failed: run cells again whose row says that they failed.
        progress: called with (phase, done, total).

    Raises:
        CoecError: a model, a text or the folder cannot be used; nothing has run.
    """
    chosen = str(check_plan(cells, jobs, executor, address, device))
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise OutputError(f"'{out}' is a file: give a folder")
    for cell in cells:
        head(cell)
    saved = [Statistics.open(one) for one in statistics]
    models = open_models(cells)
    cells = [_on(cell, chosen) for cell in with_statistics(cells, models, saved)]
    subjects = open_subjects(cells, models, saved, chosen)
    known_by = identities(cells, subjects)
    with _executor(executor, jobs, address, out, chosen) as workers, Store(out).writing() as store:
        _check_identities(cells, known_by, store)
        for declared in {id(cell.declared): cell.declared for cell in cells}.values():
            write_declarations(out, declared)
        # Grouped before what is there is left out: the order of rows does not depend on that.
        groups = [
            [cell for cell in group if not _settled(store.rows.get(cell.id), retry_failed)]
            for group in _groups(cells)
        ]
        groups = [group for group in groups if group]
        _widen(cells, store)
        ran = sum(map(len, groups))
        finished = len(cells) - ran
        if progress and ran and finished:
            progress(f"{RESUMING} cells", finished, len(cells))
        for group in groups:
            text = known_by[group[0].id]["calibration text"]
            prepared = _prepare(group, text, subjects[group[0].subject], out, progress)
            jobs_of_group = [
                _job(cell, prepared, subjects[cell.subject], out, chosen, keep_models)
                for cell in group
            ]
            for row in workers.map(run, jobs_of_group):
                store.append(row.changed(identity=known_by[row.cell]))
                finished += 1
                if progress:
                    progress("cells", finished, len(cells))
            if not keep_statistics:
                shutil.rmtree(_folder_of_statistics(out, group[0]), ignore_errors=True)
        _clear_leftovers(out, () if keep_statistics else _groups(cells))
        return _summary(out, cells, store, ran)


EXECUTORS = ("processes", "ray")


def check_plan(
    cells: list[Cell], jobs: int | None, executor: str, address: str | None, device: str
) -> torch.device:
    """The device, where all that needs no model and no text can be carried out.

    Raises:
        CoecError: a task is unknown, there is no such device or executor, or settings of it do not
            go together.
    """
    _check_executor(executor, jobs, address)
    for tasks, data in dict.fromkeys(
        (cell.subject.evaluation.tasks, cell.subject.evaluation.tasks_data) for cell in cells
    ):
        if tasks:
            check_tasks(tasks, data)
    return choose_device(device)


def _check_executor(executor: str, jobs: int | None, address: str | None) -> None:
    """Raises OptionError where these do not go together."""
    if executor not in EXECUTORS:
        raise OptionError(f"executor must be one of {', '.join(EXECUTORS)}, got {executor!r}")
    if jobs is not None and jobs < 1:
        raise OptionError(f"jobs must be a whole number of at least 1, got {jobs}")
    idle = ("jobs", jobs) if executor == "ray" else ("address", address)
    if idle[1] is not None:
        raise without_effect(idle[0], f"executor = {executor}")


@contextmanager
def _executor(
    name: str, jobs: int | None, address: str | None, out: Path, device: str
) -> Iterator[Executor]:
    """What carries out cells; raises OptionError where a cluster cannot."""
    if name == "processes":
        with Workers(jobs or 1) as workers:
            yield workers
        return
    with joined(address) as cluster:
        with shared_folder(out) as look:
            cluster.check_nodes(look, look(), f"the folder '{out}'")
        yield ClusterJobs(cluster, cluster.device(device))


@dataclass(frozen=True)
class _Prepared:
    """What the cells of a group share: statistics (a dense model needs none), or an error."""

    statistics: Statistics | None = None
    overlap: Overlap | None = None
    seconds: float = 0.0
    error: str | None = None


def _on(cell: Cell, device: str) -> Cell:
    """The cell carried out on another device, the kept units that it names read."""
    if cell.recipe is None:
        return cell
    runtime = replace(cell.recipe.runtime, device=device)
    return replace(cell, recipe=replace(cell.recipe, runtime=runtime).opened())


def _check_identities(cells: list[Cell], known_by: dict[str, Identity], store: Store) -> None:
    """Rows that are there already are of these very models and texts.

    Raises:
        OutputError: naming what changed since; rows of both would stand in one table.
    """
    models = {cell.subject.label: known_by[cell.id]["model"] for cell in cells}
    for row in store.rows.values():
        wanted = known_by.get(row.cell, {"model": models.get(row.model)})
        for what, digest in wanted.items():
            if (what != "model" or digest is not None) and row.identity.get(what) != digest:
                raise OutputError(
                    f"the {what} of '{row.model}' is another one than that of the rows in "
                    f"'{store.path}': give another folder, or move that file away"
                )


def _settled(row: Row | None, retry_failed: bool) -> bool:
    return row is not None and not (retry_failed and row.status == "failed")


def _widen(cells: list[Cell], store: Store) -> None:
    """Tells finished cells of grids that they belong to now, and did not when they ran."""
    for cell in cells:
        row = store.rows.get(cell.id)
        if row is None:
            continue
        grids = list(dict.fromkeys((*row.grids, *cell.grids)))
        wider = row.changed(grids=grids, labels={**row.labels, **cell.labels})
        if wider != row:
            store.append(wider)


def _groups(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that share a dense pass, in the order of their first one."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_calibration_key(cell), []).append(cell)
    return list(groups.values())


def _calibration_key(cell: Cell) -> str:
    """Cells that agree in all that statistics depend on share a dense pass."""
    content: list[Any] = [cell.subject.label]
    if cell.recipe is not None:
        how = cell.recipe.calibration
        content.append(how.record() | {"calibration": str(how.source)})
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _prepare(
    group: list[Cell], text: str | None, opened: Opened, out: Path, progress: Progress | None
) -> _Prepared:
    """Statistics for the group: those given, those that an interrupted sweep left, or a dense pass.

    They are of the text with the digest `text`: the rows say so. A group of cells that all run the
    models themselves needs none.
    """
    recipe = group[0].recipe
    if recipe is None:
        return _Prepared()
    began = time.perf_counter()
    try:
        statistics = opened.statistics
        if all(_runs_itself(cell) for cell in group):
            seen, read = _windows(recipe, opened.dense), source_digest(recipe.calibration.source)
        else:
            folder = _folder_of_statistics(out, group[0])
            statistics = statistics or _collected(folder, recipe, opened.dense, progress)
            seen, read = statistics.windows, statistics.made_with["calibration"]
        if read != text:
            raise CalibrationError(
                f"'{recipe.calibration.source}' was changed while the sweep ran: run again, into "
                "another folder"
            )
        shared = _overlap(seen, opened)
    except Exception as error:  # as in `cell.run`: out of memory, a full disk, a library's own
        return _Prepared(error=reason(error))
    return _Prepared(statistics, shared, time.perf_counter() - began)


def _runs_itself(cell: Cell) -> bool:
    """Whether a cell runs the models over the text, or over none, and needs no statistics."""
    return cell.recipe is None or cell.recipe.needs_text is not None


def _windows(recipe: Recipe, dense: Dense) -> Tensor:
    """The windows of a calibration text, without those that the model adds to it."""
    text = replace(recipe.calibration, self_samples=0.0)
    return DensePass(dense, text, recipe.runtime).draw().ids


def _folder_of_statistics(out: Path, cell: Cell) -> Path:
    return out / "statistics" / _calibration_key(cell)


def _collected(folder: Path, recipe: Recipe, dense: Dense, progress: Progress | None) -> Statistics:
    """What an interrupted sweep collected, or began to; made anew where it is of something else."""
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


def _overlap(seen: Tensor, opened: Opened) -> Overlap:
    """Passages that calibration and evaluation share, as long as their windows allow."""
    asked = opened.windows
    length = passage_length(opened.dense.vocabulary)
    return overlap(seen, asked, min(length, seen.shape[1], asked.ids.shape[1]))


def _job(
    cell: Cell, prepared: _Prepared, opened: Opened, out: Path, device: str, keep: bool
) -> Job:
    return Job(
        cell=cell,
        dense=opened.dense,
        windows=opened.windows,
        folder=out.absolute() / "models" / cell.id,
        keep=keep,
        device=device,
        statistics=_needed(cell, prepared.statistics),
        overlap=prepared.overlap,
        collecting=0.0 if _runs_itself(cell) else prepared.seconds,
        error=prepared.error,
    )


def _needed(cell: Cell, statistics: Statistics | None) -> Path | None:
    """Where a cell's statistics are; None for one that runs over the text itself."""
    return None if _runs_itself(cell) or statistics is None else statistics.folder.absolute()


def _clear_leftovers(out: Path, groups: Sequence[list[Cell]]) -> None:
    """Removes what an interrupted run left half-written, and folders that have become empty.

    Of `groups` also the statistics: a run that was killed may not have come to that.
    """
    for group in groups:
        shutil.rmtree(_folder_of_statistics(out, group[0]), ignore_errors=True)
    for name in ("statistics", "models"):
        remove_leftovers(out / name)
        with contextlib.suppress(OSError):
            (out / name).rmdir()


def _summary(out: Path, cells: list[Cell], store: Store, ran: int) -> Summary:
    rows = [store.rows[cell.id] for cell in cells]
    reasons = {row.cell: row.error or NO_REASON for row in rows if row.status == "failed"}
    return Summary(out, len(rows) - len(reasons), len(reasons), ran, reasons, store.torn)
