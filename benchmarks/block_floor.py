"""The least seconds that a block takes on a GPU at the widths of an 8B, counted on a CPU.

    python -m benchmarks.block_floor [--presets paper fast balanced] [--scale 0.125]

Two random blocks as in benchmarks.two_blocks, every width, the windows' length and the vocabulary
scaled, are pruned as a GPU does it: forward passes in bfloat16, SVDs and polar factors by products.
Products, attention and decompositions are counted by what runs them, and scaled back: all grow with
the third power. The floor is their number over what an H200 was measured to do
(docs/lab/PERFORMANCE.md). Elementwise work, copies, launches and Python count as nothing. Numbers
of iterations are those at the small size. What is computed once for a model is halved with the
rest; the training of the last block on predictions is left out. The last column has the bytes of
all tensors at their peak, on the device and on the host, which grow with the square, but for panels
of fixed numbers of rows. Rows are in benchmarks/results/block_floor.json.
"""

import argparse
import contextlib
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

import coec.devices
import coec.linalg.decompose
import coec.solve
import coec.types
from benchmarks import record, two_blocks
from benchmarks.meter import OPERATORS, Counter

_aten = torch.ops.aten
RATES = {torch.bfloat16: 783e12, torch.float32: 413e12, torch.float64: 64.6e12}
"""Operations a second of a large product on an H200; float32 is TF32, as in preconditioners."""
_SLOWER = {
    _aten._linalg_eigh.default: 6.2e12,
    _aten.linalg_cholesky_ex.default: 3.9e12,
    _aten.cholesky_inverse.default: 13e12,
}
"""The same of decompositions in float64 at 14,336 rows: 2.22, 0.25 and 0.15 s."""
PARTS = {
    "layers": "passes", "head": "predictions", "elimination": "elimination",
    "decompose": "decompositions", "conjugate": "descent",
    "right": "descent", "frame": "descent", "spd": "solves",
}  # fmt: skip
"""What runs an operator, by the module of the package that it is called from."""
REST = "errors and the rest"


def main(arguments: list[str] | None = None) -> None:
    """Count every preset, save the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--presets", nargs="+", default=["paper", "fast", "balanced"])
    parser.add_argument("--scale", type=float, default=1 / 8, help="of all sizes but the windows")
    parser.add_argument("--samples", type=int, default=128)
    chosen = parser.parse_args(arguments)
    rows = []
    for preset in chosen.presets:
        rows.append(counted(preset, chosen.scale, chosen.samples))
        record.save("block_floor", arguments, {"rows": rows})
    print(describe(rows))


def _slowed(count: Callable[..., float], rate: float) -> Callable[..., float]:
    """Count as many operations as a product has in the time."""
    return lambda *args: RATES[torch.float64] / rate * count(*args)


class Count(Counter):
    """Adds up the floor by part, and the bytes of tensors."""

    def __init__(self) -> None:
        super().__init__(
            RATES, OPERATORS | {f: _slowed(OPERATORS[f], rate) for f, rate in _SLOWER.items()}
        )
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.held = self.peak = 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count, run the operator, and hold what comes out."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        tree_map_only(Tensor, self._hold, out)
        return out

    def add(self, operations: float, dtype: torch.dtype, part: str | None = None) -> None:
        """Operations in one dtype, and the seconds that they take, of a part."""
        self.seconds[part or _part()] += operations / self.rates[dtype]

    def _hold(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor's storage for as long as that lives."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._storages:
            self._storages[key] = storage.nbytes()
            self.held += self._storages[key]
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.held -= self._storages.pop(key)


def _part() -> str:
    """Return what the package is doing, by the modules on the stack."""
    modules: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "coec" in path.parts:
            modules.append(path.stem)
        frame = frame.f_back
    if "block_training" in modules:
        return "training"
    return next((PARTS[module] for module in modules if module in PARTS), REST)


@contextlib.contextmanager
def as_on_a_gpu(count: Count, tokens_at_once: int) -> Iterator[None]:
    """Let the package take the ways that it takes on a GPU, and count sums as made there."""

    def summed_products(a: Tensor, x: Tensor) -> Tensor:
        parts = 1 if a.dtype == x.dtype else coec.devices._PARTS
        count.add(parts * 2.0 * a.numel() * x.shape[1], torch.bfloat16, "sums")
        with _disable_current_modes():
            return a.T.float() @ x.float()

    def widens(device: torch.device, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    with contextlib.ExitStack() as stack:
        for module, name, other in (
            (coec.linalg.decompose, "by_products", lambda A: True),
            (coec.types, "widens", widens),
            (coec.types, "summed_products", summed_products),
            (coec.streams.streams, "summed_products", summed_products),
            (coec.devices, "TOKENS_PER_BATCH", tokens_at_once),
        ):
            stack.enter_context(mock.patch.object(module, name, other))
        yield


def counted(preset: str, scale: float, samples: int) -> dict[str, Any]:
    """Return a block's seconds by part at the whole widths, and the bytes of its tensors."""
    scale = two_blocks.hidden_size(scale) / two_blocks.hidden_size(1)
    count, length = Count(), max(8, round(2048 * scale))
    # The last of a model's blocks alone is trained on predictions.
    without = mock.patch.object(coec.solve, "PREDICTION_PASSES", 0)
    with without, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        vocabulary = max(64, round(two_blocks.VOCABULARY * scale))
        dense, tokens = two_blocks.made(work, scale, samples, length, torch.bfloat16, vocabulary)
        with as_on_a_gpu(count, round(8192 * scale)), count:
            two_blocks.pruned(dense, work / "out", tokens, preset, samples, length, "cpu",
                              forward_dtype="bfloat16")  # fmt: skip
    blocks = two_blocks.BLOCKS
    by_part = sorted(count.seconds.items(), key=lambda item: -item[1])
    seconds = {part: s / blocks / scale**3 for part, s in by_part}
    return {"preset": preset, "seconds": seconds, "bytes": count.peak / scale**2}


def describe(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    parts = list(dict.fromkeys(part for row in rows for part in row["seconds"]))
    header = ["one block, s", *parts, "floor", "tensors, GB"]
    lines = [
        [
            row["preset"], *(f"{row['seconds'].get(part, 0):.2f}" for part in parts),
            f"{sum(row['seconds'].values()):.1f}", f"{row['bytes'] / 1e9:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return record.table(header, lines)


if __name__ == "__main__":
    main()
