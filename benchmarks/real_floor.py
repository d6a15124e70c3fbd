"""How far a block of the real model is from its floor, and `coec eval` from a plain loop.

    python -m benchmarks.real_floor [--presets fast] [--blocks 2 6] [--windows 16] [--repeats 3]

The first blocks of SmolLM2-135M are pruned as in benchmarks.real, two numbers of them: the
difference is what blocks take, without loading, text and writing. The floor is the operations of
all products, attention, eigenpairs and SVDs as they are run, by dtype, over the measured rate of a
product in that dtype; elementwise work counts as nothing. Then the whole model's perplexity, by
`coec.perplexity` and by a loop over `model(ids).logits`, in turns, loading and text included. Rows
are in benchmarks/results/real_floor.json.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import coec
from benchmarks import operations, record
from benchmarks.instances import SHARED
from benchmarks.meter import OPERATORS, Counter
from benchmarks.real import SIZES, evaluation_ids
from benchmarks.real_model import first_blocks, folder

SIZE = SIZES["cpu"]
SAME = 1e-3
"""Relative difference of perplexities that bfloat16 leaves."""
_aten = torch.ops.aten


def _attention(q: torch.Tensor, k: torch.Tensor, *_: object, **__: object) -> float:
    """Half of the map, since no token sees those behind it."""
    return 2.0 * q.numel() * k.shape[-2]


def _batched(A: torch.Tensor, B: torch.Tensor) -> float:
    return 2.0 * A.numel() * B.shape[-1]


RUN = OPERATORS | {
    _aten.bmm.default: _batched,
    _aten.baddbmm.default: lambda _, A, B: _batched(A, B),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._linalg_eigh.default: lambda A, *_: operations.eigh(len(A)),
    _aten._linalg_svd.default: lambda A, *_: operations.thin_svd(max(A.shape), min(A.shape)),
}
"""Operators of a run, decompositions and attention included."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def main(arguments: list[str] | None = None) -> None:
    """Measure both, save the rows, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--presets", nargs="+", default=["fast"])
    parser.add_argument("--blocks", nargs=2, type=int, default=[2, 6])
    parser.add_argument(
        "--windows", type=int, default=16, help="of 512 tokens that eval is timed on"
    )
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args(arguments)
    print(f"{record.header()}\n", flush=True)
    rates = {dtype: record.matmul_rate("cpu", dtype) for dtype in DTYPES}
    rows: list[dict[str, Any]] = []
    for preset in chosen.presets:
        few, more = (pruned(preset, count, rates) for count in chosen.blocks)
        between = chosen.blocks[1] - chosen.blocks[0]
        rows.append({"preset": preset} | {name: (more[name] - few[name]) / between for name in few})
    evaluated = speeds(chosen.windows, chosen.repeats)
    named = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}
    record.save("real_floor", arguments, {"rates": named, "rows": rows, "eval": evaluated})
    print(", ".join(f"{name} {rate / 1e9:.0f} G/s" for name, rate in named.items()))
    lines = [
        [row["preset"], f"{row['operations'] / 1e9:,.0f} G", f"{row['floor']:.2f}",
         f"{row['seconds']:.2f}", f"{row['seconds'] / row['floor']:.2f}"]
        for row in rows
    ]  # fmt: skip
    print(record.table(["a block", "operations", "floor, s", "CPU s", "over the floor"], lines))
    print(
        f"eval, {evaluated['tokens']:,} tokens: {evaluated['coec']:.1f} s, a plain loop "
        f"{evaluated['plain']:.1f}: {evaluated['plain'] / evaluated['coec']:.3f} of its rate"
    )


def pruned(preset: Any, count: int, rates: dict[torch.dtype, float]) -> dict[str, float]:
    """Return seconds, operations and their floor of pruning the first blocks."""
    model = first_blocks(count)

    def prune(out: Path) -> None:
        coec.prune(
            model, out, preset=preset, sparsity=0.3, forward_dtype="bfloat16", samples=SIZE.samples,
            calibration=str(SHARED / "data/wikitext-2/valid.raw.txt"), seq_len=SIZE.seq_len,
        )  # fmt: skip

    counter = Counter(rates, RUN)
    with tempfile.TemporaryDirectory() as work:
        began = record.clock()
        prune(Path(work) / "timed")
        seconds = record.clock() - began
        with counter:
            prune(Path(work) / "counted")
    return {"seconds": seconds, "operations": counter.operations, "floor": counter.floor}


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


if __name__ == "__main__":
    main()
