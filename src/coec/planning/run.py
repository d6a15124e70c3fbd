"""A run: what recipe, model and machine decide before any work, what it will take, and whether it
fits in the free memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from coec.allocation.by_importance import Importances
from coec.devices import DTYPES, FreeMemory
from coec.errors import OptionError
from coec.models.dense import Dense
from coec.planning.memory import ComputeConfig, disk, needed_beside, sampled_window
from coec.planning.phases import Phase, phases_of
from coec.planning.plan import Plan
from coec.planning.recipe import Recipe
from coec.settings.parts import SolveDtypeName
from coec.streaming.layers import tokens_per_batch
from coec.streaming.self_text import windows_at_once

OVER = 1.2
"""Estimate over free memory from which a plan is refused: none was planned at more than 1.16 times
what it took (docs/lab/LOG.md)."""
_ROOM_FOR_STATES = 0.8
"""Fraction of a device's free memory that a plan may fill whose hidden states wait there: its
estimates were made on a CPU."""
_CLOSE = 0.9
"""Fraction of the free memory from which a plan is said to be close."""


@dataclass(frozen=True, eq=False)
class Run:
    """Resolved pruning: plans, device and dtypes.

    Attributes:
        candidates: the plans among which validation windows choose, by name; mostly there is one.
        device: where to compute.
        forward: dtype of the forward passes.
        solve: dtype of the iterations of a compensation.
        written: dtype of the written weights.
        states_on_device: True where the hidden states of both models wait on the device that
            computes, False where they wait on the host.
    """

    candidates: Mapping[str, Plan]
    device: torch.device
    forward: torch.dtype
    solve: torch.dtype
    written: torch.dtype
    states_on_device: bool = False

    @classmethod
    def of(
        cls,
        dense: Dense,
        candidates: Mapping[str, Plan],
        device: torch.device,
        solve: torch.dtype,
        *,
        collected: bool = False,
    ) -> "Run":
        """Resolve a run of `Plan.candidates`, for which statistics may be there already.

        Raises:
            OptionError: it does not fit the machine, or its dtypes do not go together.
        """
        name: SolveDtypeName = "float64" if solve == torch.float64 else "float32"
        candidates = {key: _solved_in(plan, name) for key, plan in candidates.items()}
        plan = next(iter(candidates.values()))
        compute = ComputeConfig.of(plan, device, dense.dtype, measured=collected)
        memory = FreeMemory.of(device)
        compute = within(plan, compute, memory)
        check_room(plan, compute, memory)
        forward, written = compute.forward, compute.written
        return cls(candidates, device, forward, DTYPES[name], written, compute.states_on_device)

    @property
    def plan(self) -> Plan:
        """The plan; the first of several candidates."""
        return next(iter(self.candidates.values()))

    @property
    def recipe(self) -> Recipe:
        """The recipe, its defaults filled in."""
        return self.plan.recipe

    @property
    def tokens_per_batch(self) -> int:
        """Number of tokens that are run at once."""
        return tokens_per_batch(self.device, self.plan.dense.hidden)

    def allocated(self, importances: Importances) -> "Run":
        """Return the run whose widths by block are decided by the importance of units."""
        plans = {name: plan.allocated(importances) for name, plan in self.candidates.items()}
        return replace(self, candidates=plans)

    def without(self, blocks: tuple[int, ...]) -> "Run":
        """Return the run that leaves these blocks out."""
        plans = {name: plan.without(blocks, name) for name, plan in self.candidates.items()}
        return replace(self, candidates=plans)

    def choosing(self, name: str) -> "Run":
        """Return the run with one of its candidates alone."""
        return replace(self, candidates={name: self.candidates[name]})

    def briefly(self) -> "Run":
        """Return the run with little reconstruction: enough to compare candidates."""
        plans = {name: plan.briefly() for name, plan in self.candidates.items()}
        return replace(self, candidates=plans)


def _solved_in(plan: Plan, name: SolveDtypeName) -> Plan:
    pruning = replace(plan.recipe.pruning, solve_dtype=name)
    return replace(plan, recipe=replace(plan.recipe, pruning=pruning))


def within(plan: Plan, compute: ComputeConfig, room: FreeMemory) -> ComputeConfig:
    """Set what depends on memory: windows that are sampled together, and where states wait.

    The hidden states of both models wait on a GPU where all phases fit there with them.
    """
    # The model itself is in memory while it samples.
    free = room.computing
    if free is not None:
        free -= plan.parameters_before * compute.forward.itemsize
    at_once = windows_at_once(free, sampled_window(plan, compute))
    compute = replace(compute, at_once=at_once)
    recipe = plan.recipe
    if room.device is None or recipe.runtime.executor == "ray":
        return compute
    if not recipe.reconstruction.sequential:
        return compute
    # States on the device → the phase that needs most there → whether it fits with a margin
    there = replace(compute, states_on_device=True)
    fullest = max(needed_beside(phase.device) for phase in phases_of(plan, there))
    return there if fullest <= _ROOM_FOR_STATES * room.device else compute


def check_room(plan: Plan, compute: ComputeConfig, room: FreeMemory) -> None:
    """Raise OptionError where sums would overflow, or a phase needs more than the free memory."""
    if plan.recipe.reconstruction.reconstruct and compute.forward == torch.float16:
        raise OptionError(
            "reconstruct sums over tokens in the dtype of the forward pass, which overflow in "
            "float16: set forward_dtype=bfloat16 or forward_dtype=float32"
        )
    places = list(_places(plan, compute, room))
    if not places:
        return
    # The tightest phase decides, wherever it is.
    name, place, sizes, free = max(places, key=lambda p: needed_beside(p[2]) / max(p[3], 1))
    if (needed := needed_beside(sizes)) > OVER * free:
        raise OptionError(
            f"about {needed / 1e9:.1f} GB of memory are needed ({name}), and {place} has "
            f"{free / 1e9:.1f} GB free: {_advice(plan, compute, sizes)}"
        )


def close_fits(plan: Plan, compute: ComputeConfig, room: FreeMemory) -> tuple[str, ...]:
    """Sentences on memory that a plan all but fills, or may overfill without being refused."""
    fullest: dict[str, tuple[int, str]] = {}
    for name, place, sizes, free in _places(plan, compute, room):
        needed = needed_beside(sizes)
        least = max(_CLOSE * free, fullest.get(place, (0, ""))[0])
        if least < needed <= OVER * free:
            sentence = (
                f"memory is close: about {needed / 1e9:.1f} GB ({name}), and {place} has "
                f"{free / 1e9:.1f} GB free; {_advice(plan, compute, sizes)}"
            )
            fullest[place] = needed, sentence
    return tuple(sentence for _, sentence in fullest.values())


def _places(
    plan: Plan, compute: ComputeConfig, room: FreeMemory
) -> Iterator[tuple[str, str, dict[str, int], int]]:
    """Yield name, place, bytes by purpose and free bytes, for every phase at every place."""
    for phase in phases_of(plan, compute):
        if room.device is not None:
            yield phase.name, "the device", phase.device, room.device
        if room.host is not None:
            yield phase.name, "this machine", phase.host, room.host


def _advice(plan: Plan, compute: ComputeConfig, sizes: dict[str, int]) -> str:
    """Settings that would help most, by the largest purpose."""
    calibration = plan.recipe.calibration
    largest = max((name for name in sizes if name != "program"), key=lambda name: sizes[name])
    shorter = f"a seq_len below {plan.seq_len}"
    settings = [] if compute.device == "cpu" else ["device = cpu"]
    if largest in ("hidden states", "states of allocation"):
        return f"take fewer samples than {calibration.samples}, or {shorter}"
    if largest == "text":
        return "give token ids (.npy), or a shorter text"
    if largest == "fit":
        settings = settings or ["reconstruct = 0 (preset = fast does)"]
        return f"take {shorter}, or set {settings[0]}"
    if largest == "whole model":
        return ", or set ".join(["calibrate on a text, not on self", *settings])
    if largest == "solver" and compute.solve == torch.float64:
        settings.insert(0, "solve_dtype = float32")
    elif largest in ("statistics", "Grams") and calibration.validation:
        settings.insert(0, "guard = false" if calibration.guard_share else "holdout = 0")
    return f"set {', or '.join(settings)}" if settings else "take a machine with more memory"


@dataclass(frozen=True)
class Forecast:
    """Estimate of what a run will take.

    Attributes:
        phases: with their memory and operations.
        output: bytes of the pruned model.
        partial: largest number of bytes of unfinished work beside it.
        alternatives: the other plans among which validation windows choose, by name.
    """

    phases: tuple[Phase, ...]
    output: int
    partial: int
    alternatives: dict[str, Plan]

    @classmethod
    def of(cls, plan: Plan, compute: ComputeConfig) -> "Forecast":
        """Estimate memory and operations of every phase, and disk."""
        candidates = Plan.candidates(plan.model, plan.recipe)
        others = {n: other for n, other in candidates.items() if other.pruned != plan.pruned}
        return cls(tuple(phases_of(plan, compute)), *disk(plan, compute.written), others)

    @property
    def operations(self) -> float:
        """Floating-point operations of all phases."""
        return sum(phase.operations for phase in self.phases)

    @property
    def peak(self) -> tuple[int, int]:
        """Largest memory of any phase, on the device and on the host."""
        return (
            max(sum(phase.device.values()) for phase in self.phases),
            max(sum(phase.host.values()) for phase in self.phases),
        )

    def record(self) -> dict[str, object]:
        """JSON-ready account."""
        memory = {phase.name: {"device": phase.device, "host": phase.host} for phase in self.phases}
        device, host = self.peak
        sizes = {"device": device, "host": host, "total": device + host, "phases": memory}
        return {
            "memory_bytes": sizes,
            "operations": self.operations,
            "disk_bytes": {"output": self.output, "partial": self.partial},
        }
