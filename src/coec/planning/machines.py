"""Machines: the rate of every resource, and the size of the memory.

The GPUs here are known by their makers' data sheets alone: nothing was measured on them.
`coec.planning.measuring` measures this machine.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from coec.devices import DTYPES, USEFUL
from coec.errors import OptionError

Resource = Literal["product", "eigen", "elementwise", "call", "read", "link", "host"]
"""What work needs: matrix products and eigenpairs (operations); elementwise traffic (bytes through
memory); calls of operators; reading and checking weights, and copies between host and GPU (bytes);
anything else on the host (seconds)."""
RatePoints = tuple[tuple[float, float], ...]
"""Sizes, ascending, and the rate at each, in amounts per second."""


@dataclass(frozen=True)
class Work:
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
        measured: True where the rates were measured on it.
        share: fraction of the data sheet's peak that products reach; None where measured.
    """

    name: str
    device: str
    rates: Mapping[str, RatePoints] = field(repr=False)
    device_bytes: int | None = None
    measured: bool = True
    share: float | None = None

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

    def record(self) -> dict[str, Any]:
        """JSON-ready account, which `of` reads."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Machine":
        """Read what `record` gave."""
        rates = {name: tuple(map(tuple, points)) for name, points in record["rates"].items()}
        return cls(**{**record, "rates": rates})


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
    return Machine(sheet.name, "cuda", rates, size, measured=False, share=PEAK_SHARE)
