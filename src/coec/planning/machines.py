"""Machines: the rate of every resource, and the size of the memory.

The GPUs here are known by their makers' data sheets alone: nothing was measured on them. This
machine is measured in about ten seconds, once. Small matrices run far below the rate of large ones,
so each resource is measured at a few sizes.
"""

import hashlib
import itertools
import json
import math
import os
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from coec.devices import DTYPES, USEFUL
from coec.errors import OptionError
from coec.events import Progress
from coec.models.files import cache_folder

Resource = Literal["product", "eigen", "elementwise", "call", "read", "link", "host"]
"""What work needs: matrix products and eigenpairs (operations); elementwise traffic (bytes through
memory); calls of operators; reading and checking weights, and copies between host and GPU (bytes);
anything else on the host (seconds)."""
RatePoints = tuple[tuple[float, float], ...]
"""Sizes, ascending, and the rate at each, in amounts per second."""


class Work(NamedTuple):
    """Something that is done a number of times.

    Attributes:
        resource: that the work needs.
        amount: of one execution, in the unit of the resource.
        size: what the rate depends on: the geometric mean of a product's three edges, the rows of
            an eigenproblem, the bytes of a tensor.
        times: number of executions.
        dtype: of the numbers; "" where that makes no difference.
    """

    resource: Resource
    amount: float
    size: float = 1.0
    times: float = 1.0
    dtype: str = ""

    @property
    def operations(self) -> float:
        """Floating-point operations of all executions, without elementwise ones."""
        return self.times * self.amount if self.resource in ("product", "eigen") else 0.0


@dataclass(frozen=True)
class Machine:
    """Rates and memory of a machine.

    Attributes:
        name: for people.
        device: cpu or cuda.
        rates: by resource, followed by a dtype where that makes a difference.
        device_bytes: memory of the device; None where it is the host's, or not known.
        measured: True where the rates were measured on it, False where by its data sheet.
    """

    name: str
    device: str
    rates: Mapping[str, RatePoints] = field(repr=False)
    device_bytes: int | None = None
    measured: bool = True

    def seconds(self, work: Iterable[Work]) -> float:
        """Time that some work takes, one piece after the other."""
        return sum(w.times * w.amount / self.rate(w) for w in work if w.times * w.amount)

    def rate(self, work: Work) -> float:
        """Amount per second at the size of the work: linear between logarithms, beyond the ends
        the rate of the end.
        """
        points = (
            self.rates.get(f"{work.resource} {work.dtype}".strip()) or self.rates[work.resource]
        )
        if work.size <= points[0][0]:
            return points[0][1]
        for (low, slow), (high, fast) in itertools.pairwise(points):
            if work.size <= high:
                return slow * (fast / slow) ** (math.log(work.size / low) / math.log(high / low))
        return points[-1][1]

    def solve_dtype(self, setting: str) -> torch.dtype:
        """Decide as `choose_solve_dtype` would there, by the rates of large products."""
        if setting != "auto":
            return DTYPES[setting]
        double, single = (self.rates[f"product {n}"][-1][1] for n in ("float64", "float32"))
        return torch.float64 if double >= USEFUL * single else torch.float32

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Machine":
        """Read what `asdict` gave, or a JSON file has of it."""
        rates = {name: tuple(map(tuple, points)) for name, points in record["rates"].items()}
        name, device, size = record["name"], record["device"], record["device_bytes"]
        return cls(name, device, rates, size, record["measured"])


class DataSheet(NamedTuple):
    """Figures of a GPU that its maker publishes.

    Peaks of products are in T/s: float64 on tensor cores where there are some (else a 64th of
    float32), float32 off them, bfloat16 dense. Bandwidths of the memory and of the link to the host
    are in GB/s.
    """

    name: str
    float64: float
    float32: float
    bfloat16: float
    bandwidth: float
    gigabytes: float
    link: float


GPUS = {
    "h100": DataSheet("NVIDIA H100 SXM, 80 GB", 67, 67, 989, 3350, 80, 64),
    "h200": DataSheet("NVIDIA H200 SXM, 141 GB", 67, 67, 989, 4800, 141, 64),
    "a100": DataSheet("NVIDIA A100 SXM, 80 GB", 19.5, 19.5, 312, 2039, 80, 32),
    "l40s": DataSheet("NVIDIA L40S, 48 GB", 1.43, 91.6, 362, 864, 48, 32),
    "rtx4090": DataSheet("NVIDIA GeForce RTX 4090, 24 GB", 1.29, 82.6, 165, 1008, 24, 32),
    "rtx3090": DataSheet("NVIDIA GeForce RTX 3090, 24 GB", 0.556, 35.6, 71, 936, 24, 32),
}
PEAK_SHARE = 0.6
"""Fraction of the peak that large products are taken to reach."""
_EIGEN_SHARE = 0.02
"""Fraction that eigenpairs in float32 reach."""
_BANDWIDTH_SHARE, _LINK_SHARE = 0.7, 0.35
"""Fractions that elementwise work reaches, and copies from memory that is not pinned."""
_FILLING = ((64.0, 0.01), (256.0, 0.1), (1024.0, 0.6), (4096.0, 1.0))
"""How far smaller matrices fill a GPU, by size."""
_HOST_RATES = {"call": 1e5, "read": 1e9, "host": 1.0}
"""Rates of an unknown host: Python launches an operator on a GPU in 10 μs."""


def machine_named(name: str) -> Machine:
    """GPU by the figures of its data sheet; raises OptionError where none of that name is known."""
    if name not in GPUS:
        raise OptionError(f"unknown machine '{name}'; known: {', '.join(GPUS)}")
    sheet = GPUS[name]
    peaks = {"float64": sheet.float64, "float32": sheet.float32,
             "bfloat16": sheet.bfloat16, "float16": sheet.bfloat16}  # fmt: skip
    reached = {f"product {dtype}": PEAK_SHARE * peak for dtype, peak in peaks.items()}
    # Half of an eigenproblem is bound by memory, in any dtype; the arithmetic is that of products.
    reached["eigen float32"] = _EIGEN_SHARE * sheet.float32
    slower = 1 / reached["eigen float32"] + 1 / reached["product float64"]
    reached["eigen float64"] = 1 / slower
    rates = {key: tuple((n, 1e12 * rate * full) for n, full in _FILLING)
             for key, rate in reached.items()}  # fmt: skip
    moved = sheet.bandwidth * 1e9 * _BANDWIDTH_SHARE
    flat = {"elementwise": moved, "link": sheet.link * 1e9 * _LINK_SHARE, **_HOST_RATES}
    rates |= {name: ((1.0, rate),) for name, rate in flat.items()}
    size = int(sheet.gigabytes * 1e9)
    return Machine(sheet.name, "cuda", rates, size, measured=False)


_EDGES = {"cpu": (32, 96, 192, 512, 1024), "cuda": (128, 512, 2048, 8192)}
"""Edges of the matrices; whatever is larger gets the rate of the largest."""
_LARGEST_EIGEN = 2048
_TENSORS = {"cpu": (2**12, 2**16, 2**20, 2**26), "cuda": (2**16, 2**22, 2**26, 2**28)}
"""Bytes of the tensors of elementwise work. Memory that was never used before is far slower."""
_RUNS = 5
"""A rate is the median of so many runs: the program meets neither the best nor the worst moment."""
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
    in `$XDG_CACHE_HOME/coec` or `~/.cache/coec`; `anew` measures them again.
    """
    if not anew:
        try:
            content = json.loads(_file(device)[0].read_text(encoding="utf-8"))
            return Machine.of(content["machine"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # never measured, or by a release that wrote it otherwise
    machine = measure(device, progress)
    store(device, machine)
    return machine


def store(device: torch.device, machine: Machine) -> None:
    """Keep rates for the next time; where no file can be written, they are measured again then."""
    path, identity = _file(device)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({**identity, "machine": asdict(machine)}), "utf-8")
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
            yield f"product {dtype}", n, 2.0 * n**3, partial(torch.matmul, A, A)
            if dtype not in narrow and n <= _LARGEST_EIGEN:
                S = A + A.T
                yield f"eigen {dtype}", n, 14 / 3 * n**3, partial(torch.linalg.eigh, S)
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


def _file(device: torch.device) -> tuple[Path, dict[str, object]]:
    """File that keeps the rates of a device, and what they depend on."""
    identity: dict[str, object] = {
        "layout": _LAYOUT,
        "device": _name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json", identity
