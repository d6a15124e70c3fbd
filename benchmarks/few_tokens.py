"""Every preset with few calibration tokens, against the same units without compensation.

    python -m benchmarks.few_tokens [--models first-8] [--presets fast] [--tokens 64]

30 % is removed, on windows of 64 tokens. Three small trained models are measured by the mean KL of
the dense model's predictions from the pruned model's, in nats per token of their test text; the
first eight blocks of the real model by the mean of ‖h − h̃‖² / ‖h‖² over tokens, h the hidden state
after the last block. `none` is the same number of the same units, sliced. Rows are kept in
benchmarks/results/few_tokens.json; `ratio` is to stay below 1.02.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from benchmarks.real import Size, evaluation_ids
from benchmarks.real_model import first_blocks

STORIES = "tinystories", "train.txt", "test.txt"
WIKI = "wikitext-2", "valid.raw.txt", "test.raw.txt"
TEXTS = {"stories260K": STORIES, "babyllama-1M": STORIES, "wt2-llama": WIKI, "first-8": WIKI}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "fast": {},
    "balanced": {},
}
TOKENS = (64, 256, 1024, 4096, 16384)
LENGTH, BOUND = 64, 1.02


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--settings", type=json.loads, default={}, help="added to every preset's")
    parser.add_argument("--shared", type=Path, default=SHARED)
    chosen = parser.parse_args(arguments)
    rows = record.load("few_tokens").get("rows", [])
    cases = product(chosen.models, chosen.presets, chosen.seeds, chosen.tokens)
    for model, preset, seed, tokens in cases:
        added = f" {json.dumps(chosen.settings)}" if chosen.settings else ""
        key = f"{model} {preset} {seed} {tokens}{added}"
        if any(row["key"] == key for row in rows):
            continue
        settings = PRESETS[preset] | chosen.settings | {"preset": preset}
        row = {"key": key} | measured(model, chosen.shared, tokens, seed, settings)
        print(f"{key:<32}{row['none']:>9.4f}{row['error']:>9.4f}{row['ratio']:>8.3f}", flush=True)
        rows = record.merged(rows, [row], "key")
        record.save("few_tokens", arguments, {"rows": rows})
    over = [row["key"] for row in rows if row["ratio"] > BOUND]
    print(f"{len(rows)} rows, {len(over)} above {BOUND}: {', '.join(over)}")


def measured(
    model: str, shared: Path, tokens: int, seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the error of a preset and of its units without compensation."""
    dense, error = judge(model, shared)
    folder, calibration, _ = TEXTS[model]
    windows: dict[str, Any] = {
        "sparsity": 0.3, "calibration": shared / "data" / folder / calibration,
        "samples": tokens // LENGTH, "seq_len": LENGTH, "seed": seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        pruned, sliced = Path(work) / "pruned", Path(work) / "sliced"
        coec.prune(dense, pruned, **windows, **settings)
        plain: dict[str, Any] = {"preset": "paper", "compensation": "none", "kept": pruned}
        coec.prune(dense, sliced, **windows, **plain)
        found, none = error(pruned), error(sliced)
    return {"error": found, "none": none, "ratio": found / none}


@cache
def judge(model: str, shared: Path) -> tuple[Path, Callable[[Path], float]]:
    """Return the folder of a dense model, and what measures a pruned one."""
    folder, _, test = TEXTS[model]
    states = model == "first-8"
    dense = first_blocks(8) if states else shared / "models" / model
    size = Size(0, 512, windows=4) if states else Size(0, 256, windows=64)
    ids = evaluation_ids(dense, size, shared / "data" / folder / test)
    theirs = _outputs(dense, ids, states=states)

    def error(pruned: Path) -> float:
        ours = _outputs(pruned, ids, states=states)
        if states:
            squares = (theirs - ours).square().sum(-1) / theirs.square().sum(-1)
            return float(squares.double().mean())
        log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
        return float((log_p.exp() * (log_p - log_q)).sum(-1).double().mean())

    return dense, error


@torch.no_grad()
def _outputs(folder: Path, ids: Tensor, *, states: bool) -> Tensor:
    """Return the logits of every token, or the hidden states before the final norm."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if states:
        network.model.norm, network.lm_head = torch.nn.Identity(), torch.nn.Identity()
    return torch.cat([network(input_ids=batch, use_cache=False).logits for batch in ids.split(8)])


if __name__ == "__main__":
    main()
