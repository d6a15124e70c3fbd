"""`coec eval`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli.common import (
    NAME,
    PATH,
    TEXT,
    WHOLE,
    Device,
    Dtype,
    Json,
    TrustRemoteCode,
    argument,
    given,
    notes,
    quieten,
    results,
    setting,
    switch,
)
from coec.cli.progress import Quiet, showing_progress
from coec.cli.spelling import flag_of
from coec.errors import CoecError, OptionError

if TYPE_CHECKING:
    from coec.evaluation.perplexity import Perplexity
    from coec.evaluation.zero_shot import ZeroShot

TASKS = "Zero-shot tasks"


def eval_command(
    model: Annotated[str, argument("Model folder or hub name.", "MODEL")],
    *,
    text: Annotated[
        str | None,
        setting(
            "wikitext2; c4 (validation); hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (its test split); "
            "a file as in `coec prune`; or self (text sampled from the baseline). Default: "
            "wikitext2; with --tasks none, and perplexity is measured only if a text is named.",
            TEXT,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        setting(
            "Tokens per window; with --tasks, the most tokens of a request. Default: 4096, or the "
            "model's maximum if less; of tasks, the model's maximum.",
            WHOLE,
        ),
    ] = None,
    max_windows: Annotated[
        int | None, setting("Evaluate the first so many windows. Default: all.", WHOLE)
    ] = None,
    baseline: Annotated[
        str | None,
        setting(
            "The dense model: adds the perplexity ratio, KL divergence and agreement (the share of "
            "tokens with the same most probable next one).",
            "MODEL",
        ),
    ] = None,
    samples: Annotated[
        int | None, setting("Windows to sample, for --text self. Default: 64.", WHOLE)
    ] = None,
    seed: Annotated[
        int | None, setting("Of the sampled text, for --text self. Default: 1.", WHOLE)
    ] = None,
    text_column: Annotated[
        str | None,
        setting("Column of a jsonl or parquet file, or of a hub: data set. Default: text.", TEXT),
    ] = None,
    tasks: Annotated[
        str | None,
        setting(
            "seven (boolq, rte, winogrande, hellaswag, arc_easy, arc_challenge, openbookqa), or "
            "names of lm-evaluation-harness tasks, separated by commas.",
            "NAMES",
            rich_help_panel=TASKS,
        ),
    ] = None,
    tasks_data: Annotated[
        Path | None,
        setting(
            "Folder of <task>.jsonl files in the schema of the tasks' hub data sets. Default: the "
            "hub.",
            PATH,
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        setting("The first N items of each task. Default: all.", WHOLE, rich_help_panel=TASKS),
    ] = None,
    batch_size: Annotated[
        int | None, setting("Requests per forward pass. Default: 8.", WHOLE, rich_help_panel=TASKS)
    ] = None,
    device: Device = None,
    dtype: Annotated[
        Dtype | None,
        setting(
            "Of the forward pass: float64, float32, bfloat16 or float16. Default: the model's on "
            "a GPU, float32 on the CPU.",
            NAME,
        ),
    ] = None,
    add_to_card: Annotated[
        bool,
        switch(
            "--add-to-card",
            "Write the perplexity into the model card (README.md) of MODEL, a folder that coec "
            "wrote; no other file changes.",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure token perplexity of MODEL, its distance from a baseline, and zero-shot accuracy."""
    for_tasks = given({"tasks_data": tasks_data, "limit": limit, "batch_size": batch_size})
    for_text = given(
        {"baseline": baseline, "max_windows": max_windows, "samples": samples, "seed": seed,
         "text_column": text_column}
    )  # fmt: skip
    _refuse_unheard(text, tasks, for_text, for_tasks)
    if add_to_card:
        _check_card(model, text, tasks)
    common: dict[str, Any] = given({"seq_len": seq_len, "device": device, "dtype": dtype})
    common["trust_remote_code"] = trust_remote_code
    if tasks is None or text is not None:
        for_text["text"] = text or "wikitext2"
    quieten()
    with showing_progress(quiet) as advance:
        common["progress"] = advance
        result, scores, failure = _measured(model, for_text, tasks, for_tasks, common)
    if add_to_card and result is not None:
        from coec.pipeline import card as card

        card.add_to_card(Path(model), result)
    if result is not None and result.same_text_as_calibration:
        notes.print("note: evaluated on the text it was calibrated on")
    if as_json and (result or scores):
        print(json.dumps(_record(result, scores, with_tasks=tasks is not None)))
    elif result is not None:
        _show_perplexity(result)
    if scores is not None and not as_json:
        _show_tasks(scores)
    if failure is not None:
        raise failure


def _refuse_unheard(
    text: str | None, tasks: str | None, for_text: dict[str, Any], for_tasks: dict[str, Any]
) -> None:
    """Wrong usage: a flag of something that is not measured."""
    if tasks is None and for_tasks:
        raise typer.BadParameter(
            f"{flag_of(next(iter(for_tasks)))} belongs to --tasks, which is not given"
        )
    if tasks is not None and text is None and for_text:
        raise typer.BadParameter(
            f"{flag_of(next(iter(for_text)))} belongs to perplexity: with --tasks, give --text too"
        )
    sampled = text == "self"
    for name in ("max_windows", "text_column") if sampled else ("samples", "seed"):
        if name in for_text:
            raise typer.BadParameter(
                f"{flag_of(name)} belongs to "
                + (
                    "text that is read: with --text self, give --samples"
                    if sampled
                    else "--text self"
                )
            )


def _check_card(model: str, text: str | None, tasks: str | None) -> None:
    """Refuses what has no card of ours, before anything is measured."""
    from coec.pipeline.report import REPORT

    if tasks is not None and text is None:
        raise typer.BadParameter("--add-to-card adds a perplexity: with --tasks, give --text too")
    if not (Path(model) / REPORT).is_file():
        raise OptionError(
            f"--add-to-card writes into the card of a folder that coec made, and '{model}' has no "
            f"{REPORT}: leave it out"
        )


def _measured(
    model: str,
    for_text: dict[str, Any],
    tasks: str | None,
    for_tasks: dict[str, Any],
    common: dict[str, Any],
) -> tuple["Perplexity | None", "ZeroShot | None", CoecError | None]:
    """Perplexity where there are settings for it, and scores where tasks are named.

    What ends the tasks comes back beside the perplexity, which may have taken hours.
    """
    from coec.evaluation import perplexity, zero_shot

    if tasks is None:
        return perplexity.perplexity(model, **for_text, **common), None, None
    # The tasks' data are read before the perplexity is measured, which may take its time.
    with zero_shot.prepared(model, tasks, **for_tasks, **common) as measure:
        result = perplexity.perplexity(model, **for_text, **common) if for_text else None
        try:
            return result, measure(), None
        except CoecError as error:
            return result, None, error


def _record(
    result: "Perplexity | None", scores: "ZeroShot | None", *, with_tasks: bool
) -> dict[str, Any]:
    """One object: of perplexity alone, or with a part for each."""
    if not with_tasks and result is not None:
        return result.as_dict()
    parts = {"perplexity": result, "zero_shot": scores}
    return {name: part.as_dict() for name, part in parts.items() if part is not None}


def _show_perplexity(result: "Perplexity") -> None:
    for name, value in result.as_dict().items():
        if value is not None and not isinstance(value, bool):
            shown = f"{value:,}" if isinstance(value, int) else value
            shown = f"{value:.4f}" if isinstance(value, float) else shown
            results.print(f"{name.replace('_', ' '):<20} {shown}", markup=False)


def _show_tasks(scores: "ZeroShot") -> None:
    """A row per task, the paper's metric in bold, then what the numbers do not say."""
    from rich.table import Table

    table = Table("task", "items", "acc", "acc_norm", "guessing", box=None, header_style="bold")
    for score in scores.tasks:
        cells = {"acc": _shown(score.acc, score.acc_stderr)}
        cells["acc_norm"] = _shown(score.acc_norm, score.acc_norm_stderr)
        if score.metric in cells:
            cells[score.metric] = f"[bold]{cells[score.metric]}[/bold]"
        table.add_row(score.task, f"{score.items:,}", *cells.values(), _shown(score.guessing))
    results.print(table)
    for score in scores.tasks:
        for name, value in score.other.items():
            results.print(f"{score.task}: {name} {value:.4f}", markup=False)
    if scores.mean is not None:
        mean = _shown(scores.mean, scores.mean_stderr)
        results.print(f"\nmean of the metrics in bold: {mean}", markup=False)
    if scores.mean_at_chance:
        results.print("these scores are at chance: they say nothing about this model")
    elif scores.at_chance:
        results.print(f"at chance: {', '.join(scores.at_chance)}", markup=False)
    if scores.truncated:
        results.print(
            f"{scores.truncated:,} requests were longer than {scores.seq_len} tokens and lost "
            "their beginning",
            markup=False,
        )


def _shown(value: float | None, stderr: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if stderr is None else f"{value:.4f} ± {stderr:.4f}"
