"""Peak memory of a piece of work; psutil knows the peak of no such piece on Linux."""

import contextlib
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Start a new measurement."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # resets VmHWM (proc(5)); without it the peak is the process's


def peak(device: torch.device) -> int | None:
    """Return the bytes allocated on a GPU, or resident on a CPU; None where they are unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not sys.platform.startswith("linux"):
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
