"""One cell: prune, measure, and put the account into one row."""

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coec.calibration.windows import Overlap, Windows
from coec.devices import choose_device, environment, peak, reset_peak
from coec.errors import CoecError, NumericalError, UnfinishedError
from coec.evaluation.efficiency import efficiency
from coec.evaluation.geometry import geometry
from coec.evaluation.perplexity import perplexity
from coec.evaluation.zero_shot import zero_shot
from coec.experiments.grid import Cell
from coec.experiments.rows import CONTROL, Row, read
from coec.models.dense import Dense
from coec.pipeline.prune import prune
from coec.pipeline.report import Report
from coec.planning.recipe import Recipe
from coec.settings import Calibration
from coec.version import __version__

_SITE_FIELDS = (
    "module", "block", "site", "units_before", "units_after", "error_before", "error_after",
    "holdout_before", "holdout_after", "chosen", "candidates", "reconstruction",
    "errors_per_round", "objectives_per_round", "alignment_before", "alignment_after",
    "gcv_lambda", "rounds", "reason", "events", "seconds",
)  # fmt: skip
"""Fields of a site's entry in coec.json that a row keeps."""
RowFields = dict[str, Any]
"""Fields of a row, ready for JSON."""


@dataclass(frozen=True)
class DensePassOfGroup:
    """Results that the cells of one calibration share, or the error by which they fail.

    There is no folder of statistics where every cell runs the models itself.
    """

    statistics: Path | None = None
    overlap: Overlap | None = None
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, eq=False)
class CellJob:
    """Inputs of a worker for one cell: its open model, and the evaluation text, cut.

    The pruned model is written to `folder`, and stays there if `keep`.
    """

    cell: Cell
    dense: Dense
    windows: Windows
    folder: Path
    keep: bool
    device: str
    shared: DensePassOfGroup


def run(job: CellJob) -> Row:
    """Return the cell's row; a failure is a row too, with its reason in one line."""
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
    return read({
        "cell": cell.id, "grids": list(cell.grids), "labels": cell.labels, "status": "done",
        "error": None, "model": cell.subject.label, "path": cell.subject.path,
        "settings": cell.recipe.record() if cell.recipe else dense,
    })  # fmt: skip


def _measured(job: CellJob) -> RowFields:
    """Prune, where the cell has a recipe, and evaluate the model."""
    began = time.perf_counter()
    evaluation, device = job.cell.subject.evaluation, choose_device(job.device)
    model, report = job.dense, None
    row: RowFields = {}
    if job.cell.recipe is not None:
        report = _pruned_model(job, job.cell.recipe)
        model = Dense.open(job.folder)
        row = {
            "settings": report.recipe,
            "parameters": report.plan["parameters"],
            "calibration": report.calibration,
            "sites": [{n: site[n] for n in _SITE_FIELDS if n in site} for site in report.sites],
            "reconstruction": report.reconstruction,
        }
    pruned_at = time.perf_counter()
    row["peak_memory_bytes"] = peak(device)
    reset_peak(device)  # the memory of running the model is measured by itself
    baseline = job.dense if evaluation.distance and report else None
    result = perplexity(model, job.windows, baseline=baseline, device=job.device)
    row["perplexity"] = result.as_dict()
    cost = asdict(efficiency(job.dense, model).pruned)
    row["cost"] = cost | {"peak_memory_bytes": peak(device)}
    if overlap := job.shared.overlap:
        row["overlap"] = {**asdict(overlap), "flagged": overlap.flagged}
    if evaluation.tasks:
        row["zero_shot"] = zero_shot(
            model, evaluation.tasks, tasks_data=evaluation.tasks_data, limit=evaluation.limit,
            device=job.device, trust_remote_code=evaluation.trust_remote_code,
        ).as_dict()  # fmt: skip
    if evaluation.geometry and report:
        _add_geometry(row["sites"], geometry(job.dense, model, device=job.device))
    row.setdefault("parameters", {"before": result.parameters, "after": result.parameters})
    row["seconds"] = {
        "collecting": 0.0 if job.cell.runs_model else job.shared.seconds,
        "pruning": pruned_at - began,
        "evaluating": time.perf_counter() - pruned_at,
    }
    return row


def _pruned_model(job: CellJob, recipe: Recipe) -> Report:
    """Prune the model of a cell; go on where an interrupted sweep was, if the settings agree.

    The statistics bring the calibration: their text need not be at its place any more. Held-out
    windows, which a compensation may need of it, have to be asked for all the same.
    """
    statistics = None if job.cell.runs_model else job.shared.statistics
    if statistics is not None:
        recipe = replace(recipe, calibration=Calibration(holdout=recipe.calibration.holdout))
    shutil.rmtree(job.folder, ignore_errors=True)  # left by a sweep that was killed
    try:
        return prune(job.dense, job.folder, recipe, statistics=statistics)
    except UnfinishedError:
        return prune(job.dense, job.folder, recipe, statistics=statistics, restart=True)


def _add_geometry(sites: list[RowFields], measured: list[RowFields]) -> None:
    """Add mean principal angles in degrees, the frames' discrepancy and the alignment penalty."""
    by_module = {module["module"]: module for module in measured}
    for site in sites:
        if module := by_module.get(site["module"]):
            site["geometry"] = {
                "angle_op": module["original_pruned"]["mean"],
                "angle_oc": module["original_compensated"]["mean"],
                "angle_pc": module["pruned_compensated"]["mean"],
                **{name: module[name] for name in ("discrepancy", "r", "penalty")},
            }
