"""Memory that is free, here and on a device, and memory that is handed back."""

import ctypes
import functools
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from coec.devices import at_hand

NO_LIMIT = 2**60
"""A limit of a control group from here on is none."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes.

    Attributes:
        device: on the device; None where the host computes, or other machines do.
        host: of memory that this process can still take; None where nobody says.
    """

    device: int | None
    host: int | None

    @classmethod
    def of(cls, device: torch.device) -> "FreeMemory":
        """What there is now, the limits of control groups and of this process included."""
        here = at_hand(device)
        free = torch.cuda.mem_get_info(here)[0] if here.type == "cuda" else None
        found = [one for one in (_available(), _of_cgroup(), _of_process()) if one is not None]
        return cls(free, min(found, default=None))

    @property
    def computing(self) -> int | None:
        """Where the work is done: on the device, or here."""
        return self.host if self.device is None else self.device


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


def hand_back() -> None:
    """Hands freed memory back to the system, where glibc allocates it; called behind every block.

    glibc keeps freed tensors of up to 32 MiB for later ones, in pieces that those of the next block
    do not fit: without this a process grows with the number of blocks. A threshold from which it
    keeps nothing would be a setting of the whole process, and make new pages for every tensor.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """malloc_trim(3); None where the C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
