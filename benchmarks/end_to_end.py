"""The whole `coec prune`: seconds per phase, and the total in forward passes over the same tokens.

    python -m benchmarks.end_to_end [--models wt2-llama qwen2.5-0.5b] [--layers 24]

`wt2-llama` is trained, calibrated on its text; `qwen2.5-0.5b` has random weights of that model's
shapes, calibrated on random token ids. 16 windows of 512 tokens. The baseline is one warm forward
pass of the dense model by transformers over the same windows in the same dtype, in this process;
it is timed with and without the output embedding, which pruning does not run.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import coec
from benchmarks import record
from benchmarks.instances import SHARED, TRAINED
from coec.text.tokens import load_tokenizer, read_stream
from coec.text.windows import sample_windows

QWEN = "qwen2.5-0.5b"
QWEN_LAYERS = 24
SAMPLES, SEQ_LEN = 16, 512


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per model, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=[TRAINED, QWEN], default=[TRAINED, QWEN])
    parser.add_argument("--layers", type=int, default=QWEN_LAYERS, help=f"of {QWEN}")
    parser.add_argument("--append", action="store_true", help="keep other models' last results")
    chosen = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    print(f"End to end. {record.header()}\n", flush=True)
    kept = record.load("end_to_end").get("models", []) if chosen.append else []
    results: list[dict[str, Any]] = []
    for model in chosen.models:
        with tempfile.TemporaryDirectory() as temporary:
            if model == QWEN:
                folder, calibration = random_qwen(Path(temporary), chosen.layers)
            elif (chosen.shared / "models" / model).is_dir():
                folder = chosen.shared / "models" / model
                calibration = chosen.shared / "data" / "wikitext-2" / "valid.raw.txt"
            else:
                print(f"skipped {model}: no folder '{chosen.shared / 'models' / model}'\n")
                continue
            results.append(measure(model, folder, calibration, Path(temporary) / "out"))
        print(f"{describe(results[-1])}\n", flush=True)
        models = record.merged(kept, results, "model")
        record.save("end_to_end", arguments, {"models": models})


def random_qwen(folder: Path, layers: int) -> tuple[Path, Path]:
    """A model of Qwen2.5-0.5B's shapes with random weights, and a token file to calibrate on."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, vocab_size=151_936,
        max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder / "dense")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 2 * SAMPLES * SEQ_LEN)
    np.save(folder / "tokens.npy", ids)
    return folder / "dense", folder / "tokens.npy"


def measure(name: str, folder: Path, calibration: Path, out: Path) -> dict[str, Any]:
    """One model: forward passes, then the pruning."""
    windows = _windows(folder, calibration)
    (forward, forward_busy), (body, body_busy) = forward_passes(folder, windows)
    began, busy = time.perf_counter(), record.clock()
    report = coec.prune(
        folder, out, preset="paper", sparsity=0.3, calibration=str(calibration), samples=SAMPLES,
        seq_len=SEQ_LEN, forward_dtype="float32",
    )  # fmt: skip
    total, busy = time.perf_counter() - began, record.clock() - busy
    sites: dict[str, float] = {}
    for row in report.sites:
        sites[row["site"]] = sites.get(row["site"], 0.0) + row["seconds"]
    layers = len(report.sites) // len(sites)
    efforts = {
        site: {
            "rounds": _mean(row.get("rounds", 0) for row in report.sites if row["site"] == site),
            "right_steps": _mean(
                sum(row.get("right_iterations", ())) for row in report.sites if row["site"] == site
            ),
        }
        for site in sites
    }
    result = {
        "model": name,
        "commit": record.commit(),
        "layers": layers,
        "tokens": windows.numel(),
        "forward_seconds": forward,
        "forward_without_head_seconds": body,
        "total_seconds": total,
        "total_in_forward_passes": busy / forward_busy,
        "total_in_passes_without_head": busy / body_busy,
        "cpu_seconds": {"forward": forward_busy, "forward_without_head": body_busy, "total": busy},
        "phases": report.seconds,
        "solving_by_site": sites,
        "mean_effort": efforts,
    }
    if name == QWEN and layers < QWEN_LAYERS:
        result["extrapolated"] = _extrapolate(result)
    return result


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def forward_passes(folder: Path, windows: Tensor) -> list[tuple[float, float]]:
    """A warm forward pass over all windows, with and without the output embedding: wall, CPU."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    batches = windows.split(1)
    found = []
    with torch.no_grad():
        for module in (model, model.base_model):
            module(input_ids=batches[0], use_cache=False)
            began, busy = time.perf_counter(), record.clock()
            for batch in batches:
                module(input_ids=batch, use_cache=False)
            found.append((time.perf_counter() - began, record.clock() - busy))
    return found


def _windows(folder: Path, calibration: Path) -> Tensor:
    """The windows that pruning will draw."""
    stream = read_stream(str(calibration), lambda: load_tokenizer(folder), split="train")
    return sample_windows(stream, samples=SAMPLES, seq_len=SEQ_LEN, seed=0).ids


def _extrapolate(result: dict[str, Any]) -> dict[str, float]:
    """To all layers: calibrating and solving grow in proportion, the rest stays."""
    factor = QWEN_LAYERS / result["layers"]
    cpu = result["cpu_seconds"]
    grows = sum(result["phases"][phase] for phase in ("calibrating", "solving"))
    share = grows / result["total_seconds"]
    total = cpu["total"] * (1 + (factor - 1) * share)
    head = cpu["forward"] - cpu["forward_without_head"]
    body = factor * cpu["forward_without_head"]
    return {
        "layers": QWEN_LAYERS,
        "total_seconds": total,
        "total_in_forward_passes": total / (body + head),
        "total_in_passes_without_head": total / body,
    }


def describe(result: dict[str, Any]) -> str:
    """One model as a table."""
    forward = result["forward_seconds"]
    times = {
        "forward pass (the baseline)": forward,
        "forward pass without the output embedding": result["forward_without_head_seconds"],
        **result["phases"],
        **{f"of solving: {site}": s for site, s in result["solving_by_site"].items()},
        "total": result["total_seconds"],
    }
    rows = [[phase, f"{s:.3g}", f"{s / forward:.3g}"] for phase, s in times.items()]
    cpu = result["cpu_seconds"]
    rows.append(["total, CPU time", f"{cpu['total']:.3g}",
                 f"{result['total_in_forward_passes']:.3g}"])  # fmt: skip
    text = (
        f"### {result['model']}, {result['layers']} layers, {result['tokens']:,} tokens\n\n"
        + record.table(["phase", "s", "÷ forward pass"], rows)
    )
    for site, effort in result["mean_effort"].items():
        text += (
            f"\n\nMean per matrix, {site}: {effort['rounds']:.1f} rounds, "
            f"{effort['right_steps']:.0f} right-solve steps."
        )
    if "extrapolated" in result:
        more = result["extrapolated"]
        text += (
            f"\n\nExtrapolated, not measured, to {more['layers']} layers: "
            f"{record.readable(more['total_seconds'])}, "
            f"{more['total_in_forward_passes']:.3g} forward passes "
            f"({more['total_in_passes_without_head']:.3g} without the output embedding)."
        )
    return text


if __name__ == "__main__":
    main()
