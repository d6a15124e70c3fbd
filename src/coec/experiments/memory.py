"""The most memory a piece of work held."""

import contextlib
import sys
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Starts a new measurement."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")  # resets VmHWM (proc(5)); without it the peak is the process's


def peak(device: torch.device) -> int | None:
    """Bytes since `reset_peak`: allocated on a GPU, resident on a CPU; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not sys.platform.startswith("linux"):
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
