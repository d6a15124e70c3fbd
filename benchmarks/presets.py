"""The frontier: what every preset gives, and what it costs, as a table and a picture.

    python -m benchmarks.presets [--models wt2-llama] [--presets paper fast best] [--sparsity 0.3]
        [--seeds 0] [--missing] [--draw]

Small trained models, 64 windows of 256 tokens, one thread, uniform widths and, but for `paper`,
widths by block. Every pruning is `coec prune` as a process of its own. CPU time, not time on the
wall, so that other work on the machine counts little; it holds loading, checks, text and writing.
Ratios are over `paper` of the same model, sparsity and seed, CPU seconds without those that Python
and its imports take to start. Perplexity and KL are of the first 400 test windows.

Writes every row into benchmarks/results/presets.json, in the place of the one before, and makes
tables and presets.png of all that are there; `--missing` leaves out those that are, `--draw` all.
The dotted line is the lowest perplexity of the programs in benchmarks/results/peers.json, at 30 %.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import ticker

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, SPARSITY, TEXTS
from benchmarks.instances import SHARED
from coec.settings import PRESETS

BASELINE = "paper"
WINDOWS = 400


def main(arguments: list[str] | None = None) -> None:
    """Prints a line per model and preset, writes JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[SPARSITY])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--draw", action="store_true")
    chosen = parser.parse_args(arguments)
    if not chosen.draw:
        measure_all(chosen, arguments)
    rows = record.load("presets")["rows"]
    print(tables(rows))
    draw(rows)


def measure_all(chosen: argparse.Namespace, arguments: list[str] | None) -> None:
    """Measure every preset, and save after each."""
    print(f"Presets. {record.header()}\n", flush=True)
    start = min(spent([sys.executable, "-c", "import coec; coec.prune"])["cpu"] for _ in range(3))
    print(f"start: {start:.1f} CPU s")
    widths = [(p, by_block) for p in chosen.presets for by_block in (False, True)]
    rows = record.load("presets").get("rows", []) if chosen.missing else []
    done = {row["key"] for row in rows}
    for model, sparsity, seed in product(chosen.models, chosen.sparsity, chosen.seeds):
        for preset, by_block in widths:
            if preset == BASELINE and by_block:
                continue
            case = {"model": model, "sparsity": sparsity, "seed": seed}
            key = "|".join(map(str, (*case.values(), preset, by_block)))
            if key in done:
                continue
            numbers = measure(**case, preset=preset, by_block=by_block, shared=chosen.shared)
            numbers["cpu"] -= start
            name = preset + ", by block" * by_block
            row = {"key": key, **case, "preset": preset, "by_block": by_block, **numbers}
            rows = record.merged(record.load("presets").get("rows", []), [row], "key")
            record.save("presets", arguments, {"rows": sorted(rows, key=_order)})
            print(
                f"{model:<14}{100 * sparsity:>3.0f} %{seed:>3} {name:<20}"
                f"{row['cpu']:>8.1f} CPU s{row['bytes'] / 2**20:>8.0f} MiB"
                f"{row['perplexity']:>8.3f}{row['kl']:>8.4f}",
                flush=True,
            )


def tables(rows: list[dict[str, Any]]) -> str:
    """Return a table for every sparsity, in Markdown; numbers are means where seeds are several.

    Seconds, and how many times those of `paper` with the same seed they are, are of seed 0.
    """
    parts = []
    for sparsity in sorted({row["sparsity"] for row in rows}):
        lines = []
        for preset, by_block in product(PRESETS, (False, True)):
            cells = [f"`{preset}`" + ", by block" * by_block]
            for model in TEXTS:
                of_model = [r for r in rows if (r["model"], r["sparsity"]) == (model, sparsity)]
                own = [r for r in of_model if (r["preset"], r["by_block"]) == (preset, by_block)]
                cells.append(_cell(own, of_model))
            if any(cells[1:]):
                lines.append(cells)
        parts += [f"{100 * sparsity:.0f} %:", "", record.table(["", *TEXTS], lines), ""]
    return "\n".join(parts)


def _cell(own: list[dict[str, Any]], of_model: list[dict[str, Any]]) -> str:
    if not own:
        return ""
    perplexity, kl = (sum(row[v] for row in own) / len(own) for v in ("perplexity", "kl"))
    cell = f"{perplexity:.2f} / {kl:.3g}"
    if len(own) > 1:
        spread = max(r["perplexity"] for r in own) - min(r["perplexity"] for r in own)
        cell += f" (±{spread / 2:.2g})"
    seconds = {row["preset"]: row["cpu"] for row in of_model if row["seed"] == 0}
    at_0 = [row["cpu"] for row in own if row["seed"] == 0]
    return cell + "".join(f" / {s:.0f} s, {s / seconds[BASELINE]:.1f}" for s in at_0)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    presets = list(PRESETS)
    place = list(TEXTS).index(row["model"]), row["sparsity"], row["seed"]
    return (*place, presets.index(row["preset"]), row["by_block"])


def measure(
    model: str, sparsity: float, seed: int, preset: str, shared: Path, *, by_block: bool
) -> dict[str, Any]:
    """Seconds of CPU and on the wall, the most memory, and the quality of one pruning."""
    calibration, test = (shared / "data" / TEXTS[model] / f for f in FILES[TEXTS[model]])
    dense = shared / "models" / model
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "coec", "prune", str(dense), f"{scratch}/out",
            "--preset", preset, "--sparsity", str(sparsity), "--calibration", str(calibration),
            "--samples", str(SAMPLES), "--seq-len", str(SEQ_LEN), "--device", "cpu",
            "--seed", str(seed), *(["--non-uniform"] if by_block else []),
        ]  # fmt: skip
        numbers = spent(command)
        result = coec.perplexity(
            f"{scratch}/out", text=str(test), baseline=str(dense), seq_len=SEQ_LEN,
            max_windows=WINDOWS, device="cpu",
        )  # fmt: skip
    return {**numbers, "perplexity": result.perplexity, "kl": result.kl}


def spent(command: list[str]) -> dict[str, float]:
    """What a process takes."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        errors.seek(0)
        if process.returncode:
            code = process.returncode
            raise SystemExit(f"{' '.join(command)} ended with {code}: {errors.read()[-2000:]}")
    return {"cpu": usage.ru_utime + usage.ru_stime, "wall": wall, "bytes": _bytes(usage)}


def _bytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw perplexity and KL against CPU seconds, those of seed 0."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    peers = json.loads((record.RESULTS / "peers.json").read_text())["perplexity"]
    rows = [row for row in rows if row["seed"] == 0]
    figure, axes = plt.subplots(
        2, len(TEXTS), figsize=(4 * len(TEXTS), 6.4), sharex="col", layout="constrained"
    )
    for column, model in enumerate(TEXTS):
        for ax, value in zip(axes[:, column], ("perplexity", "kl"), strict=True):
            _draw_model(ax, [row for row in rows if row["model"] == model], value)
        top, bottom = axes[:, column]
        name, lowest = min(((p, min(by[model])) for p, by in peers.items()), key=lambda x: x[1])
        top.axhline(lowest, color="gray", linestyle=":", linewidth=1)
        top.annotate(
            f"{name}, 30 %", (0.99, lowest), xycoords=("axes fraction", "data"), ha="right",
            va="bottom", fontsize=7, color="gray",
        )  # fmt: skip
        top.set_title(model)
        bottom.set_xlabel("CPU seconds, without Python's start")
    axes[0, 0].set_ylabel("perplexity")
    axes[1, 0].set_ylabel("KL to the dense model, nats per token")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(record.RESULTS / "presets.png", dpi=120)


def _draw_model(ax: Any, rows: list[dict[str, Any]], value: str) -> None:
    """Draw one quantity of one model: a line for each sparsity and kind of widths."""
    for sparsity in sorted({row["sparsity"] for row in rows}):
        color = f"C{round(10 * sparsity)}"
        for by_block, style in ((False, "o-"), (True, "s--")):
            chosen = [r for r in rows if (r["sparsity"], r["by_block"]) == (sparsity, by_block)]
            points = [(row["cpu"], row[value]) for row in chosen]
            label = f"{100 * sparsity:.0f} %, " + ("widths by block" if by_block else "uniform")
            ax.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
            for row, point in zip(chosen, points, strict=True):
                ax.annotate(
                    row["preset"], point, xytext=(3, 3), textcoords="offset points", fontsize=6
                )
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=8))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(ticker.NullFormatter())
    if value == "perplexity":  # less than a decade
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6))
    ax.margins(x=0.12)


if __name__ == "__main__":
    main()
