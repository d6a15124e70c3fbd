"""Perplexity after pruning, by repair, on small trained models: the claims of docs/LOG.md.

    python benchmarks/quality.py [--sparsity 0.1 0.3] [--models stories260K] [--selections rcpu]

Calibration: 64 windows of 256 tokens; evaluation: the whole test text in windows of 256 tokens.
share(x) = (ppl none − ppl x) / (ppl none − ppl dense): how much of the damage a repair undoes.
"""

import argparse
import platform
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

import coec

TEXTS = {
    "stories260K": ("tinystories/train.txt", "tinystories/test.txt"),
    "babyllama-1M": ("tinystories/train.txt", "tinystories/test.txt"),
    "wt2-llama": ("wikitext-2/valid.raw.txt", "wikitext-2/test.raw.txt"),
}
REPAIRS: dict[str, dict[str, Any]] = {
    "none": {"compensation": "none"},
    "bias": {"compensation": "bias"},
    "least-squares": {"compensation": "least-squares"},
    "ridge-to-slice": {"compensation": "ridge-to-slice"},
    "rcpu": {"compensation": "rcpu"},
    "coec gradient": {"compensation": "coec", "solver": "gradient"},
    "coec conjugate": {"compensation": "coec", "solver": "conjugate"},
    "coec": {"compensation": "coec"},
}
SEQ_LEN, SAMPLES = 256, 64


def main() -> None:
    """Prints one table per model and selection, shares, and their ratio to RCPU's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--models", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--selections", nargs="+", default=["wanda-sp", "rcpu"])
    parser.add_argument("--repairs", nargs="+", choices=REPAIRS, default=list(REPAIRS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.3])
    chosen = parser.parse_args()
    if not chosen.shared.is_dir():
        sys.exit(f"quality.py: no folder '{chosen.shared}' with models/ and data/; pass --shared")
    transformers.utils.logging.disable_progress_bar()
    print(f"coec {coec.__version__}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, Python {platform.python_version()}, "
          f"{torch.get_num_threads()} threads, seed 0")  # fmt: skip
    for model, selection, sparsity in product(chosen.models, chosen.selections, chosen.sparsity):
        measure(chosen.shared, model, selection, chosen.repairs, sparsity)


def measure(shared: Path, model: str, selection: str, repairs: list[str], sparsity: float) -> None:
    """All repairs of one model under one selection."""
    calibration, test = (str(shared / "data" / text) for text in TEXTS[model])
    dense_folder = shared / "models" / model
    dense = coec.perplexity(dense_folder, test, seq_len=SEQ_LEN).perplexity
    print(f"\n### {model}, {selection}, {sparsity:.0%}, dense perplexity {dense:.3f}\n")
    print(
        "| repair | perplexity | share | share / rcpu's | error attention | error mlp | solving s |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for pruning in repairs:
            report = coec.prune(
                dense_folder, Path(folder) / pruning.replace(" ", "-"), preset="paper",
                sparsity=sparsity, selection=selection, calibration=calibration, samples=SAMPLES,
                seq_len=SEQ_LEN, **REPAIRS[pruning],
            )  # fmt: skip
            ppl = coec.perplexity(report.out, test, seq_len=SEQ_LEN).perplexity
            rows[pruning] = (ppl, report)
    none = rows["none"][0] if "none" in rows else float("nan")
    shares = {name: (none - row[0]) / (none - dense) for name, row in rows.items()}
    for name, (ppl, report) in rows.items():
        ratio = shares[name] / shares["rcpu"] if "rcpu" in shares else float("nan")
        errors = [report.mean_errors(site)[1] for site in ("attention", "mlp")]
        solving = report.seconds["solving"]
        print(f"| {name} | {ppl:.3f} | {shares[name]:.3f} | {ratio:.2f} "
              f"| {errors[0]:.4f} | {errors[1]:.4f} | {solving:.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
