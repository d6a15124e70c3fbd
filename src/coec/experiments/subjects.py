"""The models and texts of a sweep: all of them checked, and opened once, before any cell runs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coec.calibration.tokenizer import load_tokenizer
from coec.calibration.tokens import Windows
from coec.calibration.windows import resolve_seq_len, source_digest
from coec.devices import choose_device
from coec.errors import OptionError
from coec.evaluation.network import load_network
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

SAMPLED = 64
"""Windows of `text = "self"` where `max_windows` does not say, as in `coec eval`."""


Identity = dict[str, str | None]
"""What tells the models and texts of a cell from others: digests of their content."""


@dataclass(frozen=True)
class Opened:
    """A dense model and its evaluation text, checked and open.

    Attributes:
        dense: the model.
        windows: the evaluation text, cut.
        statistics: that somebody collected of it before.
    """

    dense: Dense
    windows: Windows
    statistics: Statistics | None = None


def open_models(cells: list[Cell]) -> dict[str, Dense]:
    """Every model by its path. Each weight is read here, once: damage is found before any work."""
    models: dict[str, Dense] = {}
    for path in dict.fromkeys(cell.subject.path for cell in cells):
        models[path] = Dense.open(path)
        models[path].check_values()
    return models


def with_statistics(
    cells: list[Cell], models: dict[str, Dense], saved: Sequence[Statistics]
) -> list[Cell]:
    """The cells, of models of which there are statistics with the calibration of those.

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
    found = []
    for cell in cells:
        dense, recipe = models[cell.subject.path], cell.recipe
        fitting = by_model.get(dense.digest) if saved else None
        if recipe is not None and fitting is not None:
            recipe.check_for_statistics()
            how = adopted(fitting, recipe.calibration, dense, cell.given)
            cell = replace(cell, recipe=replace(recipe, calibration=how))
        found.append(cell)
    return found


def open_subjects(
    cells: list[Cell], models: dict[str, Dense], saved: Sequence[Statistics], device: str
) -> dict[Subject, Opened]:
    """Every model with its evaluation text, and every calibration text known to be usable.

    Raises:
        CoecError: a text or a setting cannot be used.
    """
    by_model = _by_model(saved)
    opened: dict[Subject, Opened] = {}
    sources: dict[tuple[str, str, str | None], list[Recipe]] = {}
    for cell in cells:
        subject, recipe = cell.subject, cell.recipe
        dense = models[subject.path]
        if subject not in opened:
            how = subject.evaluation
            if how.tasks:
                load_tokenizer(dense.folder, trust_remote_code=how.trust_remote_code)
            statistics = by_model.get(dense.digest) if saved else None
            text = _evaluation_text(subject, dense, device)
            opened[subject] = Opened(dense, text, statistics)
        if recipe is None:
            continue
        Plan.of(dense, recipe)
        source = (subject.path, str(recipe.calibration.source), recipe.calibration.text_column)
        if opened[subject].statistics is None:
            sources.setdefault(source, []).append(recipe)
    for (path, *_), recipes in sources.items():
        parts = [recipe.calibration for recipe in recipes]
        check_calibrations(models[path], parts, recipes[0].runtime)
    return opened


def _by_model(saved: Sequence[Statistics]) -> dict[str, Statistics]:
    found: dict[str, Statistics] = {}
    for statistics in saved:
        other = found.setdefault(statistics.made_with["model"], statistics)
        if other is not statistics:
            raise OptionError(
                f"the statistics in '{other.folder}' and '{statistics.folder}' are of one model: "
                "give one of them, or merge them"
            )
    return found


def identities(cells: list[Cell], subjects: dict[Subject, Opened]) -> dict[str, Identity]:
    """Of every cell, by its id."""
    digests: dict[str, str] = {}
    found: dict[str, Identity] = {}
    for cell in cells:
        opened, recipe, how = subjects[cell.subject], cell.recipe, cell.subject.evaluation
        calibration = None
        if recipe is not None and opened.statistics is not None:
            calibration = str(opened.statistics.made_with["calibration"])
        elif recipe is not None:
            source = recipe.calibration.source
            calibration = digests.setdefault(str(source), source_digest(source))
        found[cell.id] = {
            "model": opened.dense.digest,
            "calibration text": calibration,
            "evaluation text": opened.windows.sha256,
            "tasks' data": _tasks_digest(how.tasks, how.tasks_data),
            "kept units": None if recipe is None or recipe.kept is None else recipe.kept.digest,
        }
    return found


def _tasks_digest(tasks: str | None, folder: str | None) -> str | None:
    files = None if tasks is None else check_tasks(tasks, folder)[1]
    if files is None:
        return None
    content = [(name, source_digest(path)) for name, path in sorted(files.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _evaluation_text(subject: Subject, dense: Dense, device: str) -> Windows:
    how = subject.evaluation
    if how.text == "self":
        return _sampled(subject, dense, device)
    return evaluation_windows(
        dense, how.text, seq_len=how.seq_len, max_windows=how.max_windows,
        text_column=how.text_column, trust_remote_code=how.trust_remote_code,
    )  # fmt: skip


def _sampled(subject: Subject, dense: Dense, device: str) -> Windows:
    """Text sampled from the dense model, as by `coec eval --text self`."""
    how = subject.evaluation
    network = load_network(dense, choose_device(device), None)
    seq_len = resolve_seq_len(how.seq_len, dense.positions, EVALUATION_SEQ_LEN)
    return sample_from_model(
        network, load_tokenizer(dense.folder, trust_remote_code=how.trust_remote_code),
        samples=how.max_windows or SAMPLED, seed=1, seq_len=seq_len,
        at_once=windows_that_fit(dense, network, seq_len),
    )  # fmt: skip
