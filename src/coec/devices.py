"""Devices, and the dtypes in which work is done there."""

import platform
import resource
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from coec import __version__
from coec.errors import OptionError
from coec.settings import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


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
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise OptionError(f"device '{device}' cannot be used: {reason}") from error
    return chosen


def choose_forward_dtype(
    asked: str | None, stored: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of the dense forward pass; see `Calibration.forward_dtype`."""
    if asked is not None:
        return DTYPES[asked]
    if device.type == "cpu" and stored != torch.float64:
        return torch.float32
    return stored


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
