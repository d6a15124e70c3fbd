"""One cell: prune, measure, and put the account into one row."""

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coec import __version__
from coec.calibration.overlap import Overlap
from coec.calibration.tokens import Windows
from coec.devices import choose_device, environment
from coec.errors import CoecError, NumericalError, UnfinishedError
from coec.evaluation.efficiency import efficiency
from coec.evaluation.geometry import geometry
from coec.evaluation.perplexity import perplexity
from coec.evaluation.zero_shot import zero_shot
from coec.experiments.grid import Cell
from coec.experiments.memory import peak, reset_peak
from coec.experiments.records import CONTROL
from coec.experiments.rows import Row, read
from coec.models.dense import Dense
from coec.pipeline.prune import prune
from coec.pipeline.report import Report
from coec.planning.recipe import Recipe
from coec.settings import Calibration

SITE_FIELDS = (
    "module", "block", "site", "units_before", "units_after", "error_before", "error_after",
    "holdout_before", "holdout_after", "chosen", "candidates", "reconstruction",
    "errors_per_round", "objectives_per_round", "alignment_before", "alignment_after",
    "gcv_lambda", "rounds", "reason", "events", "seconds",
)  # fmt: skip
"""What a row keeps of a site's entry in coec.json."""


@dataclass(frozen=True, eq=False)
class Job:
    """All that a worker needs for one cell.

    Attributes:
        cell: what to do.
        dense: its model, open.
        windows: the evaluation text, cut.
        folder: where the pruned model goes.
        keep: whether it stays there.
        device: where to work.
        statistics: of the cell's calibration; None for a dense model.
        overlap: of that calibration with the evaluation text.
        collecting: seconds that the dense pass took, once for all cells of the calibration.
        error: why there are no statistics; the cell then fails with it.
    """

    cell: Cell
    dense: Dense
    windows: Windows
    folder: Path
    keep: bool
    device: str
    statistics: Path | None
    overlap: Overlap | None
    collecting: float
    error: str | None


def run(job: Job) -> Row:
    """The cell's row; a failure is a row too, with its reason in one line."""
    device = choose_device(job.device)
    reset_peak(device)
    row = head(job.cell)
    try:
        if job.error:
            raise CoecError(job.error)
        measured = _measured(job)
        _check_finite(measured)
        row = row.changed(**json.loads(json.dumps(measured)))
    except Exception as error:  # libraries raise what they like, and the other cells go on
        row = row.changed(status="failed", error=reason(error))
    finally:
        if not job.keep:
            shutil.rmtree(job.folder, ignore_errors=True)
    return row.changed(
        peak_memory_bytes=_largest(row.peak_memory_bytes, peak(device)),
        environment={"coec": __version__, **environment(str(device))},
    )


def reason(error: Exception) -> str:
    """An error in one line; of errors that are not our own also the kind."""
    kind = "" if isinstance(error, CoecError) else type(error).__name__
    words = CONTROL.sub("?", " ".join(str(error).split()))
    return ": ".join(part for part in (kind, words) if part)


def _check_finite(value: Any, place: str = "") -> None:
    """Raises NumericalError, which names the place, for a number that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        raise NumericalError(f"{place} is not finite: {value}")
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, part in inner:
        _check_finite(part, f"{place}.{name}".removeprefix("."))


def head(cell: Cell) -> Row:
    """What was asked for: the beginning of every row; ResultsError where none can hold it."""
    if cell.recipe is None:
        settings: dict[str, Any] = {
            "sparsity": 0.0,
            "selection": None,
            "compensation": "dense",
            "options": {},
        }
    else:
        settings = cell.recipe.record()
    return read({
        "cell": cell.id, "grids": list(cell.grids), "labels": cell.labels, "status": "done",
        "error": None, "model": cell.subject.label, "path": cell.subject.path,
        "settings": settings,
    })  # fmt: skip


def _measured(job: Job) -> dict[str, Any]:
    """Prunes, where the cell asks for that, and evaluates what it got."""
    began = time.perf_counter()
    subject, report = job.cell.subject, None
    model = job.dense
    row: dict[str, Any] = {}
    if job.cell.recipe is not None:
        report = _pruned_model(job, job.cell.recipe)
        model = Dense.open(job.folder)
        row |= _pruned(report)
    pruned_at = time.perf_counter()
    device = choose_device(job.device)
    row["peak_memory_bytes"] = peak(device)
    reset_peak(device)  # what running the model takes is measured by itself
    base = job.dense if subject.evaluation.distance and report else None
    result = perplexity(model, job.windows, baseline=base, device=job.device)
    row["perplexity"] = result.as_dict()
    cost = asdict(efficiency(job.dense, model).pruned)
    row["cost"] = cost | {"peak_memory_bytes": peak(device)}
    if job.overlap:
        row["overlap"] = {**asdict(job.overlap), "flagged": job.overlap.flagged}
    how = subject.evaluation
    if how.tasks:
        row["zero_shot"] = zero_shot(
            model, how.tasks, tasks_data=how.tasks_data, limit=how.limit, device=job.device,
            trust_remote_code=how.trust_remote_code,
        ).as_dict()  # fmt: skip
    if how.geometry and report:
        _add_geometry(row["sites"], geometry(job.dense, model, device=job.device))
    row.setdefault("parameters", {"before": result.parameters, "after": result.parameters})
    row["seconds"] = {
        "collecting": job.collecting,
        "pruning": pruned_at - began,
        "evaluating": time.perf_counter() - pruned_at,
    }
    return row


def _pruned_model(job: Job, recipe: Recipe) -> Report:
    """Goes on where an interrupted sweep was in this cell, if that was asked for the same.

    The statistics bring the calibration: their text need not be at its place any more. What a
    compensation may need of it, held-out windows, has to be asked for all the same.
    """
    if job.statistics is not None:
        recipe = replace(recipe, calibration=Calibration(holdout=recipe.calibration.holdout))
    shutil.rmtree(job.folder, ignore_errors=True)  # left by a sweep that was killed
    try:
        return prune(job.dense, job.folder, recipe, statistics=job.statistics)
    except UnfinishedError:
        return prune(job.dense, job.folder, recipe, statistics=job.statistics, restart=True)


def _largest(*peaks: int | None) -> int | None:
    """The most memory of any phase; None where it is not known."""
    return max((p for p in peaks if p is not None), default=None)


def _pruned(report: Report) -> dict[str, Any]:
    sites = [{name: site[name] for name in SITE_FIELDS if name in site} for site in report.sites]
    return {
        "settings": report.recipe,
        "parameters": report.plan["parameters"],
        "calibration": report.calibration,
        "sites": sites,
        "reconstruction": report.reconstruction,
    }


def _add_geometry(sites: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    """Mean principal angles in degrees, the frames' discrepancy and the alignment penalty."""
    by_module = {module["module"]: module for module in measured}
    for site in sites:
        found = by_module.get(site["module"])
        if found:
            site["geometry"] = {
                "angle_op": found["original_pruned"]["mean"],
                "angle_oc": found["original_compensated"]["mean"],
                "angle_pc": found["pruned_compensated"]["mean"],
                "discrepancy": found["discrepancy"],
                "r": found["r"],
                "penalty": found["penalty"],
            }
