"""Models and texts of a sweep: each is checked, and opened once, before any cell runs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coec.calibration.tokens import load_tokenizer
from coec.calibration.windows import Windows, resolve_seq_len, source_digest
from coec.devices import choose_device
from coec.errors import OptionError
from coec.evaluation.pair import load_network
from coec.evaluation.perplexity import EVALUATION_SEQ_LEN, evaluation_windows
from coec.evaluation.zero_shot import check_tasks
from coec.experiments.grid import Cell, Subject
from coec.models.dense import Dense
from coec.planning import Plan
from coec.planning.recipe import Recipe
from coec.streaming.passes import adopted
from coec.streaming.self_text import sample_from_model, windows_that_fit
from coec.streaming.statistics import Statistics
from coec.streaming.windows import check_calibrations

_SELF_WINDOWS = 64
"""Windows of `text = "self"` where `max_windows` does not say, as in `coec eval`."""
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


def with_statistics(
    cells: list[Cell], models: dict[str, Dense], saved: Sequence[Statistics]
) -> list[Cell]:
    """Give the cells of models with saved statistics the calibration of those.

    Raises:
        OptionError: a cell asks for another calibration, or statistics are of no model here, or two
            of one.
    """
    by_model = _by_model(saved)
    digests = {dense.digest for dense in models.values()} if saved else set()
    for digest, statistics in by_model.items():
        if digest not in digests:
            raise OptionError(
                f"the statistics in '{statistics.folder}' are of none of these models: name the "
                "model that they were collected from, or leave them out"
            )
    calibrated = []
    for cell in cells:
        dense, recipe = models[cell.subject.path], cell.recipe
        statistics_of_model = by_model.get(dense.digest) if saved else None
        if recipe is not None and statistics_of_model is not None:
            recipe.check_for_statistics()
            calibration = adopted(statistics_of_model, recipe.calibration, dense, cell.explicit)
            cell = replace(cell, recipe=replace(recipe, calibration=calibration))
        calibrated.append(cell)
    return calibrated


def open_subjects(
    cells: list[Cell], models: dict[str, Dense], saved: Sequence[Statistics], device: str
) -> dict[Subject, OpenSubject]:
    """Cut every evaluation text, and check every plan and calibration text.

    Raises:
        CoecError: a text or a setting cannot be used.
    """
    by_model = _by_model(saved)
    subjects: dict[Subject, OpenSubject] = {}
    sources: dict[tuple[str, str, str | None], list[Recipe]] = {}
    for cell in cells:
        subject, recipe = cell.subject, cell.recipe
        dense = models[subject.path]
        if subject not in subjects:
            if subject.evaluation.tasks:
                trust = subject.evaluation.trust_remote_code
                load_tokenizer(dense.folder, trust_remote_code=trust)
            statistics = by_model.get(dense.digest) if saved else None
            windows = _evaluation_windows(subject, dense, device)
            subjects[subject] = OpenSubject(dense, windows, statistics)
        if recipe is None:
            continue
        Plan.of(dense, recipe)
        source = (subject.path, str(recipe.calibration.source), recipe.calibration.text_column)
        if subjects[subject].statistics is None:
            sources.setdefault(source, []).append(recipe)
    for (path, *_), recipes in sources.items():
        calibrations = [recipe.calibration for recipe in recipes]
        check_calibrations(models[path], calibrations, recipes[0].runtime)
    return subjects


def _by_model(saved: Sequence[Statistics]) -> dict[str, Statistics]:
    by_model: dict[str, Statistics] = {}
    for statistics in saved:
        first = by_model.setdefault(statistics.made_with["model"], statistics)
        if first is not statistics:
            raise OptionError(
                f"the statistics in '{first.folder}' and '{statistics.folder}' are of one model: "
                "give one of them, or merge them"
            )
    return by_model


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


def _evaluation_windows(subject: Subject, dense: Dense, device: str) -> Windows:
    """Cut the evaluation text; `self` is sampled from the model, as by `coec eval --text self`."""
    evaluation = subject.evaluation
    trust = evaluation.trust_remote_code
    if evaluation.text != "self":
        return evaluation_windows(
            dense, evaluation.text, seq_len=evaluation.seq_len, trust_remote_code=trust,
            max_windows=evaluation.max_windows, text_column=evaluation.text_column,
        )  # fmt: skip
    network = load_network(dense, choose_device(device), None)
    seq_len = resolve_seq_len(evaluation.seq_len, dense.positions, EVALUATION_SEQ_LEN)
    return sample_from_model(
        network, load_tokenizer(dense.folder, trust_remote_code=trust),
        samples=evaluation.max_windows or _SELF_WINDOWS, seed=1, seq_len=seq_len,
        at_once=windows_that_fit(dense, network, seq_len),
    )  # fmt: skip
