"""`coec eval`."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli import common
from coec.cli.common import CommandFlag, Values, argument, flag_of, given
from coec.cli.progress import showing_progress
from coec.errors import CoecError
from coec.evaluation.settings import Measurement, TaskEvaluation, TextEvaluation
from coec.settings import Setting

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coec.evaluation.perplexity import Perplexity
    from coec.evaluation.zero_shot import ZeroShot


def _own(settings: type[Measurement]) -> tuple[Setting, ...]:
    """Settings that are flags of one of the two measurements; nobody needs another split."""
    return tuple(
        row for row in settings.table() if row not in Measurement.table() and row.name != "split"
    )


_TEXT = CommandFlag(
    "text", str,
    "wikitext2; c4 (validation); hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (its test split); a file "
    "as in `coec prune`; or self (text sampled from the baseline). Default: wikitext2; with "
    "--tasks none, and perplexity is measured only if a text is named.",
)  # fmt: skip
_BASELINE = CommandFlag(
    "baseline", str,
    "The dense model: adds the perplexity ratio, KL divergence and agreement (the share of "
    "tokens with the same most probable next one).", metavar="MODEL",
)  # fmt: skip
_PANEL = "Zero-shot tasks"
_TASKS = CommandFlag(
    "tasks", str,
    "seven (boolq, rte, winogrande, hellaswag, arc_easy, arc_challenge, openbookqa), or names of "
    "lm-evaluation-harness tasks, separated by commas.", _PANEL, "NAMES",
)  # fmt: skip
_OF_BOTH = Measurement.table()
_OF_TEXT: tuple[common.Option, ...] = (_BASELINE, *_own(TextEvaluation))
_OF_TASKS = [CommandFlag.of(row)._replace(panel=_PANEL) for row in _own(TaskEvaluation)]


@common.with_flags(
    _TEXT, *_OF_TEXT, _TASKS, *_OF_TASKS, *_OF_BOTH,
    common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip
def eval_command(
    model: Annotated[str, argument("Model folder or hub name.", "MODEL")], **flags: Any
) -> None:
    """Measure token perplexity of MODEL, its distance from a baseline, and zero-shot accuracy."""
    text, tasks = flags["text"], flags["tasks"]
    for_tasks, for_text = given(flags, _OF_TASKS), given(flags, _OF_TEXT)
    _refuse_unheard(text, tasks, for_text, for_tasks)
    # Flags → arguments of perplexity, of the tasks, and of both
    for_both = given(flags, (*_OF_BOTH, common.TRUST_REMOTE_CODE))
    if tasks is None or text is not None:
        for_text["text"] = text or "wikitext2"
    common.quieten()
    with showing_progress(flags["quiet"]) as advance:
        for_both["progress"] = advance
        result, scores, failure = _measure(model, for_text, tasks, for_tasks, for_both)
    if result is not None and result.same_text_as_calibration:
        common.notes.print("note: evaluated on the text it was calibrated on")
    measures = {"perplexity": result, "zero_shot": scores}
    record = {name: measure.as_dict() for name, measure in measures.items() if measure}
    if record:
        lines = itertools.chain(_of_perplexity(result), _of_tasks(scores))
        common.show(record if tasks else record["perplexity"], lines, flags["json"])
    if failure is not None:
        raise failure


def _refuse_unheard(
    text: str | None, tasks: str | None, for_text: Values, for_tasks: Values
) -> None:
    """Raise BadParameter for a flag of something that is not measured."""
    # What is measured decides which flags have nobody to hear them.
    if tasks is not None and text is None:
        refused = dict.fromkeys(for_text, "perplexity: with --tasks, give --text too")
    elif text == "self":
        owner = "text that is read: with --text self, give --samples"
        refused = dict.fromkeys(("max_windows", "text_column", "bos"), owner)
    else:
        refused = dict.fromkeys(("samples", "seed"), "--text self")
    if tasks is None:
        refused = dict.fromkeys(for_tasks, "--tasks, which is not given") | refused
    for name in refused:
        if name in {**for_tasks, **for_text}:
            raise typer.BadParameter(f"{flag_of(name)} belongs to {refused[name]}")


def _measure(
    model: str, for_text: Values, tasks: str | None, for_tasks: Values, for_both: Values
) -> tuple["Perplexity | None", "ZeroShot | None", CoecError | None]:
    """Measure perplexity where there are settings for it, and scores where tasks are named.

    An error that ends the tasks is returned beside the perplexity, which may have taken hours.
    """
    from coec.evaluation import perplexity, zero_shot

    result: Perplexity | None = None

    def measure_perplexity() -> None:
        nonlocal result
        if for_text:
            result = perplexity.perplexity(model, **for_text, **for_both)

    # Perplexity is measured when the tasks are known to be usable, and before they run.
    if tasks is None:
        measure_perplexity()
        return result, None, None
    try:
        options = {**for_tasks, **for_both, "first": measure_perplexity}
        scores = zero_shot.zero_shot(model, tasks, **options)
    except CoecError as error:
        if result is None:
            raise
        return result, None, error
    return result, scores, None


def _of_perplexity(result: "Perplexity | None") -> Iterator[str]:
    if result is None:
        return
    for name, value in result.as_dict().items():
        if value is not None and not isinstance(value, bool):
            text = f"{value:,}" if isinstance(value, int) else value
            text = f"{value:.4f}" if isinstance(value, float) else text
            yield f"{name.replace('_', ' '):<20} {text}"
    if result.bos:
        yield "every window begins with the tokenizer's start (bos)"


def _of_tasks(scores: "ZeroShot | None") -> Iterator["RenderableType"]:
    """Yield a row per task, the paper's metric in bold, then what the numbers do not say."""
    from rich.text import Text

    if scores is None:
        return
    rows = []
    for score in scores.tasks:
        cells: dict[str, str | Text] = {
            "acc": _number(score.acc, score.acc_stderr),
            "acc_norm": _number(score.acc_norm, score.acc_norm_stderr),
        }
        if score.metric in cells:
            cells[score.metric] = Text(str(cells[score.metric]), style="bold")
        rows.append((score.task, f"{score.items:,}", *cells.values(), _number(score.chance)))
    yield common.table(("task", "items", "acc", "acc_norm", "chance"), rows)
    for score in scores.tasks:
        yield from (f"{score.task}: {name} {value:.4f}" for name, value in score.other.items())
    if scores.mean is not None:
        yield f"\nmean of the metrics in bold: {_number(scores.mean, scores.mean_stderr)}"
    if scores.truncated:
        yield (
            f"{scores.truncated:,} requests were longer than {scores.seq_len} tokens and lost "
            "their beginning"
        )


def _number(value: float | None, stderr: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if stderr is None else f"{value:.4f} ± {stderr:.4f}"
