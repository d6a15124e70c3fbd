"""Zero-shot accuracy through lm-evaluation-harness (METHODS §7)."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from coec.calibration.tokens import load_tokenizer
from coec.calibration.windows import resolve_seq_len
from coec.devices import choose_device
from coec.errors import OptionError
from coec.evaluation import harness
from coec.evaluation.pair import load_network
from coec.evaluation.settings import TaskEvaluation
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict, sha256
from coec.settings.typed import TaskSettings

PAPER_METRICS = {
    "boolq": "acc",
    "rte": "acc",
    "winogrande": "acc",
    "hellaswag": "acc_norm",
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "openbookqa": "acc_norm",
}
"""The seven tasks, and the metric of each in the paper's tables."""
SEVEN = "seven"


@dataclass(frozen=True)
class TaskScore:
    """The result of one task.

    Attributes:
        version: that of lm-eval's definition.
        metric, value, stderr: the paper's metric: for the seven tasks as in `PAPER_METRICS`, for
            others acc_norm if there is one, else acc; None if there is neither.
        acc, acc_norm: accuracy of the answer of highest log-probability, and of highest
            log-probability per character; with standard errors. None if lm-eval gives none (it
            needs two items).
        chance: expected score of guessing, the mean of 1 / choices over the items; None unless the
            task is multiple choice.
        data: SHA-256 of the local file, or "hub".
    """

    task: str
    version: str
    items: int
    metric: str | None
    value: float | None
    stderr: float | None
    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    chance: float | None
    other: dict[str, float]
    data: str


@dataclass(frozen=True)
class ZeroShot:
    """The result of an evaluation on tasks; JSON-ready by `as_dict`.

    Attributes:
        mean, mean_stderr: mean of the paper's metrics over the tasks that have one; √Σse²/n.
        truncated: number of requests longer than `seq_len` tokens, cut on the left.
        limit: items per task; None for all.
    """

    tasks: tuple[TaskScore, ...]
    mean: float | None
    mean_stderr: float | None
    truncated: int
    limit: int | None
    seq_len: int
    batch_size: int
    parameters: int
    lm_eval: str
    seconds: float

    def as_dict(self) -> JsonDict:
        """List every field by name, and the tasks by name."""
        tasks = {score.task: asdict(score) for score in self.tasks}
        return {**asdict(self), "tasks": tasks}


def zero_shot(
    model: str | Path | Dense,
    tasks: str | Sequence[str] = SEVEN,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    first: Callable[[], object] | None = None,
    **settings: Unpack[TaskSettings],
) -> ZeroShot:
    """Measure zero-shot accuracy with the task definitions of the installed lm-evaluation-harness.

    Args:
        model: a model folder or hub name, with a tokenizer.
        tasks: `seven` (the keys of `PAPER_METRICS`), or names of lm-eval's tasks, as a list or
            separated by commas.
        trust_remote_code: let the model's tokenizer run its own Python code.
        progress: called with ("zero-shot", done, total) requests.
        first: called when everything is read and checked but the weights: so a caller that measures
            something else first learns at once of a task that cannot be used.
        settings: fields of `TaskEvaluation`; with `tasks_data` nothing is downloaded.

    Raises:
        CoecError: with one line that says what to change, before the model is loaded.
    """
    rules = TaskEvaluation(**settings)
    chosen = choose_device(rules.device)
    dense = Dense.open(model)
    tokenizer = load_tokenizer(dense.folder, trust_remote_code=trust_remote_code)
    length = resolve_seq_len(rules.seq_len, dense.positions, dense.positions)
    names, files = check_tasks(tasks, rules.tasks_data)
    from lm_eval import simple_evaluate

    with harness.quiet(), harness.loaded_tasks(names, files, rules.limit) as loaded:
        if first:
            first()
        began = time.perf_counter()
        network = load_network(dense, chosen, rules.dtype)
        lm = harness.language_model(
            network, tokenizer, batch_size=rules.batch_size, max_length=length, progress=progress
        )
        # Standard errors are those of lm-eval's own command: bootstrap_iters = 0 would leave out
        # those of means too, which need no resampling.
        results = simple_evaluate(
            lm, tasks=loaded, num_fewshot=0, limit=rules.limit, log_samples=False,
            task_manager=harness.official_tasks(),  # or it reads its thousands of files again
        )  # fmt: skip
        scores = tuple(_score(task, results, rules.limit, files) for task in loaded)
        mean, mean_stderr = _mean(scores)
        return ZeroShot(
            tasks=scores,
            mean=mean,
            mean_stderr=mean_stderr,
            truncated=lm.truncated,
            limit=rules.limit,
            seq_len=length,
            batch_size=rules.batch_size,
            parameters=network.num_parameters(),
            lm_eval=harness.lm_eval_version(),
            seconds=time.perf_counter() - began,
        )


def check_tasks(
    tasks: str | Sequence[str], tasks_data: str | Path | None = None
) -> tuple[tuple[str, ...], dict[str, Path] | None]:
    """Resolve names of tasks, each once, and their local files; None for data of the hub."""
    requested = tasks.split(",") if isinstance(tasks, str) else tasks
    names: dict[str, None] = {}
    for name in filter(None, (name.strip() for name in requested)):
        names |= dict.fromkeys(PAPER_METRICS if name == SEVEN else [name])
    if not names:
        raise OptionError("no task is named: give 'seven', or names of lm-eval's tasks")
    harness.lm_eval_version()
    files = None if tasks_data is None else harness.local_files(tuple(names), Path(tasks_data))
    harness.check_names(tuple(names))
    return tuple(names), files


def _score(
    task: Any, results: JsonDict, limit: int | None, files: dict[str, Path] | None
) -> TaskScore:
    name = task.task_name
    # lm-eval names a metric "acc,none": metric and filter.
    numbers = {
        key.removesuffix(",none"): float(value)
        for key, value in results["results"][name].items()
        if "," in key and isinstance(value, int | float)
    }
    fields = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    metric = PAPER_METRICS.get(name) or next((m for m in ("acc_norm", "acc") if m in numbers), None)
    return TaskScore(
        task=name,
        version=str(results["versions"][name]),
        items=results["n-samples"][name]["effective"],
        metric=metric,
        value=numbers.get(metric or ""),
        stderr=numbers.get(f"{metric}_stderr"),
        **{key: numbers.get(key) for key in fields},
        chance=_chance(task, limit),
        other={key: value for key, value in numbers.items() if key not in fields},
        data="hub" if files is None else sha256(files[name]),
    )


def _chance(task: Any, limit: int | None) -> float | None:
    """Return the expected score of guessing at random; None unless the task is multiple choice."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    items = [item for _, item in task.doc_iterator(limit=limit)]
    return sum(1 / len(task.doc_to_choice(item)) for item in items) / len(items)


def _mean(scores: Sequence[TaskScore]) -> tuple[float | None, float | None]:
    """Mean of the paper's metrics, and its standard error."""
    values = [score.value for score in scores if score.value is not None]
    errors = [score.stderr for score in scores if score.stderr is not None]
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(errors) < len(values):
        return mean, None
    # Tasks are independent: variances of their scores add up.
    return mean, math.sqrt(sum(error**2 for error in errors)) / len(values)
