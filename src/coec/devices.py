"""Devices, and the dtypes in which work is done there."""

import functools
import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from coec import __version__
from coec.errors import OptionError, first_line
from coec.settings import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}

USEFUL = 1 / 8
"""The least rate of float64 products, relative to float32, at which the compensation is in float64.

All of it is usual on an A100, H100 or H200, half of it on a B200 and a CPU, 1/32 or 1/64 on a
consumer card: nothing lies near the limit, where a measurement that is somewhat off would decide.
"""
PRODUCT = 4096
"""Rows of the square matrices that are multiplied to find out."""


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """The weights' dtype as the configuration declares it, float32 where it does not."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return DTYPES.get(name.removeprefix("torch."), torch.float32)


def resident_bytes() -> int:
    """What this process takes by now: the interpreter, torch and the other libraries."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the most that it ever took, in bytes on a Mac
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one; raises OptionError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.ones(1, device=chosen).item()  # a device that holds no data, such as meta, fails
    except Exception as error:  # backends that are not there raise errors of many kinds
        reason = first_line(error)
        raise OptionError(f"device '{device}' cannot be used: {reason}") from error
    return chosen


def at_hand(device: torch.device) -> torch.device:
    """The device, or the CPU where this process has none like it: a cluster's are elsewhere."""
    there = device.type != "cuda" or torch.cuda.is_available()
    return device if there else torch.device("cpu")


def choose_forward_dtype(
    asked: str | None, stored: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of the dense forward pass; see `Calibration.forward_dtype`."""
    if asked is not None:
        return DTYPES[asked]
    if device.type == "cpu" and stored != torch.float64:
        return torch.float32
    return stored


def choose_solve_dtype(asked: str, device: torch.device) -> torch.dtype:
    """The dtype of the compensation; see `Pruning.solve_dtype`.

    `auto` is float64 on a CPU, and elsewhere wherever it multiplies at a useful rate, which is
    measured once in a process.
    """
    if asked != "auto":
        return DTYPES[asked]
    if device.type == "cpu" or double_rate(device) >= USEFUL:
        return torch.float64
    return torch.float32


@functools.cache
def double_rate(device: torch.device) -> float:
    """How fast a device multiplies matrices in float64, float32 being 1; 0 where it does not."""
    try:
        return _product_seconds(device, torch.float32) / _product_seconds(device, torch.float64)
    except (TypeError, RuntimeError):  # no float64 at all, as on Apple's devices
        return 0.0


def _product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Of one product, the least of three after one that loads the library."""
    A = torch.ones(PRODUCT, PRODUCT, dtype=dtype, device=device)
    found = []
    for _ in range(4):
        began = time.perf_counter()
        float((A @ A)[0, 0])  # waits for the device
        found.append(time.perf_counter() - began)
    return min(found[1:])


def environment(device: str) -> dict[str, str]:
    """Versions and device, for the record."""
    names = ("transformers", "safetensors", "tokenizers")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in names},
        "device": device,
        "machine": platform.machine(),
    }


def computed_by(device: torch.device) -> dict[str, str]:
    """What computes: the bits of a result depend on it as they do on the settings."""
    threads = {"threads": str(torch.get_num_threads())} if device.type == "cpu" else {}
    return {"coec": __version__, **environment(device.type), **threads}
