"""What a run will take, phase by phase: memory, operations, time, disk."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coec.planning.how import ComputeConfig
from coec.planning.machines import Machine
from coec.planning.memory import SHARD_BYTES, Held, memory
from coec.planning.phases import Length, Phase, phases

if TYPE_CHECKING:
    from coec.planning.plan import Plan

MEASURED, FROM_SHEET = 1.2, 2.0
"""By what factor a time may be off where the machine was measured, and where a data sheet stands
for it; the steps of descents come on top."""
BESIDE = 2**24
"""Bytes of what is written beside the weights."""


@dataclass(frozen=True)
class Seconds:
    """An estimated time: the middle, and what it may lie between."""

    least: float
    typical: float
    most: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.least + other.least, self.typical + other.typical, self.most + other.most
        )

    def __str__(self) -> str:
        return spread(self.typical, self.least, self.most)


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Attributes:
        phases: with their work.
        held: memory, by phase.
        machine: by whose rates times are estimated; None for no times.
        seconds: by phase; empty without a machine.
        output: bytes of the pruned model.
        partial: bytes of unfinished work beside it, at most.
    """

    phases: tuple[Phase, ...]
    held: tuple[Held, ...]
    machine: Machine | None
    seconds: dict[str, Seconds]
    output: int
    partial: int

    @classmethod
    def of(cls, plan: "Plan", how: ComputeConfig, machine: Machine | None = None) -> "Forecast":
        """Of a plan, done in one way, by the rates of a machine."""
        made = {length: phases(plan, how, length) for length in _LENGTHS}
        output, partial = disk(plan, how.written)
        return cls(
            tuple(made["typical"]), tuple(memory(plan, how)), machine,
            {} if machine is None else _seconds(machine, made), output, partial,
        )  # fmt: skip

    @property
    def total(self) -> Seconds:
        """Of all phases."""
        return sum(self.seconds.values(), Seconds(0.0, 0.0, 0.0))

    @property
    def peak(self) -> tuple[int, int]:
        """The most that any phase holds on the device, and on the host."""
        return (
            max(sum(held.device.values()) for held in self.held),
            max(sum(held.host.values()) for held in self.held),
        )

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        found: dict[str, Any] = {
            "memory_bytes": {
                "device": self.peak[0],
                "host": self.peak[1],
                "total": sum(self.peak),
                "phases": {
                    held.phase: {"device": held.device, "host": held.host} for held in self.held
                },
            },
            "operations": {phase.name: phase.operations for phase in self.phases},
            "disk_bytes": {"output": self.output, "partial": self.partial},
        }
        if self.machine is not None:
            total = self.total
            found["time"] = {
                "machine": self.machine.name,
                "measured": self.machine.measured,
                "share_of_peak": self.machine.share,
                "seconds": total.typical,
                "between": [total.least, total.most],
                "phases": {name: one.typical for name, one in self.seconds.items()},
            }
        return found


_LENGTHS: tuple[Length, ...] = ("least", "typical", "most")


def _seconds(machine: Machine, made: dict[Length, list[Phase]]) -> dict[str, Seconds]:
    off = MEASURED if machine.measured else FROM_SHEET
    least, typical, most = (made[length] for length in _LENGTHS)
    return {
        phase.name: Seconds(
            machine.seconds(low.work) / off,
            machine.seconds(phase.work),
            machine.seconds(high.work) * off,
        )
        for low, phase, high in zip(least, typical, most, strict=True)
    }


def disk(plan: "Plan", written: torch.dtype) -> tuple[int, int]:
    """Bytes of the pruned model with what goes beside it, and of unfinished work at most.

    Blocks go when the shard that holds them is durable, so that only one shard is there twice.
    """
    output = int(plan.parameters_after * written.itemsize * 1.01)
    return output, min(output, SHARD_BYTES) + BESIDE


def readable(seconds: float) -> str:
    """A duration in the unit that reads best."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def spread(typical: float, least: float, most: float) -> str:
    """A duration and what it may lie between, in one unit: `12 min (8–18)`."""
    unit, size = next(
        ((unit, size) for unit, size in (("d", 86400), ("h", 3600), ("min", 60))
         if typical >= size),
        ("s", 1),
    )  # fmt: skip
    shown = [
        f"{value / size:.{0 if value / size >= 10 else 1}f}" for value in (typical, least, most)
    ]
    return f"{shown[0]} {unit} ({shown[1]}–{shown[2]})"
