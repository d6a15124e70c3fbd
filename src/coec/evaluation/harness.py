"""lm-evaluation-harness as a library: its own task definitions, on hub data or on local files."""

import difflib
import functools
import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from os.path import isdir, isfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coec.errors import CalibrationError, CoecError, OptionError, check_installed, first_line
from coec.events import Progress
from coec.models.files import JsonDict

_SURROUNDINGS = ("get_git_commit_hash", "add_env_info")
"""Functions of lm-eval's evaluator that describe the machine, for a record not used here. They run
git in the working folder, and many programs."""


def lm_eval_version() -> str:
    """Version of the installed lm-eval; raises OptionError if it is not all there."""
    check_installed("lm-evaluation-harness", "'coec[zero-shot]'", "accelerate", "lm_eval")
    return version("lm_eval")


@functools.cache
def official_tasks() -> Any:
    """Load lm-eval's TaskManager over its own tasks, which reads thousands of files, once."""
    from lm_eval.tasks import TaskManager

    with quiet():
        return TaskManager()


def check_names(names: Sequence[str]) -> None:
    """Raise OptionError for a name that is not one of lm-eval's tasks."""
    manager = official_tasks()
    for name in names:
        if name in manager.all_subtasks:
            continue
        if name in manager.all_tasks:
            raise OptionError(f"'{name}' is a group of lm-eval's tasks: name the tasks themselves")
        close = difflib.get_close_matches(name, manager.all_subtasks, 3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise OptionError(f"lm-eval {lm_eval_version()} has no task '{name}'{hint}")


def local_files(names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Find the file of every task, `<task>.jsonl`; raises CalibrationError if one is missing."""
    files = {name: folder.absolute() / f"{name}.jsonl" for name in names}
    for name, file in files.items():
        if not isfile(file):
            paths = folder.glob("*.jsonl") if isdir(folder) else ()
            available = ", ".join(sorted(path.stem for path in paths)) or "none"
            raise CalibrationError(
                f"no '{folder / file.name}' for task '{name}'; tasks with a file there: {available}"
            )
    return files


@contextmanager
def loaded_tasks(
    names: Sequence[str], files: dict[str, Path] | None, limit: int | None = None
) -> Iterator[list[Any]]:
    """Load lm-eval's task objects with their data, from the hub or from local files.

    A local file takes the place of the split that the official definition evaluates on. lm-eval
    reads a definition that includes the official one, under its name, and overrides only the place
    of the data; nothing is written outside a temporary folder. Every item that will be asked must
    have a known answer, since lm-eval counts an unknown one as wrong.
    """
    from lm_eval.tasks import TaskManager

    with TemporaryDirectory(prefix="coec-tasks-") as scratch:
        manager = official_tasks()
        if files is not None:
            # Definitions that include lm-eval's own: it finds them in the scratch folder alone.
            for name, file in files.items():
                definition = json.dumps(_local_definition(name, file, scratch))
                (Path(scratch) / f"{name}.yaml").write_text(definition, encoding="utf-8")
            manager = TaskManager(include_path=scratch, include_defaults=False)
        yield [_loaded(manager, name, files, limit) for name in names]


def _local_definition(name: str, file: Path, cache: str) -> JsonDict:
    """Write a task definition for lm-eval (JSON is YAML): the official one, with local data."""
    entry = official_tasks().task_index[name]
    official = entry.cfg or {}
    # The split that is scored: test where a definition has one, as lm-eval itself decides.
    split = next((key for key in ("test_split", "validation_split") if official.get(key)), None)
    if entry.yaml_path is None or split is None or {"class", "custom_dataset"} & official.keys():
        raise OptionError(f"task '{name}' computes its own data: it cannot read local files")
    data = {official[split]: str(file)}
    return {
        "include": str(entry.yaml_path),
        "task": name,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": data, "cache_dir": cache},
        **dict.fromkeys(("training_split", "validation_split", "test_split")),
        "fewshot_split": None,
        split: official[split],
    }


def _loaded(
    manager: Any, name: str, files: dict[str, Path] | None, limit: int | None = None
) -> Any:
    """Load a task, and check that its items make questions with known answers."""
    try:
        task = manager.load([name])["tasks"][name]
        # Some tasks run code that the model wrote, or need images.
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise OptionError(f"task '{name}' runs generated code or shows images: leave it out")
        for number, item in enumerate(itertools.islice(task.eval_docs, limit), 1):
            _check_item(task, item, number)
    except CoecError:
        raise
    except Exception as error:  # from the hub, a file, or a template that misses a column
        reason = first_line(error)
        advice = (
            f"the data of task '{name}' could not be loaded ({reason}). Offline, give local "
            "files: tasks_data=DIR"
            if files is None
            else f"'{files[name]}' does not fit lm-eval's task '{name}' ({reason}): rows must have "
            "the columns of the task's data set on the hub"
        )
        raise CalibrationError(advice) from error
    return task


def _check_item(task: Any, item: Any, number: int) -> None:
    """Raise CalibrationError if the right answer is missing, or hidden by -1 or an empty text."""
    # The answer is a whole number or a text; lm-eval takes it from the question if every choice
    # has a context of its own.
    choices = task.doc_to_choice(item) if task.OUTPUT_TYPE == "multiple_choice" else None
    question = task.doc_to_text(item)
    try:
        answer = question if getattr(task, "multiple_input", 0) else task.doc_to_target(item)
        if _valid(answer, choices):
            return
    except IndexError:  # a number beyond the choices, if the definition itself picks the text
        answer = item
    raise CalibrationError(
        f"task '{task.task_name}', row {number}, has no right answer in "
        f"{_answer_column(task)} (found: {answer!r:.60}): scores need rows whose answers "
        "are known; public test sets hide theirs"
    )


def _valid(answer: Any, choices: Sequence[Any] | None) -> bool:
    """True if an answer, or each of several, can be given."""
    if isinstance(answer, list):
        return bool(answer) and all(_valid(element, choices) for element in answer)
    if choices is None:
        return answer is not None and answer != ""
    if isinstance(answer, int):
        return 0 <= answer < len(choices)
    return answer in choices


def _answer_column(task: Any) -> str:
    """Describe the place where a task's definition looks for the answer."""
    available, column = task.eval_docs.column_names, getattr(task.config, "doc_to_target", None)
    if isinstance(column, str):
        names = re.findall(r"[A-Za-z_]\w*", column) or [column]
        return f"column '{([name for name in names if name in available] or names)[-1]}'"
    columns = [name for name in available if name in ("answer", "answerKey", "label")]
    return f"column '{columns[0]}'" if columns else "its data"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval and datasets from writing to stderr: progress goes through the callback."""
    import datasets
    import lm_eval.api.task as building
    from lm_eval import evaluator

    levels = {logger: logger.level for logger in map(logging.getLogger, ("lm_eval", "datasets"))}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)  # they also raise the errors that they log
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    with ExitStack() as patches:
        for name in _SURROUNDINGS:
            if hasattr(evaluator, name):
                patches.enter_context(patch.object(evaluator, name, lambda *_: None))
        # lm-eval's bar has no switch of its own.
        silent = functools.partial(building.tqdm, disable=True)
        patches.enter_context(patch.object(building, "tqdm", silent))
        try:
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
            if not bars:
                datasets.enable_progress_bars()


def language_model(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    max_length: int,
    progress: Progress | None,
) -> Any:
    """Wrap a model in memory for lm-eval; `truncated` counts requests cut on the left."""
    from lm_eval.models.huggingface import HFLM

    class Network(HFLM):
        truncated = 0

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return self._counted(super().loglikelihood, requests)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return self._counted(super().loglikelihood_rolling, requests)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return self._counted(super().generate_until, requests)

        def _counted(self, method: Any, requests: Any) -> Any:
            self.cache_hook.begin(len(requests))
            return method(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
            answer = max((len(tokens) for _, _, tokens in requests), default=0)
            if answer > max_length:
                raise OptionError(
                    f"an answer has {answer} tokens, more than seq_len={max_length}: give a "
                    "longer one, or leave its task out"
                )
            # lm-eval cuts a request that is too long on the left, and says nothing.
            lengths = (len(context) + len(tokens) for _, context, tokens in requests)
            # The last token is only predicted, so that one more than max_length fits.
            self.truncated += sum(length > max_length + 1 for length in lengths)
            return super()._loglikelihood_tokens(requests, *args, **options)

    # No cache is kept: the hook is how lm-eval tells that a request is finished.
    lm = Network(
        pretrained=network, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length
    )
    lm.set_cache_hook(_Counter(progress))
    return lm


class _Counter:
    """Cache hook of lm-eval that only counts finished requests."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done, self._total = progress, 0, 0

    def begin(self, requests: int) -> None:
        """Announce further requests."""
        self._total += requests

    def add_partial(self, method: str, request: Any, result: Any) -> None:
        """Count a finished request."""
        self._done += 1
        if self._progress:
            self._progress("zero-shot", self._done, self._total)
