"""Rates of this machine, measured in about ten seconds and kept.

Small matrices run far below the rate of large ones, so each resource is measured at a few
sizes. A rate is the median of several runs: the program meets neither the best nor the worst
moment.
"""

import hashlib
import json
import os
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from coec.events import Progress
from coec.models.files import cache_folder
from coec.planning import work
from coec.planning.machines import Machine, RatePoints

_EDGES = {"cpu": (32, 96, 192, 512, 1024), "cuda": (128, 512, 2048, 8192)}
"""Edges of the matrices; whatever is larger gets the rate of the largest."""
_LARGEST_EIGEN = 2048
_TENSORS = {"cpu": (2**12, 2**16, 2**20, 2**26), "cuda": (2**16, 2**22, 2**26, 2**28)}
"""Bytes of the tensors of elementwise work. Memory that was never used before is far slower."""
_RUNS = 5
_USUAL_CALLS = 4e5
"""Calls per second of the host whose seconds `host` work states."""
_LAYOUT = 2
"""Version of the file that keeps rates; another is measured anew."""
_Case = tuple[str, float, float, Callable[[], object]]
"""Resource, size and amount of some work, and a function that does it."""


def this_machine(
    device: torch.device, *, anew: bool = False, progress: Progress | None = None
) -> Machine:
    """Rates of a device of this machine, measured now or before.

    They are kept by the names of device and processor, torch's version and the number of threads,
    in `$XDG_CACHE_HOME/coec` or `~/.cache/coec`.

    Args:
        device: to measure.
        anew: measure again.
        progress: called with ("measuring", rates measured, rates in all).
    """
    if not anew:
        try:
            return Machine.of(json.loads(_path(device).read_text(encoding="utf-8"))["machine"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # never measured, or by a release that wrote it otherwise
    machine = measure(device, progress)
    store(device, machine)
    return machine


def store(device: torch.device, machine: Machine) -> None:
    """Keep rates for the next time; where no file can be written, they are measured again then."""
    path = _path(device)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**_identity(device), "machine": machine.record()})
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return


def measure(device: torch.device, progress: Progress | None = None) -> Machine:
    """Measure the rates of a device now."""
    points: dict[str, RatePoints] = {}
    cases = [*_device_cases(device), *_host_cases(device)]
    for number, (resource, size, amount, run) in enumerate(cases, 1):
        points[resource] = (*points.get(resource, ()), (size, amount / _seconds(device, run)))
        if progress:
            progress("measuring", number, len(cases))
    points["host"] = ((1.0, points["call"][0][1] / _USUAL_CALLS),)
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return Machine(_name(device), device.type, points, memory)


def _device_cases(device: torch.device) -> Iterator[_Case]:
    """Yield products, eigenpairs, elementwise work in float32, and copies to a GPU."""
    narrow = ["bfloat16"] if device.type == "cuda" else []
    for dtype in ("float64", "float32", *narrow):
        for n in _EDGES[device.type]:
            A = torch.randn(n, n, device=device).to(getattr(torch, dtype))
            yield f"product {dtype}", n, work.product(n, n, n).amount, partial(torch.matmul, A, A)
            if dtype not in narrow and n <= _LARGEST_EIGEN:
                S, count = A + A.T, work.eigenpairs(n).amount
                yield f"eigen {dtype}", n, count, partial(torch.linalg.eigh, S)
    for size in _TENSORS[device.type]:
        x = torch.ones(size // 4, device=device)
        yield "elementwise", size, 3 * size, partial(torch.mul, x, x)
    if device.type == "cuda":
        waiting = torch.ones(2**24)
        yield "link", 1.0, 4 * waiting.numel(), partial(waiting.to, device)


def _host_cases(device: torch.device) -> Iterator[_Case]:
    """Yield calls of operators on matrices that take no time, and reading and checking weights."""
    A, B = torch.randn(2, 4, 4, dtype=torch.float64, device=device)
    content = torch.ones(2**23)

    def call() -> None:
        for _ in range(100):
            C = A @ B
            C.mul_(B).add_(A, alpha=0.5)
            C = 0.5 * (C + C.T)
            float((C * A).sum())

    def read() -> None:
        torch.isfinite(content).all()
        hashlib.sha256(content.numpy().data).hexdigest()

    yield "call", 1.0, 800, call
    yield "read", 1.0, 4 * content.numel(), read


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of several runs, behind one that sets things up.

    CPU time where one thread computes: on an idle machine it is the wall clock's, and on a busy one
    it alone is a property of the machine.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter

    def timer() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    run()
    times = [float(n) for n in timeit.repeat(run, timer=timer, number=1, repeat=_RUNS)]
    return max(sorted(times)[_RUNS // 2], 1e-9)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'this processor'}, {os.cpu_count()} cores"


def _identity(device: torch.device) -> dict[str, object]:
    """List what the rates of a device depend on."""
    return {
        "layout": _LAYOUT,
        "device": _name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _path(device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(_identity(device)).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json"
