"""The rates of this machine, measured in about ten seconds and kept.

Small matrices run far below the rate of large ones, so each kind of work is measured at a few
sizes. What is measured is the middle one of several runs: the program itself meets neither the best
nor the worst moment.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.events import Progress
from coec.models.files import cache_folder
from coec.planning import operations
from coec.planning.machines import HOST_RATES, Machine, Points

DTYPES = {"float64": torch.float64, "float32": torch.float32}
SIZES = {
    "cpu": {"product": (32, 96, 192, 512, 1024), "decomposed": (32, 96, 192, 448)},
    "cuda": {"product": (128, 512, 2048, 8192), "decomposed": (128, 512, 2048)},
}
"""Edges of the matrices: what is beyond the largest has its rate."""
TENSORS = {
    "cpu": (2**12, 2**16, 2**20, 2**26),
    "cuda": (2**16, 2**22, 2**26, 2**28),
}
"""Bytes of the tensors of elementwise work. Memory that was never used before is far slower;
between the largest, it is chance whether it was."""
RUNS, LONG = 5, 0.3
"""How often something is measured, and the seconds after which once is enough."""
CHARACTERS = 2.5
"""Characters that are tokenised in the time of one call, measured once (docs/LOG.md)."""
LAYOUT = 1
"""Of the file that keeps rates: another is measured anew."""


def here(device: torch.device, *, anew: bool = False, progress: Progress | None = None) -> Machine:
    """The rates of a device of this machine, measured now or before.

    They are kept by the names of device and processor, torch's version and the number of threads,
    in `$XDG_CACHE_HOME/coec` or `~/.cache/coec`.

    Args:
        device: whose rates.
        anew: measure again.
        progress: called with ("measuring this machine", done, of how many).
    """
    if not anew and (found := _read(_path(device))) is not None:
        return found
    machine = measured(device, progress)
    keep(device, machine)
    return machine


def keep(device: torch.device, machine: Machine) -> None:
    """For the next time. Where nothing can be kept, rates are measured again then."""
    path = _path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8"
        ) as file:
            json.dump({**_known(device), "machine": machine.record()}, file)
        os.replace(file.name, path)
    except OSError:
        return


def measured(device: torch.device, progress: Progress | None = None) -> Machine:
    """The rates of a device, measured now."""
    clock = _Clock(device)
    parts: list[Callable[[_Clock], dict[str, Points]]] = [
        _products, _decompositions, _elementwise, _calls, _of_host,
    ]  # fmt: skip
    rates: dict[str, Points] = {}
    for number, part in enumerate(parts):
        rates |= part(clock)
        if progress:
            progress("measuring", number + 1, len(parts))
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return Machine(_name(device), device.type, rates, memory)


class _Clock:
    """Seconds that something takes: of CPU where one thread computes, else of the clock.

    With one thread the two agree on an idle machine; on a busy one only the first is a property of
    the machine.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def __call__(self, run: Callable[[], Any], runs: int = RUNS) -> float:
        """The middle one of several runs; the first, which sets things up, is not counted."""
        run()
        found: list[float] = []
        while len(found) < runs and sum(found) < LONG:
            self._wait()
            began = self._now()
            run()
            self._wait()
            found.append(self._now() - began)
        return max(statistics.median(found), 1e-9)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _matrix(clock: _Clock, n: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(clock.device).manual_seed(0)
    return torch.randn(n, n, generator=generator, dtype=dtype, device=clock.device)


def _products(clock: _Clock) -> dict[str, Points]:
    """Of square matrices, and of attention maps as transformers computes them."""
    rates: dict[str, Points] = {}
    kinds = DTYPES if clock.device.type == "cpu" else {**DTYPES, "bfloat16": torch.bfloat16}
    for name, dtype in kinds.items():
        found = []
        for n in SIZES[clock.device.type]["product"]:
            A = _matrix(clock, n, dtype)
            found.append(
                (float(n), operations.product(n, n, n) / clock(partial(torch.matmul, A, A)))
            )
        rates[f"product {name}"] = tuple(found)
        rates[f"attention {name}"] = _attention(clock, dtype)
    return rates


def _attention(clock: _Clock, dtype: torch.dtype) -> Points:
    found, length = [], 512
    for columns in (16, 64, 128):
        q = torch.randn(4, 8, length, columns, dtype=dtype, device=clock.device)
        run = torch.nn.functional.scaled_dot_product_attention
        seconds = clock(partial(run, q, q, q, is_causal=True))
        found.append((float(columns), 4 * length * q.numel() / seconds))
    return tuple(found)


def _decompositions(clock: _Clock) -> dict[str, Points]:
    rates: dict[str, Points] = {}
    for name, dtype in DTYPES.items():
        found: dict[str, list[tuple[float, float]]] = {}
        for n in SIZES[clock.device.type]["decomposed"]:
            A = _matrix(clock, n, dtype)
            S = A @ A.T + n * torch.eye(n, dtype=dtype, device=clock.device)
            for kernel, count, run in (
                ("eigh", operations.eigh(n), partial(torch.linalg.eigh, S)),
                ("svd", operations.thin_svd(n, n), partial(torch.linalg.svd, A)),
                ("cholesky", operations.cholesky(n), partial(torch.linalg.cholesky_ex, S)),
                (
                    "triangular",
                    operations.triangular_solve(n, n),
                    partial(torch.linalg.solve_triangular, S, A, upper=False),
                ),
            ):
                if kernel == "svd" and clock.device.type == "cuda":
                    continue  # never run there: polar factors and eigenproblems take its place
                found.setdefault(kernel, []).append((float(n), count / clock(run)))
        rates |= {f"{kernel} {name}": tuple(points) for kernel, points in found.items()}
    return rates


def _elementwise(clock: _Clock) -> dict[str, Points]:
    """New tensors out of two, in float32, as most of what lies between products is."""
    moved, summed = [], []
    for size in TENSORS[clock.device.type]:
        x = torch.ones(size // 4, device=clock.device)
        moved.append((float(size), 3 * size / clock(partial(torch.mul, x, x))))
        if size >= 2**16:
            rows = x.view(-1, 256)
            seconds = clock(partial(torch.sum, rows, dim=0, dtype=torch.float64))
            summed.append((float(size), size / seconds))
    found = {"elementwise": tuple(moved), "reduce": tuple(summed)}
    if clock.device.type == "cuda":
        waiting = torch.ones(2**26, dtype=torch.uint8)
        seconds = clock(lambda: waiting.to(clock.device))
        found["link"] = ((1.0, waiting.numel() / seconds),)
    return found


def _calls(clock: _Clock) -> dict[str, Points]:
    """Operators as the program calls them, on matrices that take no time."""
    A, B = (_matrix(clock, 4, torch.float64) for _ in range(2))

    def run() -> None:
        for _ in range(100):
            C = A @ B
            C.mul_(B).add_(A, alpha=0.5)
            C = 0.5 * (C + C.T)
            float((C * A).sum())

    seconds = clock(run) / 800
    return {"call": ((1.0, 1 / seconds),), "tokenise": ((1.0, CHARACTERS / seconds),)}


def _of_host(clock: _Clock) -> dict[str, Points]:
    """Reading weights as they are checked, and the start of a process."""
    content = torch.ones(2**23)

    def run() -> None:
        torch.isfinite(content).all()
        hashlib.sha256(content.numpy().data).hexdigest()

    host = _Clock(torch.device("cpu"))
    rates: dict[str, Points] = {"digest": ((1.0, 4 * content.numel() / host(run, 1)),)}
    try:
        started = time.perf_counter()
        command = [
            sys.executable,
            "-c",
            "import coec.cli.commands, coec.pipeline.prune, os; print(sum(os.times()[:2]))",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        wall = time.perf_counter() - started
        alone = torch.get_num_threads() == 1
        rates["import"] = ((1.0, 1 / (float(done.stdout) if alone else wall)),)
    except (OSError, ValueError, subprocess.SubprocessError):
        rates["import"] = ((1.0, HOST_RATES["import"]),)
    return rates


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = os.cpu_count()
    return f"{names[0] if names else 'this processor'}, {cores} cores"


def _known(device: torch.device) -> dict[str, Any]:
    """What the rates of a device depend on."""
    return {
        "layout": LAYOUT,
        "device": _name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _path(device: torch.device) -> Path:
    """Where its rates are kept."""
    digest = hashlib.sha256(json.dumps(_known(device)).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json"


def _read(path: Path) -> Machine | None:
    try:
        return Machine.of(json.loads(path.read_text(encoding="utf-8"))["machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never measured, or by a release that wrote it otherwise
