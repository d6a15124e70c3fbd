"""Devices: dtypes, products, free memory and its peak, and the versions that computed a result."""

import ctypes
import functools
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import OptionError, first_line
from coec.version import __version__

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}

USEFUL = 1 / 8
"""Lowest rate of float64 products, relative to float32, at which compensation is in float64.

The rate is 1 on an A100, H100 or H200, 1/2 on a B200 and a CPU, and 1/32 or 1/64 on a consumer
card: none lies near the limit, where an imprecise measurement would decide.
"""
_ROWS, _CPU_ROWS = 4096, 1024
"""Rows of the square matrices whose product is timed, which takes a fraction of a second."""
_PARTS = 3
"""Numbers of bfloat16, of 8 binary digits each, whose sum is any number of float32, of 24."""
AHEAD = 2
"""Batches whose work may be going on when the next is copied to a GPU."""
LOGITS_PER_PASS = 2**23
"""Logits held at once: in float32 no more than glibc keeps for the next ones (`hand_back`)."""
TOKENS_PER_BATCH = 8192
"""Tokens that are run at once on a CPU."""
NUMBERS_PER_BATCH = 2**25
"""Numbers of the hidden states that are run at once on a GPU: 8192 tokens of a hidden size of 4096.
More of a narrow model, whose kernels take longer to launch than to run: up to eight times as many.
"""
_NO_LIMIT = 2**60
"""Bytes from which a control group's limit stands for no limit."""
_CGROUP = Path("/sys/fs/cgroup")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configurations."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(config: Mapping[str, object]) -> torch.dtype:
    """The weights' dtype that a configuration declares; float32 if it declares none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return DTYPES.get(name.removeprefix("torch."), torch.float32)


def choose_device(device: str) -> torch.device:
    """Resolve `auto` to CUDA if there is one; raises OptionError for a missing device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.ones(1, device=chosen).item()  # a device that holds no data, such as meta, fails
    except Exception as error:  # missing backends raise errors of many kinds
        reason = first_line(error)
        raise OptionError(f"device '{device}' cannot be used: {reason}") from error
    return chosen


def choose_forward_dtype(
    name: str | None, stored: torch.dtype, device: torch.device, *, summed: bool = False
) -> torch.dtype:
    """Choose the dtype of the dense forward pass; see the setting `forward_dtype`.

    `summed` tells that a fit sums over tokens in it, which would overflow in float16.
    """
    if name is not None:
        return DTYPES[name]
    if device.type == "cpu" and stored != torch.float64:
        return torch.float32
    return torch.bfloat16 if summed and stored == torch.float16 else stored


def choose_solve_dtype(device: torch.device) -> torch.dtype:
    """Choose the dtype of a compensation's iterations.

    It is float64 on a CPU, and elsewhere wherever it multiplies at a useful rate, which is
    measured once in a process.
    """
    if device.type == "cpu" or double_rate(device) >= USEFUL:
        return torch.float64
    return torch.float32


def tokens_per_batch(device: torch.device, hidden: int) -> int:
    """Return how many tokens of a hidden size are run at once."""
    if device.type == "cpu":
        return TOKENS_PER_BATCH
    return min(NUMBERS_PER_BATCH // hidden, 8 * TOKENS_PER_BATCH)


def tokens_per_pass(vocabulary: int) -> int:
    """Return how many tokens' logits are held at once."""
    return max(1, LOGITS_PER_PASS // vocabulary)


@functools.cache
def double_rate(device: torch.device) -> float:
    """Rate of float64 matrix products relative to float32; 0 on a device without float64."""
    try:
        return product_rate(device, torch.float64) / product_rate(device, torch.float32)
    except (TypeError, RuntimeError):  # no float64 at all, as on Apple's devices
        return 0.0


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product: the fastest of three, after one that loads the
    library.
    """
    rows = _CPU_ROWS if device.type == "cpu" else _ROWS
    A = torch.ones(rows, rows, dtype=dtype, device=device)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        float((A @ A)[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - began)
    return 2 * rows**3 / min(seconds[1:])


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


def versions() -> dict[str, str]:
    """Return the versions that all machines of a run must share."""
    return {"coec": __version__, "torch": torch.__version__}


def computed_by(device: torch.device) -> dict[str, str]:
    """The environment that, like the settings, determines the bits of a result."""
    threads = {"threads": str(torch.get_num_threads())} if device.type == "cpu" else {}
    return {"coec": __version__, **environment(device.type), **threads}


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes.

    Attributes:
        device: memory of the device; None unless it is a CUDA device.
        host: memory that this process can still take; None if unknown.
    """

    device: int | None
    host: int | None

    @classmethod
    def of(cls, device: torch.device) -> "FreeMemory":
        """Read the free memory, within the limits of control groups and of this process."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        limits = (psutil.virtual_memory().available, _of_cgroup(), _of_process())
        return cls(free, min(limit for limit in limits if limit is not None))

    @property
    def computing(self) -> int | None:
        """Free memory of the device that computes, or of the host if that does."""
        return self.host if self.device is None else self.device


def _of_cgroup(root: Path = _CGROUP) -> int | None:
    """Free bytes of a control group; file pages that it can drop count as free."""
    for limit_file, used_file, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / used_file).read_text())
            stat = (root / limit_file).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= _NO_LIMIT:
            continue
        pages = next((int(line.split()[1]) for line in stat if line.split()[0] == droppable), 0)
        return max(0, int(limit) - used + pages)
    return None


def _of_process() -> int | None:
    """Free bytes under a limit on this process's data (`ulimit -d`)."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - getattr(psutil.Process().memory_info(), "data", 0))


def resident_bytes() -> int:
    """Memory that this process takes by now: the interpreter, torch and the other libraries."""
    return psutil.Process().memory_info().rss


def hand_back() -> None:
    """Return freed memory to the system, where glibc allocates it; called after every block.

    glibc keeps freed tensors of up to 32 MiB for later ones, in pieces that do not fit tensors of
    the next block: without this call a process grows with the number of blocks. The threshold from
    which glibc keeps nothing is a setting of the whole process, and new pages would be made for
    every tensor.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Load malloc_trim(3); None if the C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all entries are finite. Extremes propagate NaN; a tensor of flags would take
    ten times as long.
    """
    return tensor.numel() == 0 or bool(torch.stack(tensor.aminmax()).isfinite().all())


def summed_products(a: Float[Tensor, "n m"], x: Float[Tensor, "n d"]) -> Float[Tensor, "m d"]:
    """`aᵀ x` with the products of all digits and sums in float32; in float64 where one has that.

    Products of narrow numbers are exact in float32. A CUDA device multiplies those on tensor cores
    as they are, and float32 rows times bfloat16 ones as three such products, since `a = a₁ + a₂ +
    a₃` in bfloat16. Elsewhere narrow numbers are converted first.
    """
    if a.dtype == x.dtype and widens(x.device, x.dtype):
        return torch.mm(a.T, x, out_dtype=torch.float32)
    if a.dtype == torch.float32 and x.dtype == torch.bfloat16 and widens(x.device, x.dtype):
        total = torch.zeros(a.shape[1], x.shape[1], device=a.device)
        for _ in range(_PARTS):
            part = a.to(x.dtype)
            total += torch.mm(part.T, x, out_dtype=torch.float32)
            a = a - part
        return total
    wide = torch.promote_types(torch.promote_types(a.dtype, x.dtype), torch.float32)
    return a.T.to(wide) @ x.to(wide)


@functools.cache
def widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies a narrow dtype into float32: CUDA since torch 2.8."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones = torch.ones(8, 8, dtype=dtype, device=device)
    try:
        return torch.mm(ones, ones, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):  # an older torch, or a device without such products
        return False
