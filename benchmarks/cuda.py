"""One block of an 8 B and of a 70 B model on a GPU: seconds per phase beside their floors.

    python -m benchmarks.cuda [--models Llama-3.1-8B] [--dtypes float64 float32]
    python -m benchmarks.cuda --device cpu --scale 0.02        a rehearsal without a GPU

Needs torch, numpy and this package. Per site: a synthetic power-law Gram, one `coec.compensate`
with the defaults and no alignment, after a small one that loads the libraries. Operations of matrix
products, Cholesky factors and triangular solves are counted as they are run, decompositions by
formula (benchmarks/operations.py); elementwise work is not counted. The floor of a phase is its
operations at the matrix-product rate measured in the same run and dtype; its share of peak is floor
divided by time. Memory excludes what making the problem took.
"""

import argparse
import contextlib
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import coec
from benchmarks import record
from benchmarks.instances import synthetic
from benchmarks.operations import MODELS, Site
from coec.compensation.frame import Frame, Target
from coec.compensation.objective import Reconstruction
from coec.planning import operations
from coec.planning.forecast import readable

PHASES = {
    "tempering": (Reconstruction, "tempered"),
    "eigenbasis": (Target, "of"),
    "svd": (Frame, "of"),
}
"""Where each phase is entered; everything else of a compensation is the descent."""

DECOMPOSITIONS = {
    "eigh": lambda A: operations.eigh(A.shape[-1]),
    "svd": lambda A: operations.thin_svd(A.shape[-2], A.shape[-1]),
}


class Counter(TorchDispatchMode):
    """Adds up the operations of products, Cholesky factors and triangular solves as they are run.

    About 10 μs per operator, once warm: a millisecond in a step, less than what
    `torch.utils.flop_counter` takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Counts, and runs the operator."""
        if count := OPERATORS.get(func):
            self.operations += count(*args)
        return func(*args, **(kwargs or {}))


def _product(A: Tensor, B: Tensor) -> float:
    return operations.product(A.shape[0], A.shape[1], B.shape[1])


OPERATORS: dict[Any, Callable[..., float]] = {
    torch.ops.aten.mm.default: _product,
    torch.ops.aten.addmm.default: lambda C, A, B: _product(A, B),
    torch.ops.aten.addmm_.default: lambda C, A, B: _product(A, B),
    torch.ops.aten.mv.default: lambda A, x: 2.0 * A.numel(),
    torch.ops.aten.linalg_cholesky_ex.default: lambda A, *_: operations.cholesky(len(A)),
    torch.ops.aten.cholesky_inverse.default: lambda L, *_: 2 / 3 * len(L) ** 3,
    torch.ops.aten.cholesky_solve.default: lambda B, L, *_: (
        2 * operations.triangular_solve(len(L), B.numel() // len(L))
    ),
    torch.ops.aten.linalg_solve_triangular.default: lambda A, B, *_: operations.triangular_solve(
        len(A), B.numel() // len(A)
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per model and dtype, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of every width")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sites", nargs="+", default=["down_proj", "o_proj"])
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    parser.add_argument("--rounds", type=int, help="limit of the alternation (its default)")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda.py: no CUDA device here; rehearse with --device cpu --scale 0.02")
    print(f"One block on {device}, scale {chosen.scale:g}. {record.header(device)}\n", flush=True)
    name = "cuda" if device.type == "cuda" else "cuda_rehearsal"
    options = {} if chosen.rounds is None else {"rounds": chosen.rounds}
    results: list[dict[str, Any]] = []
    for dtype in chosen.dtypes:
        rate = record.matmul_rate(device, dtype)
        for model in chosen.models:
            rows = []
            for site in (s.scaled(chosen.scale) for s in MODELS[model] if s.name in chosen.sites):
                try:
                    rows.append(measure(site, device, getattr(torch, dtype), rate, options))
                except torch.cuda.OutOfMemoryError:
                    print(f"{model} {site.name} in {dtype}: more memory than the device has\n")
                    continue
                results.append({"model": model, "dtype": dtype, **rows[-1]})
                record.save(name, arguments, {"scale": chosen.scale, "sites": results})
            if rows:
                print(f"{describe(model, dtype, rate, rows)}\n", flush=True)


@dataclass
class Meter:
    """Seconds and operations by phase of what runs inside `running`."""

    device: torch.device
    counter: Counter = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    decompositions: dict[str, float] = field(default_factory=dict)
    _products: dict[str, float] = field(default_factory=dict)
    _phase: str = "descent"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Meters one compensation."""
        with contextlib.ExitStack() as stack:
            for phase, (owner, name) in PHASES.items():
                inner = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, self._entering(phase, inner)))
            for routine, operations_of in DECOMPOSITIONS.items():
                for module in _importers(routine):
                    inner = getattr(module, routine)
                    wrapped = self._decomposing(routine, operations_of, inner)
                    stack.enter_context(mock.patch.object(module, routine, wrapped))
            stack.enter_context(self.counter)
            began = self._now()
            yield
            whole = self._now() - began
        self.seconds["descent"] = whole - sum(self.seconds.values())
        products = sum(self._products.values())
        self._products["descent"] = self.counter.operations - products
        for phase, count in self._products.items():
            self._add(self.operations, phase, count)

    def _entering(self, phase: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            outer, self._phase = self._phase, phase
            began, before = self._now(), self.counter.operations
            out = inner(*args)
            self._add(self.seconds, phase, self._now() - began)
            self._add(self._products, phase, self.counter.operations - before)
            self._phase = outer
            return out

        return run

    def _decomposing(
        self, routine: str, operations_of: Callable[[Tensor], float], inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(A: Tensor) -> Any:
            began, before = self._now(), self.counter.operations
            out = inner(A)
            self.counter.operations = before  # counted by formula instead
            self._add(self.decompositions, f"{routine} in {self._phase}", self._now() - began)
            self._add(self.operations, self._phase, operations_of(A))
            return out

        return run

    def _now(self) -> float:
        record.synchronize(self.device)
        return record.clock() if self.device.type == "cpu" else time.perf_counter()

    @staticmethod
    def _add(sums: dict[str, float], name: str, value: float) -> None:
        sums[name] = sums.get(name, 0.0) + value


def _importers(routine: str) -> list[Any]:
    """Modules of the package that call the routine by name, its home excepted."""
    home = sys.modules["coec.linalg.decompose"]
    function = getattr(home, routine)
    return [
        module for name, module in list(sys.modules.items())
        if name.startswith("coec.") and module is not home
        and getattr(module, routine, None) is function
    ]  # fmt: skip


def measure(
    site: Site, device: torch.device, dtype: torch.dtype, rate: float, options: dict[str, Any]
) -> dict[str, Any]:
    """One site."""
    warm = synthetic(site.scaled(min(1.0, 64 / site.m)), dtype=dtype, device=device)
    with Meter(device).running():
        coec.compensate(warm.weight, warm.gram, warm.kept, **options)
    instance = synthetic(site, dtype=dtype, device=device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    meter = Meter(device)
    with meter.running():
        result = coec.compensate(instance.weight, instance.gram, instance.kept, **options)
    phases = {
        phase: {
            "seconds": meter.seconds[phase],
            "operations": meter.operations[phase],
            "floor_seconds": meter.operations[phase] / rate,
            "share_of_peak": meter.operations[phase] / rate / meter.seconds[phase],
        }
        for phase in (*PHASES, "descent")
    }
    total = sum(phase["seconds"] for phase in phases.values())
    device_memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "site": site.name, "m": site.m, "d": site.d, "k": site.k, "blocks": site.blocks,
        "rate": rate, "phases": phases, "decompositions": meter.decompositions,
        "seconds": total, "whole_model_seconds": total * site.blocks,
        "device_peak_gib": device_memory / 2**30 if device_memory is not None else None,
        "host_peak_gib": _host_peak(),
        "rounds": result.diagnostics.get("rounds"),
        "right_iterations": result.diagnostics.get("right_iterations"),
        "error_before": result.diagnostics["error_before"],
        "error_after": result.diagnostics["error_after"],
        "events": list(result.diagnostics["events"]),
    }  # fmt: skip


def _host_peak() -> float:
    """The process's largest resident size so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def describe(model: str, dtype: str, rate: float, sites: list[dict[str, Any]]) -> str:
    """The sites of one model in one dtype."""
    rows = []
    for site in sites:
        name = f"{site['site']} {site['m']}×{site['d']}, k = {site['k']}"
        for phase, row in site["phases"].items():
            rows.append([
                name, phase, f"{row['seconds']:.3g}", f"{row['operations']:.2e}",
                f"{row['floor_seconds']:.3g}", f"{100 * row['share_of_peak']:.1f} %",
            ])  # fmt: skip
        floor = sum(row["floor_seconds"] for row in site["phases"].values())
        count = sum(row["operations"] for row in site["phases"].values())
        rows.append([name, "all", f"{site['seconds']:.3g}", f"{count:.2e}", f"{floor:.3g}",
                     f"{100 * floor / site['seconds']:.1f} %"])  # fmt: skip
    columns = ["site", "phase", "s", "operations", "floor, s", "share of peak"]
    whole = sum(site["whole_model_seconds"] for site in sites)
    blocks, names = sites[0]["blocks"], " and ".join(site["site"] for site in sites)
    memory = [site["device_peak_gib"] for site in sites if site["device_peak_gib"] is not None]
    peak = f"; device memory at most {max(memory):.1f} GiB" if memory else ""
    return (
        f"# {model}, {dtype}, matrix products at {rate / 1e12:.3g} T/s\n\n"
        f"{record.table(columns, rows)}\n\n"
        f"{names} of all {blocks} blocks, extrapolated: {readable(whole)}{peak}."
    )


if __name__ == "__main__":
    main()
