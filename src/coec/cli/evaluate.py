"""`coec eval`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coec.cli.common import Dtype, Json, notes, progress_bars, results, setting
from coec.evaluation.perplexity import Perplexity, perplexity
from coec.evaluation.zero_shot import ZeroShot, check_tasks, zero_shot

TASKS = "Zero-shot tasks"


def eval_command(
    model: Annotated[str, typer.Argument(help="Model folder or hub name.")],
    *,
    text: Annotated[
        str | None,
        setting(
            "wikitext2; c4 (validation); hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (its test split); "
            "a file as in `coec prune`; or self (text sampled from the baseline). Default: "
            "wikitext2; with --tasks none, and perplexity is measured only if a text is named."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        setting(
            "Tokens per window; with --tasks, the most tokens of a request. Default: 4096, or the "
            "model's maximum if less; of tasks, the model's maximum."
        ),
    ] = None,
    max_windows: Annotated[
        int | None, setting("Evaluate the first so many windows. Default: all.")
    ] = None,
    baseline: Annotated[
        str | None, setting("The dense model: adds KL divergence and the perplexity ratio.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Windows to sample, for --text self.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the sampled text, for --text self.")] = 1,
    text_column: Annotated[
        str, typer.Option(help="Column of a jsonl or parquet file, or of a hub: data set.")
    ] = "text",
    tasks: Annotated[
        str | None,
        setting(
            "seven (boolq, rte, winogrande, hellaswag, arc_easy, arc_challenge, openbookqa), or "
            "names of lm-evaluation-harness tasks, separated by commas.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    tasks_data: Annotated[
        Path | None,
        setting(
            "Folder of <task>.jsonl files in the schema of the tasks' hub data sets. Default: the "
            "hub.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: Annotated[
        int | None, setting("The first N items of each task. Default: all.", rich_help_panel=TASKS)
    ] = None,
    batch_size: Annotated[
        int | None, setting("Requests per forward pass. Default: 8.", rich_help_panel=TASKS)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    dtype: Annotated[
        Dtype | None,
        setting("Of the forward pass. Default: the model's on a GPU, float32 on the CPU."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure token perplexity of MODEL, its distance from a baseline, and zero-shot accuracy."""
    for_tasks = {"tasks_data": tasks_data, "limit": limit, "batch_size": batch_size}
    given: dict[str, Any] = {name: value for name, value in for_tasks.items() if value is not None}
    if tasks is None and given:
        flag = next(iter(given)).replace("_", "-")
        raise typer.BadParameter(f"--{flag} belongs to --tasks, which is not given")
    for_text = {"baseline": baseline, "max-windows": max_windows}
    unheard = [name for name, value in for_text.items() if value is not None]
    if tasks is not None and text is None and unheard:
        raise typer.BadParameter(
            f"--{unheard[0]} belongs to perplexity: with --tasks, give --text too"
        )
    with progress_bars() as advance:
        common: Any = {"seq_len": seq_len, "device": device, "dtype": dtype, "progress": advance}
        if tasks is not None:  # before the perplexity is measured, which may take its time
            check_tasks(tasks, tasks_data)
        result = None
        if tasks is None or text is not None:
            result = perplexity(
                model, text or "wikitext2", max_windows=max_windows, baseline=baseline,
                samples=samples, seed=seed, text_column=text_column, **common,
            )  # fmt: skip
        scores = None if tasks is None else zero_shot(model, tasks, **given, **common)
    if result is not None and result.same_text_as_calibration:
        notes.print("note: evaluated on the text it was calibrated on")
    if as_json:
        print(json.dumps(_record(result, scores)))
        return
    if result is not None:
        _show_perplexity(result)
    if scores is not None:
        _show_tasks(scores)


def _record(result: Perplexity | None, scores: ZeroShot | None) -> dict[str, Any]:
    if scores is None:
        assert result is not None
        return result.as_dict()
    measured = {} if result is None else {"perplexity": result.as_dict()}
    return {**measured, "zero_shot": scores.as_dict()}


def _show_perplexity(result: Perplexity) -> None:
    for name, value in result.as_dict().items():
        if value is not None and not isinstance(value, bool):
            shown = f"{value:,}" if isinstance(value, int) else value
            shown = f"{value:.4f}" if isinstance(value, float) else shown
            results.print(f"{name.replace('_', ' '):<20} {shown}", markup=False)


def _show_tasks(scores: ZeroShot) -> None:
    """A row per task, the paper's metric in bold, then what the numbers do not say."""
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
