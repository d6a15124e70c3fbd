"""What the presets cost: CPU seconds and memory of `coec prune` as a process of its own.

    python -m benchmarks.presets [--models wt2-llama] [--presets paper fast best]

30 % of small trained models, 64 windows of 256 tokens, one thread, with uniform widths and, but for
`paper`, with widths by block. CPU time, not time on the wall, so that other work on the machine
counts little; it holds loading, checks, text and writing. Ratios are over `paper` of the same
model, CPU seconds without those that Python and its imports take to start.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, SPARSITY, TEXTS
from benchmarks.instances import SHARED
from coec.settings import PRESETS

BASELINE = "paper"


def main(arguments: list[str] | None = None) -> None:
    """Prints a line per model and preset, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    chosen = parser.parse_args(arguments)
    print(f"Presets. {record.header()}\n", flush=True)
    start = spent([sys.executable, "-c", "import coec; coec.prune"])["cpu"]
    print(f"start: {start:.1f} CPU s")
    print(f"{'model':<14}{'preset':<20}{'CPU s':>8}{'wall s':>8}{'MiB':>7}{'CPU':>8}{'memory':>8}")
    rows: list[dict[str, Any]] = []
    for model in chosen.models:
        base: dict[str, Any] | None = None
        widths = [(p, by_block) for p in chosen.presets for by_block in (False, True)]
        for preset, by_block in widths:
            if preset == BASELINE and by_block:
                continue
            numbers = measure(model, preset, chosen.shared, by_block=by_block)
            row = {"model": model, "preset": preset, "by_block": by_block, **numbers}
            base = row if preset == BASELINE else base
            ratios = f"{'–':>8}{'–':>8}"
            if base:
                cpu, memory = row["cpu"] - start, row["bytes"] / base["bytes"]
                ratios = f"{cpu / (base['cpu'] - start):>8.2f}{memory:>8.2f}"
            print(
                f"{model:<14}{preset + ', by block' * by_block:<20}{row['cpu']:>8.1f}"
                f"{row['wall']:>8.1f}{row['bytes'] / 2**20:>7.0f}{ratios}",
                flush=True,
            )
            rows.append(row)
            record.save("presets", arguments, {"start": start, "rows": rows})


def measure(model: str, preset: str, shared: Path, *, by_block: bool) -> dict[str, float]:
    """Seconds of CPU and on the wall, and the most memory, of one pruning."""
    calibration = shared / "data" / TEXTS[model] / FILES[TEXTS[model]][0]
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "coec", "prune", str(shared / "models" / model), f"{scratch}/out",
            "--preset", preset, "--sparsity", str(SPARSITY), "--calibration", str(calibration),
            "--samples", str(SAMPLES), "--seq-len", str(SEQ_LEN), "--device", "cpu",
            *(["--non-uniform"] if by_block else []),
        ]  # fmt: skip
        return spent(command)


def spent(command: list[str]) -> dict[str, float]:
    """What a process takes."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return {"cpu": usage.ru_utime + usage.ru_stime, "wall": wall, "bytes": _bytes(usage)}


def _bytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
