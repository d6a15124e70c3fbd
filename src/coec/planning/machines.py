"""What machines can do: how fast each kind of work goes there, and how much memory there is.

The machines that are named here are known by their makers' data sheets alone: nothing was measured
on them. `coec.planning.measuring` measures this one.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from coec.devices import DTYPES, USEFUL
from coec.errors import OptionError

Kernel = Literal[
    "product", "attention", "eigh", "svd", "cholesky", "triangular", "elementwise", "reduce",
    "call", "digest", "tokenise", "import", "link",
]  # fmt: skip
"""Kinds of work. Those up to `triangular` are counted in operations, the calls of operators and of
imports in calls, text in characters, and everything else in bytes."""
Points = tuple[tuple[float, float], ...]
"""Sizes, ascending, and the rate at each, in what the kind of work is counted in, per second."""


@dataclass(frozen=True)
class Work:
    """Something that is done so many times.

    Attributes:
        kernel: its kind.
        amount: of one execution, in what the kind is counted in.
        size: what the rate depends on: the geometric mean of a product's three edges, the smaller
            edge of a decomposition, the columns of a head, the bytes of a tensor.
        times: how often.
        dtype: of the numbers; "" where that makes no difference.
    """

    kernel: Kernel
    amount: float
    size: float = 1.0
    times: float = 1.0
    dtype: str = ""

    @property
    def operations(self) -> float:
        """Floating-point operations of all executions, without elementwise ones."""
        return self.times * self.amount if self.kernel in COUNTED else 0.0


COUNTED = ("product", "attention", "eigh", "svd", "cholesky", "triangular")


@dataclass(frozen=True)
class Machine:
    """Rates and memory.

    Attributes:
        name: what it is called.
        device: cpu or cuda.
        rates: by kind of work, with a dtype behind it where that makes a difference.
        device_bytes: memory of the device; None where it is that of the host, or not known.
        measured: whether the rates were measured on it.
        share: of the peak in the data sheet that products are taken to reach; None where measured.
    """

    name: str
    device: str
    rates: Mapping[str, Points] = field(repr=False)
    device_bytes: int | None = None
    measured: bool = True
    share: float | None = None

    def seconds(self, work: Iterable[Work]) -> float:
        """How long some work takes, one piece after the other."""
        return sum(one.times * one.amount / self.rate(one) for one in work)

    def rate(self, work: Work) -> float:
        """Per second, at its size."""
        points = self.rates.get(f"{work.kernel} {work.dtype}".strip())
        return _interpolated(points or self.rates[work.kernel], work.size)

    def solve_dtype(self, asked: str) -> torch.dtype:
        """As `choose_solve_dtype` would decide there: by the rates of large products."""
        if asked != "auto":
            return DTYPES[asked]
        double, single = (self.rates[f"product {n}"][-1][1] for n in ("float64", "float32"))
        return torch.float64 if double >= USEFUL * single else torch.float32

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Machine":
        """What `record` gave."""
        rates = {name: tuple(map(tuple, points)) for name, points in record["rates"].items()}
        return cls(**{**record, "rates": rates})


def _interpolated(points: Points, size: float) -> float:
    """Linear between logarithms; beyond the ends the rate of the end."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return slow * (fast / slow) ** part
    return points[-1][1]


@dataclass(frozen=True)
class DataSheet:
    """What a maker says of a GPU.

    Attributes:
        about: its full name.
        float64, float32, bfloat16: the peak of products, in T/s, float64 on tensor cores where
            there are some, float32 off them, bfloat16 dense.
        bandwidth: of its memory, in GB/s.
        gigabytes: of memory.
        link: to the host, in GB/s.
    """

    about: str
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
"""float64 is a 64th of float32 where there are no tensor cores for it."""
SHARE = 0.6
"""Of the peak that large products are taken to reach."""
SHARES = {"attention": 0.3, "cholesky": 0.2, "triangular": 0.3, "eigh": 0.02, "svd": 0.01}
"""Of the peak, of other kinds of work: half of an eigenproblem is bound by memory. In float64 what
is bound so takes as long as in float32, and the arithmetic as long as products take."""
OF_BANDWIDTH, OF_LINK = 0.7, 0.35
"""Of what the data sheet says: elementwise work, and copies from memory that is not pinned."""
FULL = ((64.0, 0.01), (256.0, 0.1), (1024.0, 0.6), (4096.0, 1.0))
"""How far smaller matrices fill a GPU, by size."""
CALL = 1e-5
"""Seconds in which Python launches one operator on a GPU."""
HOST_RATES = {"digest": 1e9, "tokenise": 1e6, "import": 1 / 8}
"""Bytes and characters per second, and how long imports take, where the host is not known."""


def named(name: str) -> Machine:
    """A machine by its data sheet.

    Raises:
        OptionError: none of that name is known.
    """
    if name not in GPUS:
        raise OptionError(f"unknown machine '{name}'; known: {', '.join(GPUS)}")
    sheet = GPUS[name]
    rates: dict[str, Points] = {}
    peaks = {"float64": sheet.float64, "float32": sheet.float32, "bfloat16": sheet.bfloat16}
    for dtype, peak in {**peaks, "float16": sheet.bfloat16}.items():
        for kernel, share in {"product": SHARE, **SHARES}.items():
            full = FULL if kernel != "attention" else ((1.0, 1.0),)
            reached = peak * share
            if dtype == "float64" and kernel in SHARES:  # what is not arithmetic is no slower
                reached = 1 / (1 / (sheet.float32 * share) + 1 / (peak * SHARE))
            rates[f"{kernel} {dtype}"] = tuple((size, 1e12 * reached * part) for size, part in full)
    moved = ((1.0, sheet.bandwidth * 1e9 * OF_BANDWIDTH),)
    rates |= {"elementwise": moved, "reduce": moved}
    rates |= {"link": ((1.0, sheet.link * 1e9 * OF_LINK),), "call": ((1.0, 1 / CALL),)}
    rates |= {name: ((1.0, rate),) for name, rate in HOST_RATES.items()}
    return Machine(
        sheet.about, "cuda", rates, int(sheet.gigabytes * 1e9), measured=False, share=SHARE
    )
