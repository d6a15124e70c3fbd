"""Block reconstruction at full width: seconds and operations of one Gauss-Newton step of an MLP.

    python -m benchmarks.reconstruction [--hidden 4096] [--width 10036] [--tokens 1024]

The MLP of a block of Llama-3.1-8B's shape with 30 % of its channels removed, random weights, and
hidden states with a power-law spectrum. Timed apart: the gradient, the Kronecker factors, their
eigendecompositions, an iteration of conjugate gradients (a product with `Jᵀ w J`) by
differentiation, and the same by hand with activations kept, which must agree with it. Operations
are those of products with the weights, each three matrices large: eleven thirds for an iteration
by forward and reverse mode, eight by hand.
"""

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks import record
from coec.reconstruction import (
    Batch,
    DifferentiatedProducts,
    GatedMlp,
    GatedProducts,
    LeastSquares,
)
from coec.reconstruction.least_squares import Theta
from coec.reconstruction.preconditioner import Preconditioner

LAYERS, TEXT = 32, 262_144
"""Of Llama-3.1-8B, and calibration tokens by default."""
RATE = 4e14
"""Operations per second that a data-sheet GPU sustains in bfloat16 (an H100: 40 % of its peak)."""


class GatedMLP(nn.Module):
    """RMSNorm, gate, up and down projection, added to the input."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(h)
        out: Tensor = h + self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def main(arguments: list[str] | None = None) -> None:
    """Prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--width", type=int, default=10036)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    chosen = parser.parse_args(arguments)
    print(f"Block reconstruction. {record.header()}\n", flush=True)
    found = measure(
        chosen.hidden, chosen.width, chosen.tokens, chosen.device, getattr(torch, chosen.dtype)
    )
    record.save("reconstruction", arguments, found)
    print(describe(found))


NAMES = ("gate", "up", "down")


def problem(
    hidden: int, width: int, tokens: int, place: torch.device, dtype: torch.dtype
) -> tuple[LeastSquares, LeastSquares, Theta, Theta]:
    """Least squares on a batch of a gated MLP, by differentiation and by hand; its weights, and a
    direction in their space.

    Random numbers are drawn on the CPU: every device gets the same problem.
    """
    torch.manual_seed(0)
    module = GatedMLP(hidden, width).requires_grad_(requires_grad=False)
    scales = torch.arange(1, hidden + 1) ** -0.5
    inputs = torch.randn(1, tokens, hidden) * scales
    targets = torch.randn_like(inputs)
    weights = {name: module.get_parameter(f"{name}.weight") for name in NAMES}
    delta = {name: (torch.randn_like(w) * w.std()).to(place) for name, w in weights.items()}
    module = module.to(place, dtype)
    theta = {name: module.get_parameter(f"{name}.weight").float() for name in NAMES}

    def function(given: Theta, h: Tensor) -> Tensor:
        own = {f"{name}.weight": value for name, value in given.items()}
        out: Tensor = functional_call(module, own, (h,))
        return out

    modules = {name: module.get_submodule(name) for name in NAMES}
    batch = Batch(
        inputs.to(place, dtype), targets.to(place, dtype), torch.ones(1, tokens, device=place)
    )
    plain = DifferentiatedProducts(function, modules, [[batch]], place)
    mlp = GatedMlp(*NAMES, F.silu, (None, None, None), 1.0)
    x = module.norm(batch.inputs)
    added = Batch(x, batch.targets - batch.inputs, batch.weights)
    hand = GatedProducts(mlp, [[added]], place, kept_bytes=2**40)
    return LeastSquares.of(plain), LeastSquares.of(hand), theta, delta


def measure(
    hidden: int, width: int, tokens: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Seconds, operations and memory of every part."""
    place = torch.device(device)
    fit, hand, theta, delta = problem(hidden, width, tokens, place, dtype)
    found: dict[str, Any] = {
        "hidden": hidden,
        "width": width,
        "tokens": tokens,
        "dtype": str(dtype),
    }
    seconds: dict[str, float] = {}
    for problem_of_both in (fit, hand):
        problem_of_both.linearise(theta)
    one, seconds["iteration"] = timed(lambda: fit.normal(delta), place)
    other, seconds["iteration by hand"] = timed(lambda: hand.normal(delta), place)
    found["difference"] = max(
        float((one[name] - other[name]).norm() / other[name].norm()) for name in NAMES
    )
    _, seconds["gradient"] = timed(lambda: fit.gradient(theta), place)
    factors, seconds["factors"] = timed(lambda: fit.factors(theta, seed=0), place)
    _, seconds["eigendecompositions"] = timed(lambda: Preconditioner(factors, 0.1), place, 1)
    weights = 3 * hidden * width
    found["operations"] = {
        "iteration": 2.0 * weights * tokens * 11 / 3,
        "iteration by hand": 2.0 * weights * tokens * 8 / 3,
    }
    found["seconds"] = seconds
    found["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["weights_bytes"] = weights * 4
    return found


def timed(run: Callable[[], Any], device: torch.device, repeats: int = 3) -> tuple[Any, float]:
    """What comes out, and the fewest seconds of the repeats."""
    fewest = float("inf")
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        out = run()
        _wait(device)
        fewest = min(fewest, time.perf_counter() - began)
    return out, fewest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def describe(found: dict[str, Any]) -> str:
    """The table, and what it makes of a whole model."""
    seconds, operations = found["seconds"], found["operations"]
    lines = [
        f"hidden {found['hidden']}, width {found['width']}, {found['tokens']} tokens, "
        f"{found['dtype']}; by hand and by forward and reverse mode differ by "
        f"{found['difference']:.1e}",
        "",
        "| part | seconds | 1e9 operations / s | times the iteration |",
        "|---|---|---|---|",
    ]
    for name, value in seconds.items():
        rate = f"{operations[name] / value / 1e9:.1f}" if name in operations else ""
        lines.append(f"| {name} | {value:.2f} | {rate} | {value / seconds['iteration']:.2f} |")
    whole = operations["iteration"] * TEXT / found["tokens"] * LAYERS
    lines += [
        "",
        f"most memory {found['resident_bytes'] / 1e9:.2f} GB, of that the weights "
        f"{found['weights_bytes'] / 1e9:.2f} GB",
        f"one iteration of {LAYERS} such blocks over {TEXT:,} tokens: {whole:.1e} operations, "
        f"{whole / RATE:.0f} s at {RATE:.0e} operations a second; three steps of ten: "
        f"{30 * whole / RATE / 60:.0f} minutes",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
