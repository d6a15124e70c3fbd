"""Whether a run fits: what memory there is, and which option would help where it does not."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from coec.devices import FreeMemory
from coec.errors import OptionError
from coec.planning.how import ComputeConfig
from coec.planning.memory import memory, written_window
from coec.streaming.self_text import windows_at_once

if TYPE_CHECKING:
    from coec.planning.plan import Plan

CLOSE = 0.9
"""A plan that takes more of what there is than this is said to be close."""


def within(plan: "Plan", how: ComputeConfig, room: FreeMemory) -> ComputeConfig:
    """The same, with as many windows sampled at once as there is memory for beside the model."""
    free = room.computing
    if free is not None:
        free -= plan.parameters_before * how.forward.itemsize
    return replace(how, at_once=windows_at_once(free, written_window(plan, how)))


def check_room(plan: "Plan", how: ComputeConfig, room: FreeMemory) -> None:
    """Raises OptionError where even the least that a phase takes is more than there is."""
    for held in memory(plan, how):
        device, host = held.least
        for needed, there, where, sizes in (
            (device, room.device, "the device", held.device),
            (host, room.host, "this machine", held.host),
        ):
            if there is not None and needed > there:
                raise OptionError(
                    f"{held.phase} needs {needed / 1e9:.1f} GB of memory at least, and {where} has "
                    f"{there / 1e9:.1f} GB free: {_advice(plan, how, sizes)}"
                )


def close(plan: "Plan", how: ComputeConfig, room: FreeMemory) -> tuple[str, ...]:
    """A sentence for every part of the memory that a plan all but fills, or may overfill."""
    found = []
    phases = memory(plan, how)
    for where, there, size in (
        ("the device", room.device, lambda held: held.device),
        ("this machine", room.host, lambda held: held.host),
    ):
        if there is None:
            continue
        fullest = max(phases, key=lambda held: _beside(size(held)))
        needed = _beside(size(fullest))
        if needed > CLOSE * there:
            found.append(
                f"memory is close: {fullest.phase} takes about {needed / 1e9:.1f} GB, and {where} "
                f"has {there / 1e9:.1f} GB free; {_advice(plan, how, size(fullest))}"
            )
    return tuple(found)


def _beside(sizes: dict[str, int]) -> int:
    """What is taken beside the program, which is there already."""
    return sum(size for purpose, size in sizes.items() if purpose != "program")


def _advice(plan: "Plan", how: ComputeConfig, sizes: dict[str, int]) -> str:
    """What would help most."""
    calibration = plan.recipe.calibration
    largest = max((name for name in sizes if name != "program"), key=lambda name: sizes[name])
    elsewhere = "" if how.device == "cpu" else "set device = cpu"
    if largest == "hidden states":
        return f"take fewer samples than {calibration.samples}, or a seq_len below {plan.seq_len}"
    if largest == "whole model":
        less = "set self_samples = 0" if calibration.added else "calibrate on a text, not on self"
        return f"{less}, or {elsewhere}" if elsewhere else less
    if largest == "text":
        return "give token ids (.npy), or a shorter text"
    if largest == "solver" and how.solve == torch.float64:
        return "set solve_dtype = float32" + (", or device = cpu" if elsewhere else "")
    if largest in ("statistics", "Grams") and calibration.held_out:
        return ("set guard = false" if calibration.judging else "set holdout = 0") + (
            ", or device = cpu" if elsewhere else ""
        )
    if largest == "fit" and elsewhere:
        return f"take a seq_len below {plan.seq_len}, or {elsewhere}"
    if largest == "fit":
        return f"take a seq_len below {plan.seq_len}, or set reconstruct = 0 (preset = fast does)"
    return elsewhere or "take a machine with more memory"
