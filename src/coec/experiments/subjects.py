"""Models and texts of a sweep: each is checked, and opened once, before any cell runs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coec.calibration.tokens import load_tokenizer
from coec.calibration.windows import Windows, resolve_seq_len, source_digest
from coec.devices import choose_device
from coec.errors import OptionError
from coec.evaluation.pair import load_network
from coec.evaluation.perplexity import EVALUATION_SEQ_LEN, evaluation_windows, sampled_windows
from coec.evaluation.zero_shot import check_tasks
from coec.experiments.grid import Cell, Subject
from coec.models.dense import Dense
from coec.planning import Plan
from coec.planning.recipe import Recipe
from coec.streaming.passes import adopted
from coec.streaming.statistics import Statistics
from coec.streaming.windows import check_calibrations

CellIdentity = dict[str, str | None]
"""Digests of the models and texts of a cell, by what they are."""


@dataclass(frozen=True)
class OpenSubject:
    """A dense model, its evaluation windows, and statistics that were collected of it before."""

    dense: Dense
    windows: Windows
    statistics: Statistics | None = None


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
                "give one of them, or merge them"
            )
    return by_model


def resolved(
    cells: list[Cell], models: Mapping[str, Dense], saved: Mapping[str, Statistics], device: str
) -> list[Cell]:
    """Give cells the device, the kept units that they name, and the calibration of statistics.

    Raises:
        OptionError: a cell asks for another calibration, or statistics are of no model here.
    """
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
        if recipe is not None and saved and dense.digest in saved:
            recipe.check_for_statistics()
            calibration = adopted(saved[dense.digest], recipe.calibration, dense, cell.explicit)
            recipe = replace(recipe, calibration=calibration)
        if recipe is not None:
            recipe = replace(recipe, runtime=replace(recipe.runtime, device=device)).opened()
        changed.append(replace(cell, recipe=recipe))
    return changed


def open_subjects(
    cells: list[Cell], models: Mapping[str, Dense], saved: Mapping[str, Statistics], device: str
) -> dict[Subject, OpenSubject]:
    """Cut every evaluation text, and check every plan and calibration text.

    Raises:
        CoecError: a text or a setting cannot be used.
    """
    subjects: dict[Subject, OpenSubject] = {}
    sources: dict[tuple[str, str, str | None], list[Recipe]] = {}
    for cell in cells:
        subject, recipe = cell.subject, cell.recipe
        dense = models[subject.path]
        if subject not in subjects:
            if subject.evaluation.tasks:
                trust = subject.evaluation.trust_remote_code
                load_tokenizer(dense.folder, trust_remote_code=trust)
            windows = _evaluation_windows(subject, dense, device)
            subjects[subject] = OpenSubject(
                dense, windows, saved.get(dense.digest) if saved else None
            )
        if recipe is None:
            continue
        Plan.of(dense, recipe)
        if subjects[subject].statistics is None:
            calibration = recipe.calibration
            source = (subject.path, str(calibration.source), calibration.text_column)
            sources.setdefault(source, []).append(recipe)
    for (path, *_), recipes in sources.items():
        calibrations = [recipe.calibration for recipe in recipes]
        check_calibrations(models[path], calibrations, recipes[0].runtime)
    return subjects


def _evaluation_windows(subject: Subject, dense: Dense, device: str) -> Windows:
    """Cut the evaluation text; `self` is sampled from the model, as by `coec eval --text self`."""
    evaluation = subject.evaluation
    seq_len, trust = evaluation.seq_len, evaluation.trust_remote_code
    if evaluation.text != "self":
        return evaluation_windows(
            dense, evaluation.text, seq_len=seq_len, trust_remote_code=trust,
            max_windows=evaluation.max_windows, text_column=evaluation.text_column,
        )  # fmt: skip
    network = load_network(dense, choose_device(device), None)
    seq_len = resolve_seq_len(seq_len, dense.positions, EVALUATION_SEQ_LEN)
    return sampled_windows(
        dense, network, seq_len=seq_len, samples=evaluation.max_windows, trust_remote_code=trust
    )


def identities(cells: list[Cell], subjects: dict[Subject, OpenSubject]) -> dict[str, CellIdentity]:
    """Return the identity of every cell, by its id."""
    digests: dict[str, str] = {}
    by_cell: dict[str, CellIdentity] = {}
    for cell in cells:
        subject, recipe = subjects[cell.subject], cell.recipe
        calibration = None
        if recipe is not None and subject.statistics is not None:
            calibration = str(subject.statistics.made_with["calibration"])
        elif recipe is not None:
            source = recipe.calibration.source
            calibration = digests.setdefault(str(source), source_digest(source))
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
    files = None if tasks is None else check_tasks(tasks, folder)[1]
    if files is None:
        return None
    content = [(name, source_digest(path)) for name, path in sorted(files.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
