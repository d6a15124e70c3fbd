"""Forecast of a run: memory, operations and seconds of every phase, and the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from coec.planning.compute import ComputeConfig
from coec.planning.machines import Machine
from coec.planning.memory import SHARD_BYTES
from coec.planning.phases import Phase, phases_of
from coec.planning.sizes import PlanSizes

_MEASURED, _BY_DATA_SHEET = 1.2, 2.0
"""Factors by which a time may be off; the steps of descents come on top."""
_BESIDE_WEIGHTS = 2**24
"""Bytes of the files beside the weights."""


class Seconds(NamedTuple):
    """Estimated time, and the bounds that it may lie between."""

    low: float
    typical: float
    high: float

    def __str__(self) -> str:
        """Show all three in one unit: `12 min (8.0–18)`."""
        units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
        unit = next((unit for unit, size in units.items() if self.typical >= size), "s")
        times = [seconds / units[unit] for seconds in (self.typical, self.low, self.high)]
        typical, low, high = (f"{time:.{0 if time >= 10 else 1}f}" for time in times)
        return f"{typical} {unit} ({low}–{high})"


@dataclass(frozen=True)
class Forecast:
    """Estimate of what a run will take.

    Attributes:
        phases: with their work and memory.
        machine: by whose rates times are estimated; None for no times.
        seconds: by phase; empty without a machine.
        output: bytes of the pruned model.
        partial: largest number of bytes of unfinished work beside it.
    """

    phases: tuple[Phase, ...]
    machine: Machine | None
    seconds: dict[str, Seconds]
    output: int
    partial: int

    @classmethod
    def of(
        cls,
        plan: PlanSizes,
        compute: ComputeConfig,
        machine: Machine | None,
        candidates: Sequence[PlanSizes],
    ) -> "Forecast":
        """Estimate a plan by the rates of a machine; candidates are reconstructed first."""
        efforts = ("least", "typical", "most")
        low, typical, high = (phases_of(plan, compute, candidates, effort) for effort in efforts)
        seconds: dict[str, Seconds] = {}
        if machine is not None:
            off = _MEASURED if machine.measured else _BY_DATA_SHEET
            for phases in zip(low, typical, high, strict=True):
                short, usual, long = (machine.seconds(phase.work) for phase in phases)
                seconds[phases[0].name] = Seconds(short / off, usual, long * off)
        return cls(tuple(typical), machine, seconds, *disk(plan, compute.written))

    @property
    def total(self) -> Seconds:
        """Time of all phases."""
        return Seconds(*map(sum, zip(Seconds(0.0, 0.0, 0.0), *self.seconds.values(), strict=True)))

    @property
    def peak(self) -> tuple[int, int]:
        """Largest memory of any phase, on the device and on the host."""
        return (
            max(sum(phase.device.values()) for phase in self.phases),
            max(sum(phase.host.values()) for phase in self.phases),
        )

    def record(self) -> dict[str, object]:
        """JSON-ready account."""
        memory = {
            phase.name: {"device": phase.device, "host": phase.host}
            for phase in self.phases
            if phase.host
        }
        device, host = self.peak
        sizes = {"device": device, "host": host, "total": device + host, "phases": memory}
        record: dict[str, object] = {
            "memory_bytes": sizes,
            "operations": {phase.name: phase.operations for phase in self.phases},
            "disk_bytes": {"output": self.output, "partial": self.partial},
        }
        if self.machine is not None:
            record["time"] = {
                "machine": self.machine.name,
                "measured": self.machine.measured,
                "share_of_peak": self.machine.share,
                "seconds": self.total.typical,
                "between": [self.total.low, self.total.high],
                "phases": {name: time.typical for name, time in self.seconds.items()},
            }
        return record


def disk(plan: PlanSizes, written: torch.dtype) -> tuple[int, int]:
    """Estimate bytes of the pruned model's folder, and of unfinished work at its largest.

    Blocks are removed once the shard that holds them is durable, so only one shard is there twice.
    """
    output = int(plan.parameters_after * written.itemsize * 1.01)
    return output, min(output, SHARD_BYTES) + _BESIDE_WEIGHTS
