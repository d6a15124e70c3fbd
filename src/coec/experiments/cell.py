"""Cells: their models and texts, opened once before any of them runs, and the work of one."""

import functools
import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coec import ending
from coec.calibration.tokens import load_tokenizer
from coec.calibration.windows import Windows, source_digest
from coec.devices import choose_device, environment, peak, reset_peak
from coec.errors import CoecError, NumericalError, OptionError, UnfinishedError
from coec.evaluation.efficiency import efficiency
from coec.evaluation.geometry import geometry
from coec.evaluation.pair import load_network
from coec.evaluation.perplexity import evaluation_windows, perplexity, sampled_windows
from coec.evaluation.settings import TextEvaluation
from coec.evaluation.zero_shot import check_tasks, zero_shot
from coec.experiments.grid import Cell, Subject
from coec.experiments.rows import CONTROL, RECOVER, Row, read
from coec.models.dense import Dense
from coec.pipeline.prune import prune
from coec.pipeline.report import Report
from coec.planning import Plan
from coec.planning.recipe import Recipe
from coec.planning.resolve import with_statistics
from coec.streaming.statistics import Statistics
from coec.streaming.windows import check_calibrations
from coec.version import __version__

_SITE_FIELDS = (
    "module", "block", "site", "units_before", "units_after", "error_before", "error_after",
    "holdout_before", "holdout_after", "reconstruction", "predictions",
    "errors_per_round", "objectives_per_round", "alignment_before", "alignment_after",
    "gcv_lambda", "rounds", "reason", "events", "seconds",
)  # fmt: skip
"""Fields of a site's entry in coec.json that a row keeps."""
RowFields = dict[str, Any]
"""Fields of a row, ready for JSON."""
CellIdentity = dict[str, str | None]
"""Digests of the models and texts of a cell, by what they are."""


@dataclass(frozen=True)
class OpenSubject:
    """A dense model, its evaluation windows, and statistics that were collected of it before."""

    dense: Dense
    windows: Windows
    statistics: Statistics | None


def open_models(cells: list[Cell]) -> dict[str, Dense]:
    """Open every model, by path, and read each weight once: damage is found before any work."""
    models: dict[str, Dense] = {}
    for path in dict.fromkeys(cell.subject.path for cell in cells):
        models[path] = Dense.open(path)
        models[path].check_values()
    return models


def open_statistics(sources: Sequence[str | Path | Statistics]) -> dict[str, Statistics]:
    """Open statistics that were collected before, by the digest of their model."""
    by_model: dict[str, Statistics] = {}
    for statistics in map(Statistics.open, sources):
        first = by_model.setdefault(statistics.made_with["model"], statistics)
        if first is not statistics:
            raise OptionError(
                f"the statistics in '{first.folder}' and '{statistics.folder}' are of one model: "
                "give one of them"
            )
    return by_model


def resolved(
    cells: list[Cell], models: Mapping[str, Dense], saved: Mapping[str, Statistics], device: str
) -> list[Cell]:
    """Give cells the device, the kept units that they name, and the calibration of statistics.

    Raises:
        OptionError: a cell asks for another calibration, or statistics are of no model here.
    """
    # Statistics go to the model with their digest, whatever its path.
    digests = {dense.digest for dense in models.values()} if saved else set()
    for digest, statistics in saved.items():
        if digest not in digests:
            raise OptionError(
                f"the statistics in '{statistics.folder}' are of none of these models: name the "
                "model that they were collected from, or leave them out"
            )
    changed = []
    for cell in cells:
        recipe, dense = cell.recipe, models[cell.subject.path]
        if recipe is not None:
            if collected := _saved(dense, saved):
                recipe = with_statistics(recipe, dense, collected)
            recipe = replace(recipe, runtime=replace(recipe.runtime, device=device)).opened()
        changed.append(replace(cell, recipe=recipe))
    return changed


def _saved(dense: Dense, saved: Mapping[str, Statistics]) -> Statistics | None:
    return saved.get(dense.digest) if saved else None  # a digest reads every weight


def open_subjects(
    cells: list[Cell], models: Mapping[str, Dense], saved: Mapping[str, Statistics], device: str
) -> dict[Subject, OpenSubject]:
    """Cut every evaluation text, and check every plan and calibration text.

    Raises:
        CoecError: a text or a setting cannot be used.
    """
    subjects: dict[Subject, OpenSubject] = {}
    # Models and windows once per subject; a calibration text once for all that read it
    by_source: dict[tuple[str, str, str | None], list[Recipe]] = {}
    for cell in cells:
        subject, recipe = cell.subject, cell.recipe
        dense = models[subject.path]
        if subject not in subjects:
            windows = _evaluation_windows(subject, dense, device)
            subjects[subject] = OpenSubject(dense, windows, _saved(dense, saved))
        if recipe is None:
            continue
        Plan.of(dense, recipe)
        if subjects[subject].statistics is None:
            calibration = recipe.calibration
            source = (subject.path, str(calibration.source), calibration.text_column)
            by_source.setdefault(source, []).append(recipe)
    for (path, *_), recipes in by_source.items():
        calibrations = [recipe.calibration for recipe in recipes]
        check_calibrations(models[path], calibrations, recipes[0].runtime)
    return subjects


def _evaluation_windows(subject: Subject, dense: Dense, device: str) -> Windows:
    """Cut the evaluation text as `coec eval` does; `self` is sampled from the model.

    Windows begin with the tokenizer's start where the dense model needs it.
    """
    evaluation, trust = subject.evaluation, subject.evaluation.trust_remote_code
    if evaluation.tasks:
        load_tokenizer(dense.folder, trust_remote_code=trust)
    load = functools.partial(load_network, dense, choose_device(device), None)
    if evaluation.text == "self":
        samples = evaluation.max_windows or TextEvaluation.samples
        rules = TextEvaluation(seq_len=evaluation.seq_len, samples=samples)
        return sampled_windows(dense, load(), rules, trust)
    return evaluation_windows(
        dense, evaluation.text, decides=load, trust_remote_code=trust, seq_len=evaluation.seq_len,
        max_windows=evaluation.max_windows, text_column=evaluation.text_column,
    )  # fmt: skip


def identities(cells: list[Cell], subjects: dict[Subject, OpenSubject]) -> dict[str, CellIdentity]:
    """Return the identity of every cell, by its id."""
    digest_of = functools.cache(source_digest)  # many cells name one text
    by_cell: dict[str, CellIdentity] = {}
    for cell in cells:
        subject, recipe = subjects[cell.subject], cell.recipe
        calibration = None
        if recipe is not None and subject.statistics is not None:
            calibration = str(subject.statistics.made_with["calibration"])
        elif recipe is not None:
            calibration = digest_of(recipe.calibration.source)
        by_cell[cell.id] = {
            "model": subject.dense.digest,
            "calibration text": calibration,
            "evaluation text": subject.windows.sha256,
            "tasks' data": _tasks_digest(cell.subject),
            "kept units": None if recipe is None or recipe.kept is None else recipe.kept.digest,
        }
    return by_cell


def _tasks_digest(subject: Subject) -> str | None:
    tasks, folder = subject.evaluation.tasks, subject.evaluation.tasks_data
    if tasks is None or (files := check_tasks(tasks, folder)[1]) is None:
        return None
    content = [(name, source_digest(path)) for name, path in sorted(files.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class SharedPass:
    """Results that the cells of one calibration share, or the error by which they fail.

    There is no folder of statistics where every cell runs the models itself.
    """

    statistics: Path | None = None
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, eq=False)
class CellJob:
    """Inputs of a worker for one cell: its open model, and the evaluation text, cut.

    The pruned model is written to `folder`, and stays there if `keep`.
    """

    cell: Cell
    subject: OpenSubject
    folder: Path
    keep: bool
    device: str
    shared: SharedPass


def run(job: CellJob) -> Row:
    """Return the cell's row; a failure is a row too, with its reason in one line."""
    # Head of the row → measurements, or the reason why there are none → memory and versions
    device = choose_device(job.device)
    reset_peak(device)
    row = head(job.cell)
    try:
        if job.shared.error:
            raise CoecError(job.shared.error)
        measured = _measured(job)
        _check_finite(measured)
        row = row.changed(**json.loads(json.dumps(measured)))
    except Exception as error:  # libraries raise what they like, and the other cells go on
        ending.check()
        row = row.changed(status="failed", error=reason(error))
    finally:
        if not job.keep:
            shutil.rmtree(job.folder, ignore_errors=True)
    peaks = [size for size in (row.peak_memory_bytes, peak(device)) if size is not None]
    return row.changed(
        peak_memory_bytes=max(peaks, default=None),
        environment={"coec": __version__, **environment(str(device))},
    )


def reason(error: Exception) -> str:
    """Describe an error in one line; of errors that are not our own also the class."""
    words = CONTROL.sub("?", " ".join(str(error).split()))
    if isinstance(error, CoecError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _check_finite(value: object, place: str = "") -> None:
    """Raise NumericalError, which names the place, for a number that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        raise NumericalError(f"{place} is not finite: {value}")
    members = value.items() if isinstance(value, dict) else ()
    for name, member in enumerate(value) if isinstance(value, list | tuple) else members:
        _check_finite(member, f"{place}.{name}".removeprefix("."))


def head(cell: Cell) -> Row:
    """Return the settings of a cell as the beginning of its row.

    Raises:
        ResultsError: no row can hold them.
    """
    dense: RowFields = {"sparsity": 0.0, "selection": None, "compensation": "dense", "options": {}}
    trained = {} if cell.recover is None else {RECOVER: cell.recover}
    return read({
        "cell": cell.id, "grids": list(cell.grids), "labels": cell.labels, "status": "done",
        "error": None, "model": cell.subject.label, "path": cell.subject.path,
        "settings": (cell.recipe.record() if cell.recipe else dense) | trained,
    })  # fmt: skip


def _measured(job: CellJob) -> RowFields:
    """Prune, where the cell has a recipe, and evaluate the model."""
    # Dense model → pruned, and trained where the cell says so → evaluated
    began = time.perf_counter()
    evaluation, device = job.cell.subject.evaluation, choose_device(job.device)
    dense, report = job.subject.dense, None
    model = dense
    row: RowFields = {}
    if job.cell.recipe is not None:
        report = _pruned_model(job, job.cell.recipe)
        model = Dense.open(job.folder)
        if (tokens := job.cell.recover) is not None:
            model = _recovered(job, job.cell.recipe, tokens)
        row = {
            "settings": report.recipe | ({} if tokens is None else {RECOVER: tokens}),
            "parameters": report.plan["parameters"],
            "calibration": report.calibration,
            "sites": [{n: site[n] for n in _SITE_FIELDS if n in site} for site in report.sites],
            "reconstruction": report.reconstruction,
        }
    pruned_at = time.perf_counter()
    row["peak_memory_bytes"] = peak(device)
    reset_peak(device)  # the memory of running the model is measured by itself
    baseline = dense if evaluation.distance and report else None
    result = perplexity(model, job.subject.windows, baseline=baseline, device=job.device)
    row["perplexity"] = result.as_dict()
    cost = asdict(efficiency(dense, model).pruned)
    row["cost"] = cost | {"peak_memory_bytes": peak(device)}
    if evaluation.tasks:
        row["zero_shot"] = zero_shot(
            model, evaluation.tasks, tasks_data=evaluation.tasks_data, limit=evaluation.limit,
            device=job.device, trust_remote_code=evaluation.trust_remote_code,
        ).as_dict()  # fmt: skip
    if evaluation.geometry and report:
        angles = {row["module"]: row for row in geometry(dense, model, device=job.device)}
        for site in row["sites"]:
            if module := angles.get(site["module"]):
                site["geometry"] = _angles(module)
    row.setdefault("parameters", {"before": result.parameters, "after": result.parameters})
    row["seconds"] = {
        "collecting": 0.0 if job.cell.runs_model else job.shared.seconds,
        "pruning": pruned_at - began,
        "evaluating": time.perf_counter() - pruned_at,
    }
    return row


def _pruned_model(job: CellJob, recipe: Recipe) -> Report:
    """Prune the model of a cell; go on where an interrupted sweep was, if the settings agree.

    The statistics bring the calibration: their text need not be at its place any more.
    """
    statistics = None if job.cell.runs_model else job.shared.statistics
    if statistics is not None:
        recipe = replace(recipe, given=recipe.given.difference(recipe.calibration.record()))
    shutil.rmtree(job.folder, ignore_errors=True)  # left by a sweep that was killed
    try:
        return prune(job.subject.dense, job.folder, recipe, statistics=statistics)
    except UnfinishedError:
        return prune(job.subject.dense, job.folder, recipe, statistics=statistics, restart=True)


def _recovered(job: CellJob, recipe: Recipe, tokens: int) -> Dense:
    """Train a cell's pruned model on its calibration text; `job.folder` becomes the result."""
    from coec.recovery.recover import recover, settings_like

    # Beside the pruned model, whose place the trained one takes in the end.
    trained = job.folder.with_name(f"{job.folder.name}.recovered")
    shutil.rmtree(trained, ignore_errors=True)
    recover(
        job.subject.dense, job.folder, trained, **settings_like(recipe, tokens), restart=True,
        trust_remote_code=recipe.runtime.trust_remote_code,
    )  # fmt: skip
    shutil.rmtree(job.folder)
    trained.rename(job.folder)
    return Dense.open(job.folder)


def _angles(module: RowFields) -> RowFields:
    """Return mean principal angles in degrees, the frames' discrepancy and alignment penalty."""
    return {
        "angle_op": module["original_pruned"]["mean"],
        "angle_oc": module["original_compensated"]["mean"],
        "angle_pc": module["pruned_compensated"]["mean"],
        **{name: module[name] for name in ("discrepancy", "r", "penalty")},
    }
