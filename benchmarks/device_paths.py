"""What a device computes besides a compensation: right first, against the CPU, and then how fast.

Part of `python -m benchmarks.cuda`: statistics on tensor cores, the elimination of `obs`, and the
dtype that `solve_dtype = auto` chooses.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import coec
from benchmarks import elimination, operations, record
from benchmarks.instances import Instance, synthetic
from benchmarks.operations import MODELS, Site
from coec.devices import choose_solve_dtype, double_rate
from coec.methods.elimination import removal_path
from coec.types import Gram, GramSum, KeptSet

CPU = torch.device("cpu")
SMALL = Site("down_proj", 128, 448, 314)
TOKENS = 1024
ALLOWED = {
    "compensation in float64": 1e-4,
    "compensation in float32": 1e-3,
    "statistics of bfloat16": 1e-6,
    "columns removed by obs": 0.01,
}
"""Relative differences of the CPU's and the device's: of objectives, of sums and products by their
norm, and the share of columns that only one of them removes."""


def differences(device: torch.device) -> dict[str, float]:
    """How far a device is off, by the names of `ALLOWED`."""
    there = synthetic(SMALL)
    here = _moved(there, device)
    rows = torch.randn(TOKENS, SMALL.d, generator=torch.Generator().manual_seed(0)).bfloat16()
    own, other = _summed(rows.to(device)).cpu(), _summed(rows)
    W, G = elimination.problem(SMALL)
    removed, expected = (
        set(_eliminated(W.to(place), G.to(place), SMALL).tolist()) for place in (device, CPU)
    )
    ended = _objective(there)
    return {
        "compensation in float64": abs(_objective(here) / ended - 1),
        "compensation in float32": abs(_objective(here, torch.float32) / ended - 1),
        "statistics of bfloat16": float((own - other).norm() / other.norm()),
        "columns removed by obs": len(removed - expected) / len(expected),
    }


def timings(device: torch.device, model: str, scale: float) -> dict[str, Any]:
    """Seconds at a model's widths: statistics, elimination."""
    down = next(site for site in MODELS[model] if site.name == "down_proj")
    site = down.scaled(scale)
    rows = torch.randn(TOKENS, site.d, device=device).bfloat16()
    sums = GramSum(site.d, device)
    sums.update(rows)
    _, took = _timed(lambda: sums.update(rows), device)
    W, G = elimination.problem(site)
    W, G = W.to(device), G.to(device)
    _, eliminated = _timed(lambda: _eliminated(W, G, site), device)
    del W, G
    narrow = "float32" if device.type == "cpu" else "bfloat16"
    counts = {
        "statistics, 1024 tokens": (operations.gram(site, TOKENS), took),
        "elimination": (operations.inverse(site.d) + operations.elimination(site), eliminated),
    }
    return {
        "model": model, "m": site.m, "d": site.d, "k": site.k, "dtype": narrow,
        "parts": {name: {"operations": n, "seconds": s} for name, (n, s) in counts.items()},
    }  # fmt: skip


def chosen(device: torch.device) -> str:
    """What `auto` chooses there, and why."""
    dtype = str(choose_solve_dtype("auto", device)).removeprefix("torch.")
    return f"solve_dtype = auto: {dtype} (float64 at {double_rate(device):.2g} of the float32 rate)"


def describe_differences(found: dict[str, float]) -> str:
    """As a table."""
    rows = [
        [name, f"{value:.1e}", f"{ALLOWED[name]:.0e}", "yes" if value <= ALLOWED[name] else "NO"]
        for name, value in found.items()
    ]
    return record.table(["device against CPU", "difference", "allowed", "right"], rows)


def describe_timings(found: dict[str, Any]) -> str:
    """As a table."""
    rows = [
        [name, f"{part['operations']:.2e}", f"{part['seconds']:.3g}",
         f"{part['operations'] / part['seconds'] / 1e12:.3g} T/s"]
        for name, part in found["parts"].items()
    ]  # fmt: skip
    title = f"### {found['model']}, {found['m']}×{found['d']}, k = {found['k']}: other work"
    return f"{title}\n\n{record.table(['part', 'operations', 's', 'rate'], rows)}"


def _moved(instance: Instance, device: torch.device) -> Instance:
    gram = Gram(instance.gram.xx.to(device), instance.gram.x.to(device), instance.gram.tokens)
    kept = KeptSet(instance.kept.indices.to(device), instance.kept.size)
    return Instance(instance.name, instance.weight.to(device), gram, kept)


def _objective(instance: Instance, dtype: torch.dtype = torch.float64) -> float:
    found = coec.compensate(instance.weight.to(dtype), instance.gram.to(dtype), instance.kept)
    return float(found.diagnostics["errors_per_round"][-1])


def _summed(rows: Tensor) -> Tensor:
    sums = GramSum(rows.shape[1], rows.device)
    sums.update(rows)
    return sums.gram().xx


def _eliminated(W: Tensor, G: Tensor, site: Site) -> Tensor:
    return torch.as_tensor([unit for unit, _ in removal_path(W, G, site.d, site.k)])


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    record.synchronize(device)
    began = time.perf_counter()
    out = run()
    record.synchronize(device)
    return out, time.perf_counter() - began
