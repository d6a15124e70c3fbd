"""How far a block of the real model is from its floor, and `coec eval` and `coec recover` from
plain loops.

    python -m benchmarks.real_floor [--presets fast] [--blocks 2 6] [--windows 16] [--repeats 3]
        [--steps 8] [--wide]

The first blocks of SmolLM2-135M are pruned as in benchmarks.real, two numbers of them: the
difference is what blocks take, without loading, text and writing. The floor is the operations of
all products, attention, eigenpairs and SVDs as they are run, by dtype, over the measured rate of a
product in that dtype; elementwise work counts as nothing. Then the whole model's perplexity, by
`coec.perplexity` and by a loop over `model(ids).logits`, in turns, loading and text included. Then
the median step of a training, a window of 512 tokens, of the first blocks towards the dense ones:
by `coec.recover` and by a loop over `loss.backward(); optimizer.step()`. `--wide` prunes random
blocks of 896 × 4,864, as a model of half a billion parameters has them, on 48 windows of 512 random
tokens in float32. Rows are in benchmarks/results/real_floor.json; `--presets` without a name,
`--windows 0` and `--steps 0` leave out a part, and its last results stay.
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from benchmarks.meter import Counter
from benchmarks.real import SIZES, evaluation_ids
from benchmarks.real_model import first_blocks, folder

SIZE = SIZES["cpu"]
SAME = 1e-3
"""Relative difference of perplexities that bfloat16 leaves."""
_WIDE: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": SIZE.seq_len,
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def main(arguments: list[str] | None = None) -> None:
    """Measure both, save the rows, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--presets", nargs="*", default=["fast"])
    parser.add_argument("--blocks", nargs=2, type=int, default=[2, 6])
    parser.add_argument(
        "--windows", type=int, default=16, help="of 512 tokens that eval is timed on"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a training, 8 at least; 0: none")
    parser.add_argument("--wide", action="store_true", help="blocks of 4,864 channels as well")
    chosen = parser.parse_args(arguments)
    print(f"{record.header()}\n", flush=True)
    rates = {dtype: record.matmul_rate(dtype) for dtype in DTYPES}
    rows: list[dict[str, Any]] = []
    for preset, wide in itertools.product(
        chosen.presets, (False, True) if chosen.wide else (False,)
    ):
        few, more = (pruned(preset, count, rates, wide=wide) for count in chosen.blocks)
        between = chosen.blocks[1] - chosen.blocks[0]
        row = {name: (more[name] - few[name]) / between for name in few}
        rows.append({"preset": f"{preset}, 4,864 channels" if wide else preset, **row})
    evaluated = speeds(chosen.windows, chosen.repeats) if chosen.windows else None
    trained = training_steps(chosen.blocks[1], chosen.steps) if chosen.steps else None
    named = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}
    results = {"rates": named, "rows": rows, "eval": evaluated, "training": trained}
    kept = {name: record.load("real_floor").get(name) for name in results}  # of parts left out
    record.save("real_floor", arguments, {name: results[name] or kept[name] for name in results})
    print(", ".join(f"{name} {rate / 1e9:.0f} G/s" for name, rate in named.items()))
    lines = [
        [row["preset"], f"{row['operations'] / 1e9:,.0f} G", f"{row['floor']:.2f}",
         f"{row['seconds']:.2f}", f"{row['seconds'] / row['floor']:.2f}"]
        for row in rows
    ]  # fmt: skip
    print(record.table(["a block", "operations", "floor, s", "CPU s", "over the floor"], lines))
    if evaluated:
        print(
            f"eval, {evaluated['tokens']:,} tokens: {evaluated['coec']:.1f} s, a plain loop "
            f"{evaluated['plain']:.1f}: {evaluated['plain'] / evaluated['coec']:.3f} of its rate"
        )
    if trained:
        print(
            f"a step of training: {trained['coec']:.2f} s, of a plain loop {trained['plain']:.2f}: "
            f"{trained['plain'] / trained['coec']:.3f} of its rate"
        )


def pruned(
    preset: Any, count: int, rates: dict[torch.dtype, float], *, wide: bool = False
) -> dict[str, float]:
    """Return seconds, operations and their floor of pruning the first blocks, or `wide` ones."""
    with tempfile.TemporaryDirectory() as work:
        settings: dict[str, Any] = {"preset": preset, "sparsity": 0.3, "seq_len": SIZE.seq_len}
        if wide:
            model = random_blocks(count, Path(work) / "dense")
            ids = torch.randint(_WIDE["vocab_size"], (48, SIZE.seq_len))
            settings |= {"samples": 48, "calibration": ids, "forward_dtype": "float32"}
        else:
            model, text = first_blocks(count), SHARED / "data/wikitext-2/valid.raw.txt"
            settings |= {"samples": SIZE.samples, "calibration": str(text)}
            settings |= {"forward_dtype": "bfloat16"}
        counter, began = Counter(rates), record.clock()
        coec.prune(model, Path(work) / "timed", **settings)
        seconds = record.clock() - began
        with counter:
            coec.prune(model, Path(work) / "counted", **settings)
    return {"seconds": seconds, "operations": counter.operations, "floor": counter.floor}


def random_blocks(count: int, folder: Path) -> Path:
    """Write a model of random blocks of 896 × 4,864, and return its folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=count, **_WIDE)).save_pretrained(folder)
    return folder


def speeds(windows: int, repeats: int) -> dict[str, Any]:
    """Return the least seconds of both ways to a perplexity, which are the same."""
    model = folder()
    text = SHARED / "data/wikitext-2/test.raw.txt"
    best = {"coec": float("inf"), "plain": float("inf")}
    for _ in range(repeats):
        began = record.clock()
        result = coec.perplexity(
            model, text=str(text), seq_len=SIZE.seq_len, max_windows=windows, dtype="bfloat16"
        )
        between = record.clock()
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        ids = evaluation_ids(model, SIZE, text)[:windows]
        plain = _plain(network, ids)
        best["coec"] = min(best["coec"], between - began)
        best["plain"] = min(best["plain"], record.clock() - between)
    if abs(result.perplexity / plain - 1) > SAME:
        raise SystemExit(f"perplexity {result.perplexity:.4f}, by the loop {plain:.4f}")
    return {**best, "tokens": ids.numel(), "perplexity": result.perplexity}


@torch.no_grad()
def _plain(network: Any, ids: torch.Tensor) -> float:
    total = sum(
        float(F.cross_entropy(network(batch).logits[0, :-1].float(), batch[0, 1:], reduction="sum"))
        for batch in ids.split(1)
    )
    return float(torch.tensor(total / ids[:, 1:].numel()).exp())


def training_steps(blocks: int, steps: int) -> dict[str, float]:
    """Return the median CPU seconds of a step by both ways; the first, which sets up, is left out.

    A step by `coec.recover` ends with its progress; validation and saved states, every
    quarter of the steps, are no part of the median.
    """
    dense, text = first_blocks(blocks), str(SHARED / "data/wikitext-2/valid.raw.txt")
    ends: list[float] = []

    def note(phase: str, done: int, total: int) -> None:
        if phase == "training on tokens":
            ends.append(record.clock())

    with tempfile.TemporaryDirectory() as work:
        pruned = Path(work) / "pruned"
        coec.prune(
            dense, pruned, preset="paper", compensation="none", selection="magnitude", samples=2,
            seq_len=SIZE.seq_len, calibration=text, multiple_of=1,
        )  # fmt: skip
        coec.recover(
            dense, pruned, Path(work) / "trained", progress=note, text=text, batch_size=1,
            tokens=steps * SIZE.seq_len, seq_len=SIZE.seq_len, forward_dtype="bfloat16",
            learning_rate=1e-4, checkpointing=False,
        )  # fmt: skip
        plain = _plain_steps(dense, pruned, evaluation_ids(dense, SIZE, Path(text))[:steps])
    ours = [end - before for before, end in itertools.pairwise(ends)]
    return {"coec": statistics.median(ours), "plain": statistics.median(plain[1:])}


def _plain_steps(dense: Path, pruned: Path, ids: torch.Tensor) -> list[float]:
    teacher = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16).eval()
    student = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    seconds = []
    for batch in ids.split(1):
        began = record.clock()
        with torch.no_grad():
            log_p = teacher(batch, use_cache=False).logits.float().log_softmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = student(batch, use_cache=False).logits
        log_q = logits.float().log_softmax(-1)
        loss = F.kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), log_target=True,
                        reduction="batchmean")  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(record.clock() - began)
    return seconds


if __name__ == "__main__":
    main()
