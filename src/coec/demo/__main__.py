"""Demo: the bundled model pruned by every compensation on the same kept units, and by two presets.

There is no data here: calibration and evaluation text are sampled from the dense model, with
different seeds, so perplexities compare methods and are no WikiText numbers.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from coec import CoecError
from coec.cli.common import quieten, results, showing_progress, table
from coec.evaluation import perplexity
from coec.pruning import prune
from coec.streams.self_text import sample_from_model
from coec.text.tokens import load_tokenizer

MODEL = Path(__file__).parent / "model"
METHODS: dict[str, dict[str, Any]] = {
    name: {"preset": "paper", "compensation": name}
    for name in ("none", "bias", "least-squares", "rcpu", "coec")
}
PRESETS: dict[str, dict[str, Any]] = {name: {"preset": name} for name in ("fast", "balanced")}
SPARSITY = 0.3
WINDOWS, SEQ_LEN = 32, 256
CALIBRATION_SEED, EVALUATION_SEED = 0, 1
PROMPT = "The film was released in"
HEADS = ("", "perplexity", "KL to dense", "same token", "parameters", "seconds")


def run(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("demo-output"),
) -> None:
    """Prune the bundled model seven ways, and compare the results."""
    quieten()
    results.print(
        f"A trained Llama of 3 M parameters; {SPARSITY:.0%} of its MLP channels are removed.\n"
        "Calibration and evaluation text: sampled from the dense model (two seeds).\n"
    )
    calibration, text = (_sampled(seed) for seed in (CALIBRATION_SEED, EVALUATION_SEED))
    settings: dict[str, Any] = {
        "sparsity": SPARSITY, "calibration": calibration, "samples": WINDOWS, "seq_len": SEQ_LEN,
    }  # fmt: skip
    rows: list[tuple[str, ...]] = []
    with showing_progress() as advance:
        for method, changes in (METHODS | PRESETS).items():
            report = prune(MODEL, out / method, force=True, **settings | changes)
            score = perplexity(out / method, text, baseline=MODEL, seq_len=SEQ_LEN)
            if not rows:
                dense = f"{score.baseline_perplexity:.2f}"
                before = f"{report.plan['parameters']['before']:,}"
                rows.append(("(dense)", dense, "0", "100 %", before, ""))
            rows.append((
                method, f"{score.perplexity:.2f}", f"{score.kl:.4f}",
                f"{100 * (score.agreement or 0):.1f} %", f"{score.parameters:,}",
                f"{sum(report.seconds.values()):.1f}",
            ))  # fmt: skip
            advance("models", len(rows) - 1, len(METHODS | PRESETS))
    results.print("five compensations on the same kept units, and two presets")
    results.print(table(HEADS, rows))
    results.print(
        f"\nbalanced, loaded by transformers, continues:\n  {_continued(out / 'balanced')}"
    )
    results.print(f"\ncheckpoints: {out}/* (stock transformers loads them; see their README.md)")


def _sampled(seed: int) -> torch.Tensor:
    """Sample windows from the dense model, as `--calibration self` does."""
    dense: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    sampled = sample_from_model(
        dense.eval(), load_tokenizer(MODEL), samples=WINDOWS, seq_len=SEQ_LEN, seed=seed
    )
    return sampled.ids


def _continued(folder: Path) -> str:
    """Load a written checkpoint as any user would, and let it continue the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    ids = model.generate(**prompt, max_new_tokens=40, do_sample=True, top_k=20, pad_token_id=0)
    return " ".join(str(tokenizer.decode(ids[0], skip_special_tokens=True)).split())


if __name__ == "__main__":
    try:
        typer.run(run)
    except CoecError as error:
        print(f"coec: {error}", file=sys.stderr)
        sys.exit(1)
