"""Whether a run fits: what memory there is, and which option would help where it does not."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coec.devices import at_hand
from coec.errors import OptionError
from coec.planning.how import How
from coec.planning.memory import memory

if TYPE_CHECKING:
    from coec.planning.plan import Plan

CLOSE = 0.9
"""A plan that takes more of what there is than this is said to be close."""
NO_LIMIT = 2**60
"""A limit of a control group from here on is none."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Free bytes.

    Attributes:
        device: on the device; None where the host computes, or other machines do.
        host: of memory that this process can still take; None where nobody says.
    """

    device: int | None
    host: int | None

    @classmethod
    def of(cls, device: torch.device) -> "Room":
        """What there is now, the limits of control groups and of this process included."""
        here = at_hand(device)
        free = torch.cuda.mem_get_info(here)[0] if here.type == "cuda" else None
        found = [one for one in (_available(), _of_cgroup(), _of_process()) if one is not None]
        return cls(free, min(found, default=None))


def check_room(plan: "Plan", how: How, room: Room) -> None:
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


def close(plan: "Plan", how: How, room: Room) -> tuple[str, ...]:
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


def _advice(plan: "Plan", how: How, sizes: dict[str, int]) -> str:
    """What would help most."""
    calibration = plan.recipe.calibration
    largest = max((name for name in sizes if name != "program"), key=lambda name: sizes[name])
    elsewhere = "" if how.device == "cpu" else "set device = cpu"
    if largest == "hidden states":
        return f"take fewer samples than {calibration.samples}, or a seq_len below {plan.seq_len}"
    if largest == "whole model":
        return "set sampled = 0" if calibration.added else "calibrate on a text, not on self"
    if largest == "text":
        return "give token ids (.npy), or a shorter text"
    if largest == "solver" and how.solve == torch.float64:
        return "set solve_dtype = float32" + (", or device = cpu" if elsewhere else "")
    if largest in ("statistics", "Grams") and calibration.holdout:
        return "set holdout = 0" + (", or device = cpu" if elsewhere else "")
    if largest == "fit" and elsewhere:
        return f"take a seq_len below {plan.seq_len}, or {elsewhere}"
    if largest == "fit":
        return f"take a seq_len below {plan.seq_len}, or set reconstruct = 0 (preset = fast does)"
    return elsewhere or "take a machine with more memory"


def _available() -> int | None:
    """What the kernel says that programs can still take."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kilobytes) * 1024 for kilobytes in found), None)


def _of_cgroup(root: Path = CGROUP) -> int | None:
    """What a control group leaves; file pages that it can drop count as free."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (root / limit).read_text().strip()
            taken = int((root / used).read_text())
            stat = (root / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        if most == "max" or int(most) >= NO_LIMIT:
            continue
        pages = next((int(line.split()[1]) for line in stat if line.split()[0] == dropped), 0)
        return max(0, int(most) - taken + pages)
    return None


def _of_process() -> int | None:
    """What a limit on this process's data leaves."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if most == resource.RLIM_INFINITY:
        return None
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    return max(0, most - next(found, 0))
