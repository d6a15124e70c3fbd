"""Greedy elimination of one large site: seconds, operations, share of the product rate, memory.

    python -m benchmarks.elimination [--sites 14336x4096] [--sparsity 0.3]

The selection `obs` on a synthetic down_proj. The operations of products, factors and triangular
solves are counted as they run, by their leading order. The rate is that of a matrix product in the
same dtype and run. The memory is the most that was resident during the selection, less what was so
before the Gram was made, in matrices of d² numbers of float64; the Gram and the weight, which the
caller holds, are included.
"""

import argparse
import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import operations, record
from benchmarks.meter import Counter
from benchmarks.operations import Site
from coec.linalg.spd import regularized_inverse
from coec.methods.elimination import PANEL, removal_path

INVERSE = "coec.methods.elimination.regularized_inverse"
RANK = 4096
"""Of the synthetic Gram before white noise is added to it."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sites", nargs="+", default=["14336x4096"], help="d×m")
    parser.add_argument("--sparsity", type=float, default=0.3)
    chosen = parser.parse_args(arguments)
    print(f"Greedy elimination. {record.header()}\n", flush=True)
    results = []
    for shape in chosen.sites:
        d, m = (int(n) for n in shape.split("x"))
        results.append(measure(Site("down_proj", m, d, math.ceil((1 - chosen.sparsity) * d))))
        record.save("elimination", arguments, {"sites": results})
    print(describe(results))


def measure(site: Site) -> dict[str, Any]:
    """One site, with its inverse and the rest apart."""
    rate = record.matmul_rate("cpu", "float64", n=4096)
    before = record.resident("VmRSS")
    W, G = problem(site)
    counted: dict[str, float] = {}

    def timed(*given: Any) -> tuple[Tensor, float]:
        began, counts = record.clock(), counter.operations
        found = regularized_inverse(*given)
        counted["inverse_seconds"] = record.clock() - began
        counted["inverse_operations"] = counter.operations - counts
        return found

    record.forget_peak()
    with mock.patch(INVERSE, timed), Counter() as counter:
        began = record.clock()
        path = removal_path(W, G, site.d, site.k)
        seconds = record.clock() - began
    return {
        "d": site.d, "m": site.m, "k": site.k, "removed": len(path), "rate": rate,
        **counted,
        "rest_seconds": seconds - counted["inverse_seconds"],
        "rest_operations": counter.operations - counted["inverse_operations"],
        "expected": [operations.inverse(site.d), operations.elimination(site, PANEL)],
        "memory": (record.resident("VmHWM") - before) / (8 * site.d**2),
    }  # fmt: skip


def problem(site: Site, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A Gaussian weight, and the Gram of inputs whose i-th component has the energy 1/i.

    Directions beyond the first `RANK` have the energy of the last. Beside the Gram, nothing of its
    size is made.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = min(RANK, site.d)
    G = torch.eye(site.d, dtype=torch.float64) / rank
    for first in range(0, rank, 512):
        count = min(512, rank - first)
        energy = torch.arange(first + 1, first + count + 1, dtype=G.dtype).reciprocal()
        X = torch.randn(site.d, count, generator=generator, dtype=G.dtype) / math.sqrt(site.d)
        G.addmm_(X * energy, X.T)
    return torch.randn(site.m, site.d, generator=generator, dtype=G.dtype), G


def describe(results: list[dict[str, Any]]) -> str:
    """A row for the inverse and one for the rest of every site."""
    rows = []
    for site in results:
        shape = f"{site['d']}×{site['m']}, {site['removed']} removed"
        for name, expected in zip(("inverse", "rest"), site["expected"]):
            count, seconds = site[f"{name}_operations"], site[f"{name}_seconds"]
            share = count / seconds / site["rate"]
            memory = f"{site['memory']:.2f} d²" if name == "rest" else ""
            rows.append([
                shape, name, f"{expected:.2e}", f"{count:.2e}", f"{seconds:.3g}", f"{share:.0%}",
                memory,
            ])  # fmt: skip
    columns = [
        "site", "phase", "leading order", "operations run", "s", "share of product rate",
        "peak memory",
    ]  # fmt: skip
    rates = ", ".join(f"{site['rate'] / 1e9:.0f} G/s" for site in results)
    return f"Matrix products at {rates} in float64.\n\n{record.table(columns, rows)}"


if __name__ == "__main__":
    main()
