"""Seconds a block takes at the widths of a large model, and where they go.

    python -m benchmarks.two_blocks [--presets fast paper balanced] [--samples 128] [--seq-len 2048]
        [--scale 1] [--device auto] [--dtype bfloat16] [--minutes 4]

Two blocks of random weights with the widths of Llama-3.1-8B, in bfloat16, and random token ids.
Each preset prunes 30 % in a process of its own, and once more under cProfile on an eighth of the
windows, which names the three functions that take most time themselves. What is computed once for a
model, such as predictions at the end, is halved with the rest. Before them `fast` runs at a
sixteenth of the widths in float64 on the CPU and on the device, and three recipes run at a quarter
of the widths with hidden states on the device and on the host: the largest differences of a weight,
over the largest weight. Rows are in benchmarks/results/two_blocks.json.
"""

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import record
from coec.errors import CoecError
from coec.streams.streams import Streams

BLOCKS, SPARSITY, VOCABULARY = 2, 0.3, 32_000


def main(arguments: list[str] | None = None) -> None:
    """Measure every preset, save the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--presets", nargs="+", default=["fast", "paper", "balanced"])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--scale", type=float, default=1.0, help="of all widths")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--minutes", type=float, default=4.0, help="after which none is begun")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one is not None:
        print(json.dumps(measured(**chosen.one)))
        return
    dtype: torch.dtype = getattr(torch, chosen.dtype)
    ends = time.monotonic() + 60 * chosen.minutes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        difference = agreement(work, chosen.device)
        print(f"largest difference to the CPU in float64: {difference:.2g} of the largest weight")
        moved: dict[str, float] = {}
        failed = False
        try:
            moved = moving(work, chosen.device, chosen.scale / 4, 2 * chosen.samples, dtype)
            failed = moved["on the host"] > moved["again"]
            print(
                f"of a second run {moved['again']:.2g}, with states on the host "
                f"{moved['on the host']:.2g}"
            )
        except (CoecError, RuntimeError) as error:  # and the presets are measured all the same
            failed = True
            print(f"states on the host: failed: {error}")
        dense, tokens = made(work, chosen.scale, chosen.samples, chosen.seq_len, dtype)
        for preset in chosen.presets:
            if time.monotonic() > ends:
                print(f"{preset}: no time left")
                continue
            case = {
                "preset": preset, "dense": str(dense), "tokens": str(tokens),
                "samples": chosen.samples, "seq_len": chosen.seq_len, "device": chosen.device,
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.two_blocks", "--one", json.dumps(case)]
            run = subprocess.run(
                command, capture_output=True, text=True, cwd=record.ROOT, check=False
            )
            if run.returncode:
                failed = True
                print(f"{preset}: failed: {(run.stderr.strip().splitlines() or ['no word'])[-1]}")
                continue
            rows.append(json.loads(run.stdout.strip().splitlines()[-1]))
            results = {"difference": difference, "moved": moved, "rows": rows}
            record.save("two_blocks", arguments, results)
    print(describe(rows))
    if failed:
        sys.exit(1)


def hidden_size(scale: float) -> int:
    """Return the hidden size of a scaled model: that of an 8B, or a multiple of 32 heads."""
    return max(256, 512 * round(8 * scale))


def made(
    work: Path,
    scale: float,
    samples: int,
    seq_len: int,
    dtype: torch.dtype,
    vocabulary: int | None = None,
) -> tuple[Path, Path]:
    """Make a random model and its token ids, once; return their places."""
    hidden, vocabulary = hidden_size(scale), vocabulary or max(256, round(VOCABULARY * scale))
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=int(3.5 * hidden), num_hidden_layers=BLOCKS,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=vocabulary,
        max_position_embeddings=max(seq_len, 64), tie_word_embeddings=False,
    )  # fmt: skip
    dense, tokens = work / f"dense-{hidden}-{dtype}", work / f"tokens-{samples}-{seq_len}.npy"
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a GPU draws them at once
        network: Any = transformers.LlamaForCausalLM(config)
    network.to(dtype).save_pretrained(dense)
    np.save(tokens, np.random.default_rng(0).integers(0, vocabulary, (samples, seq_len)))
    return dense, tokens


def agreement(work: Path, device: str) -> float:
    """Return how far `fast` on the device is from the CPU: a sixteenth of the widths, float64."""
    dense, tokens = made(work, 1 / 16, 64, 64, torch.float64)
    outs = [work / "agreement-cpu", work / "agreement-device"]
    for out, place in zip(outs, ("cpu", device), strict=True):
        pruned(dense, out, tokens, "fast", 64, 64, place, forward_dtype="float64")
    return difference(*outs)


def moving(
    work: Path, device: str, scale: float, samples: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return how far a second run is from the first, with hidden states where they were, and with
    hidden states on the host, copied from there and back: closed forms, and trained blocks with and
    without propagation. Raises RuntimeError where states of a GPU did not lie where they should.
    """
    length = max(32, round(4096 * scale))
    dense, tokens = made(work, scale, samples, length, dtype)
    brief: dict[str, Any] = {"reconstruct": 1}
    recipes: list[tuple[str, dict[str, Any]]] = [
        ("fast", {}), ("balanced", brief), ("balanced", brief | {"propagate": False}),
    ]  # fmt: skip
    largest = {"again": 0.0, "on the host": 0.0}
    for number, (preset, settings) in enumerate(recipes):
        outs = {run: work / f"moving-{number}-{run}" for run in ("first", *largest)}
        for run, out in outs.items():
            room = 0.0 if run == "on the host" else 0.8
            with (
                mock.patch("coec.planning.memory._ROOM_FOR_STATES", room),
                mock.patch("coec.devices.NUMBERS_PER_BATCH", 2**23),  # many batches
                mock.patch("coec.pruning.Streams", wraps=Streams) as made_streams,
                sdpa_kernel(SDPBackend.MATH),  # the others' derivatives differ from run to run
            ):
                pruned(dense, out, tokens, preset, samples, length, device, **settings)
            home = made_streams.call_args.args[0].home.type
            there = "cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"
            if home != ("cpu" if run == "on the host" else there):
                raise RuntimeError(f"hidden states of the run '{run}' were on {home}")
        for run in largest:
            largest[run] = max(largest[run], difference(outs["first"], outs[run]))
    return largest


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of two models' weights, over the largest weight."""
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    largest = max(float(tensor.abs().max()) for tensor in weights[0].values())
    pairs = ((weights[0][name], weights[1][name]) for name in weights[0])
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def measured(
    preset: str, dense: str, tokens: str, samples: int, seq_len: int, device: str
) -> dict[str, Any]:
    """Prune in this process, and once more on an eighth of the windows under a profiler."""
    import coec  # noqa: F401 (before the clock starts)

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        report = pruned(
            Path(dense), Path(folder) / "out", Path(tokens), preset, samples, seq_len, device
        )
        wall = time.perf_counter() - began
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        profiler = cProfile.Profile()
        profiler.enable()
        few = max(8, samples // 8)
        pruned(Path(dense), Path(folder) / "few", Path(tokens), preset, few, seq_len, device)
        profiler.disable()
    return {
        "preset": preset, "samples": samples, "seq_len": seq_len, "wall": wall,
        "device_bytes": memory, "seconds": report.seconds, "slowest": slowest(profiler),
        "machine": record.machine(), "commit": record.commit(),
    }  # fmt: skip


def pruned(
    dense: Path,
    out: Path,
    tokens: Path,
    preset: str,
    samples: int,
    seq_len: int,
    device: str,
    **settings: Any,
) -> Any:
    """Prune by a preset; return the report."""
    import coec

    settings |= {"preset": preset, "samples": samples, "seq_len": seq_len, "device": device}
    return coec.prune(dense, out, sparsity=SPARSITY, calibration=str(tokens), **settings)


def slowest(profiler: cProfile.Profile, count: int = 3) -> list[tuple[str, float]]:
    """Return the functions that take most time themselves, and their seconds."""
    stats: Any = pstats.Stats(profiler)
    own = sorted(((row[2], name) for name, row in stats.stats.items()), reverse=True)[:count]
    return [(f"{Path(file).name}:{line} {name}", seconds) for seconds, (file, line, name) in own]


def describe(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown: seconds of the wall for one block, by phase."""
    phases = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = [
        [
            row["preset"], f"{row['wall'] / BLOCKS:.1f}",
            *(f"{row['seconds'].get(name, 0) / BLOCKS:.1f}" for name in phases),
            "–" if row["device_bytes"] is None else f"{row['device_bytes'] / 1e9:.1f}",
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["slowest"]),
        ]
        for row in rows
    ]  # fmt: skip
    header = ["", "s a block", *phases, "device, GB", "slowest, with an eighth of the windows, s"]
    return record.table(header, lines)


if __name__ == "__main__":
    main()
