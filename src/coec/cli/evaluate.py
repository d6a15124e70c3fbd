"""`coec eval`."""

import json
from typing import Annotated

import typer

from coec.cli.common import Dtype, Json, progress_bars, results, setting
from coec.evaluation.perplexity import perplexity


def eval_command(
    model: Annotated[str, typer.Argument(help="Model folder or hub name.")],
    *,
    text: Annotated[
        str,
        typer.Option(
            help="wikitext2; a file as in `coec prune`; or self (text sampled from the baseline)."
        ),
    ] = "wikitext2",
    seq_len: Annotated[
        int | None, setting("Tokens per window. Default: 4096, or the model's maximum if less.")
    ] = None,
    max_windows: Annotated[
        int | None, setting("Evaluate the first so many windows. Default: all.")
    ] = None,
    baseline: Annotated[
        str | None, setting("The dense model: adds KL divergence and the perplexity ratio.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Windows to sample, for --text self.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the sampled text, for --text self.")] = 1,
    text_column: Annotated[str, typer.Option(help="Column of a jsonl or parquet file.")] = "text",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    dtype: Annotated[
        Dtype | None,
        setting("Of the forward pass. Default: the model's on a GPU, float32 on the CPU."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure token perplexity of MODEL, and with a baseline its distance from the dense model."""
    with progress_bars() as advance:
        result = perplexity(
            model, text, seq_len=seq_len, max_windows=max_windows, baseline=baseline,
            samples=samples, seed=seed, text_column=text_column, device=device, dtype=dtype,
            progress=advance,
        )  # fmt: skip
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    for name, value in result.as_dict().items():
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int) else value
            shown = f"{value:.4f}" if isinstance(value, float) else shown
            results.print(f"{name.replace('_', ' '):<20} {shown}", markup=False)
