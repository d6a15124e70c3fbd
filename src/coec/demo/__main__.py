"""Demo: the bundled model with every compensation on the same kept units, and preset `best`.

There is no data here: calibration and evaluation text are sampled from the dense model itself,
under different seeds, so perplexities compare methods and are no WikiText numbers.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from coec import CoecError
from coec.allocation.kept import KEPT
from coec.calibration.tokens import load_tokenizer
from coec.cli.common import quieten, results, table
from coec.cli.progress import showing_progress
from coec.demo.plot import draw
from coec.errors import check_installed
from coec.evaluation.perplexity import Perplexity, perplexity
from coec.pipeline.collect import collect
from coec.pipeline.prune import prune
from coec.pipeline.report import Report
from coec.streaming.self_text import sample_from_model

MODEL = Path(__file__).parent / "model"
METHODS = ("none", "bias", "least-squares", "rcpu", "coec")
BEST: dict[str, Any] = {
    "preset": "best", "reconstruct": 1, "prediction_passes": 1, "kv_groups": "uniform",
}  # fmt: skip
"""One pass, and the sizes of the other models."""
SPARSITY = 0.3
WINDOWS, SEQ_LEN = 32, 256
CALIBRATION_SEED, EVALUATION_SEED = 0, 1
PROMPT = "The film was released in"


def run(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints and the plot.")] = Path(
        "demo-output"
    ),
) -> None:
    """Run the demo: five compensations, `best`, a table, checkpoints, a continuation, a plot."""
    quieten()
    check_installed("the demo's picture", "'coec[demo]'", "matplotlib")  # before the work
    results.print(
        f"A trained Llama of 3 M parameters; {SPARSITY:.0%} of its MLP channels and KV groups go.\n"
        "Calibration and evaluation text: sampled from the dense model itself (two seeds).\n"
    )
    text = _evaluation_text()
    settings: dict[str, Any] = {
        "preset": "paper", "sparsity": SPARSITY, "calibration": "self", "samples": WINDOWS,
        "seq_len": SEQ_LEN, "seed": CALIBRATION_SEED,
    }  # fmt: skip
    reports: dict[str, Report] = {}
    scores: dict[str, Perplexity] = {}
    with showing_progress() as advance, tempfile.TemporaryDirectory() as scratch:
        statistics = collect(MODEL, Path(scratch) / "statistics", **settings).folder
        compensations = {name: {"compensation": name, "statistics": statistics} for name in METHODS}
        for method, changes in (compensations | {"best": BEST}).items():
            advance("models", len(scores), len(METHODS) + 1)
            reports[method] = prune(MODEL, out / method, force=True, **settings | changes)
            scores[method] = perplexity(out / method, text, baseline=MODEL, seq_len=SEQ_LEN)
        advance("models", len(scores), len(METHODS) + 1)
    _check_same_kept(out)
    _show(reports, scores)
    _continue_text(out / "best")
    picture = draw(reports, scores, out / "demo.png")
    results.print(f"\ncheckpoints {out}/*  (stock transformers loads them; see their README.md)")
    results.print(f"plot        {picture}")
    results.print(
        "\nbest is here in brief: blocks are trained in one pass, and the number of KV groups is\n"
        "not chosen; all of it: coec prune MODEL OUT --preset best"
    )


def _evaluation_text() -> torch.Tensor:
    """Sample the text of `coec eval --text self`, once for all compensations."""
    dense: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return sample_from_model(
        dense.eval(), load_tokenizer(MODEL), samples=WINDOWS, seq_len=SEQ_LEN, seed=EVALUATION_SEED
    ).ids


def _check_same_kept(out: Path) -> None:
    """Raises AssertionError unless all models kept the same units, as their comparison needs."""
    if len({(out / method / KEPT).read_bytes() for method in METHODS}) > 1:
        raise AssertionError(f"not all of {', '.join(METHODS)} kept the same units")


def _show(reports: dict[str, Report], scores: dict[str, Perplexity]) -> None:
    """Print what is left of the dense model's predictions after every compensation."""
    before = next(iter(reports.values())).plan["parameters"]["before"]
    dense = next(iter(scores.values())).baseline_perplexity or float("nan")
    rows = [("(dense)", f"{dense:.2f}", "0", "100 %", f"{before:,}", "")]
    for method, score in scores.items():
        rows.append((
            method, f"{score.perplexity:.2f}", f"{score.kl:.4f}",
            f"{100 * (score.agreement or 0):.1f} %", f"{score.parameters:,}",
            f"{sum(reports[method].seconds.values()):.1f}",
        ))  # fmt: skip
    results.print("\nfive compensations on the same kept units, and best")
    heads = ("compensation", "perplexity", "KL to dense", "same token", "parameters", "seconds")
    results.print(table(heads, rows))


def _continue_text(folder: Path) -> None:
    """Load the written checkpoint as any user would, and let it continue a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    ids = model.generate(**prompt, max_new_tokens=40, do_sample=True, top_k=20, pad_token_id=0)
    results.print("\nthe checkpoint of best, reloaded with AutoModelForCausalLM, continues:")
    text = str(tokenizer.decode(ids[0], skip_special_tokens=True))
    results.print(f"  {' '.join(text.split())}")


if __name__ == "__main__":
    try:
        typer.run(run)
    except CoecError as error:
        print(f"coec: {error}", file=sys.stderr)
        sys.exit(1)
