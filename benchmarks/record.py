"""Where and with what a benchmark ran, and how its results are kept."""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import coec

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "transformers")


def machine() -> dict[str, Any]:
    """The processor, its threads, and the accelerator where there is one."""
    record: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if one_thread() else "wall-clock time",
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        record["gpu"] = properties.name
        record["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        record["cuda"] = torch.version.cuda
    return record


def versions() -> dict[str, str]:
    """Python, torch, this package, numpy and transformers."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "coec": coec.__version__,
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def commit() -> str:
    """The commit at the first call, when a benchmark starts; `+` where tracked files differ."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    dirty = [line for line in changed.splitlines() if "benchmarks/results/" not in line]
    return head + ("+" if dirty else "")


def save(name: str, arguments: list[str] | None, results: Mapping[str, Any]) -> Path:
    """Writes `benchmarks/results/<name>.json` with machine, versions and commit.

    Args:
        name: of the benchmark.
        arguments: of its command line; None for the process's own.
        results: JSON-ready, but for infinities.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "arguments": _public(sys.argv[1:] if arguments is None else arguments),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **results,
    }
    path = RESULTS / f"{name}.json"
    text = json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def load(name: str) -> dict[str, Any]:
    """What `save` wrote last; nothing where it never did."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The old rows that no new one replaces, then the new ones."""
    replaced = {row[key] for row in new}
    return [*(row for row in old if row[key] not in replaced), *new]


def header(device: str | torch.device = "cpu") -> str:
    """One line for the top of a printed table."""
    here, with_ = machine(), versions()
    on = here["processor"] if torch.device(device).type == "cpu" else here["gpu"]
    names = ", ".join(f"{name} {version}" for name, version in with_.items())
    return f"{on}, {here['threads']} thread(s), {here['clock']}; {names}; commit {commit()}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def matmul_rate(dtype: torch.dtype, n: int = 2048, repeats: int = 3) -> float:
    """The best measured rate of a square matrix product on the CPU, in operations per second."""
    A = torch.randn(n, n, dtype=dtype)
    A @ A
    best = math.inf
    for _ in range(repeats):
        began = clock()
        A @ A
        best = min(best, clock() - began)
    return 2 * n**3 / best


def one_thread() -> bool:
    """Whether torch computes on one thread."""
    return torch.get_num_threads() == 1


def clock() -> float:
    """CPU seconds of this process where it has one thread, else seconds.

    With one thread the two agree on an idle machine; on a busy one only the first is a property of
    the program.
    """
    return time.process_time() if one_thread() else time.perf_counter()


def _public(arguments: Sequence[str]) -> str:
    """Without the place of the shared data on this machine."""
    parts = list(arguments)
    if "--shared" in parts:
        at = parts.index("--shared")
        del parts[at : at + 2]
    return shlex.join(parts)


def _finite(value: Any) -> Any:
    """JSON has no infinity: None stands for a number that was not reached; six digits suffice."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
