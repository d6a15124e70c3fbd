"""Refusal of runs that do not fit in the free memory, with the setting that would help."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from coec.devices import FreeMemory
from coec.errors import OptionError
from coec.planning.compute import ComputeConfig
from coec.planning.memory import lower_bound, sampled_window
from coec.planning.phases import phases_of
from coec.planning.sizes import PlanSizes
from coec.streaming.self_text import windows_at_once

_CLOSE = 0.9
"""Fraction of the free memory from which a plan is said to be close."""


def within(plan: PlanSizes, compute: ComputeConfig, room: FreeMemory) -> ComputeConfig:
    """Limit the windows that are sampled together to what the memory holds beside the model."""
    free = room.computing
    if free is not None:
        free -= plan.parameters_before * compute.forward.itemsize
    return replace(compute, at_once=windows_at_once(free, sampled_window(plan, compute)))


def check_room(plan: PlanSizes, compute: ComputeConfig, room: FreeMemory) -> None:
    """Raise OptionError where sums would overflow, or a phase needs more than the free memory."""
    if plan.recipe.reconstruction.reconstruct and compute.forward == torch.float16:
        raise OptionError(
            "reconstruct sums over tokens in the dtype of the forward pass, which overflow in "
            "float16: set forward_dtype=bfloat16 or forward_dtype=float32"
        )
    for name, place, sizes, free in _places(plan, compute, room):
        if (needed := lower_bound(sizes)) > free:
            raise OptionError(
                f"{name} needs {needed / 1e9:.1f} GB of memory at least, and {place} has "
                f"{free / 1e9:.1f} GB free: {_advice(plan, compute, sizes)}"
            )


def close_fits(plan: PlanSizes, compute: ComputeConfig, room: FreeMemory) -> tuple[str, ...]:
    """Sentences on memory that a plan all but fills, or may overfill."""
    fullest: dict[str, tuple[int, str]] = {}
    for name, place, sizes, free in _places(plan, compute, room):
        needed = sum(size for purpose, size in sizes.items() if purpose != "program")
        if needed > max(_CLOSE * free, fullest.get(place, (0, ""))[0]):
            fullest[place] = (
                needed,
                (
                    f"memory is close: {name} takes about {needed / 1e9:.1f} GB, and {place} has "
                    f"{free / 1e9:.1f} GB free; {_advice(plan, compute, sizes)}"
                ),
            )
    return tuple(sentence for _, sentence in fullest.values())


def _places(
    plan: PlanSizes, compute: ComputeConfig, room: FreeMemory
) -> Iterator[tuple[str, str, dict[str, int], int]]:
    """Yield name, place, bytes by purpose and free bytes, for every phase at every place."""
    for phase in phases_of(plan, compute):
        if room.device is not None:
            yield phase.name, "the device", phase.device, room.device
        if room.host is not None:
            yield phase.name, "this machine", phase.host, room.host


def _advice(plan: PlanSizes, compute: ComputeConfig, sizes: dict[str, int]) -> str:
    """Settings that would help most, by the largest purpose."""
    calibration = plan.recipe.calibration
    largest = max((name for name in sizes if name != "program"), key=lambda name: sizes[name])
    shorter = f"a seq_len below {plan.seq_len}"
    settings = [] if compute.device == "cpu" else ["device = cpu"]
    if largest == "hidden states":
        return f"take fewer samples than {calibration.samples}, or {shorter}"
    if largest == "text":
        return "give token ids (.npy), or a shorter text"
    if largest == "fit":
        settings = settings or ["reconstruct = 0 (preset = fast does)"]
        return f"take {shorter}, or set {settings[0]}"
    if largest == "whole model" and not calibration.added:
        return ", or set ".join(["calibrate on a text, not on self", *settings])
    if largest == "whole model":
        settings.insert(0, "self_samples = 0")
    elif largest == "solver" and compute.solve == torch.float64:
        settings.insert(0, "solve_dtype = float32")
    elif largest in ("statistics", "Grams") and calibration.held_out:
        settings.insert(0, "guard = false" if calibration.judging else "holdout = 0")
    return f"set {', or '.join(settings)}" if settings else "take a machine with more memory"
