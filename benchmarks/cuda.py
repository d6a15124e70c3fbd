"""One block of an 8 B and of a 70 B model on a GPU: seconds per phase beside their floors.

    python -m benchmarks.cuda [--models Llama-3.1-8B] [--dtypes float64 float32]
    python -m benchmarks.cuda --device cpu --scale 0.02        a rehearsal without a GPU

Needs torch, numpy and this package. Per site: a synthetic power-law Gram, one `coec.compensate`
with the defaults and no alignment, after a small one that loads the libraries. Before them what a
device computes is compared with the CPU, after them its other work is timed: statistics, the
elimination of `obs` (benchmarks/device_paths.py). Operations of
products, Cholesky factors and triangular solves are counted as they are run, decompositions by
formula (benchmarks/operations.py); elementwise work is not counted. The floor of a phase is its
operations at the matrix-product rate measured in the same run and dtype; its share of peak is floor
divided by time. Memory excludes what making the problem took.
"""

import argparse
import gc
import resource
import sys
from typing import Any

import torch

import coec
from benchmarks import device_paths, record
from benchmarks.instances import synthetic
from benchmarks.meter import Meter, Rates, product_rates
from benchmarks.operations import MODELS, Site


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per model and dtype, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of every width")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sites", nargs="+", default=["down_proj", "o_proj"])
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda.py: no CUDA device here; rehearse with --device cpu --scale 0.02")
    print(f"One block on {device}, scale {chosen.scale:g}. {record.header(device)}\n", flush=True)
    name = "cuda" if device.type == "cuda" else "cuda_rehearsal"
    print(f"{device_paths.chosen(device)}\n", flush=True)
    differences = device_paths.differences(device)
    print(f"{device_paths.describe_differences(differences)}\n", flush=True)
    results: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    rates = product_rates(device)
    for dtype in chosen.dtypes:
        kind = getattr(torch, dtype)
        for model in chosen.models:
            rows = []
            for site in (s.scaled(chosen.scale) for s in MODELS[model] if s.name in chosen.sites):
                try:
                    rows.append(measure(site, device, kind, rates))
                except torch.cuda.OutOfMemoryError:
                    print(f"{model} {site.name} in {dtype}: more memory than the device has\n")
                    continue
                results.append({"model": model, "dtype": dtype, **rows[-1]})
                _save(name, arguments, chosen.scale, differences, results, others)
            if rows:
                print(f"{describe(model, dtype, rates[kind], rows)}\n", flush=True)
    for model in chosen.models:
        others.append(device_paths.timings(device, model, chosen.scale))
        _save(name, arguments, chosen.scale, differences, results, others)
        print(f"{device_paths.describe_timings(others[-1])}\n", flush=True)


def _save(
    name: str,
    arguments: list[str] | None,
    scale: float,
    differences: dict[str, float],
    sites: list[dict[str, Any]],
    others: list[dict[str, Any]],
) -> None:
    found = {"scale": scale, "differences": differences, "sites": sites, "others": others}
    record.save(name, arguments, found)


def measure(site: Site, device: torch.device, dtype: torch.dtype, rates: Rates) -> dict[str, Any]:
    """One site."""
    warm = synthetic(site.scaled(min(1.0, 64 / site.m)), dtype=dtype, device=device)
    with Meter(device).running():
        coec.compensate(warm.weight, warm.gram, warm.kept)
    instance = synthetic(site, dtype=dtype, device=device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    meter = Meter(device, rates)
    with meter.running():
        result = coec.compensate(instance.weight, instance.gram, instance.kept)
    phases = meter.phases()
    total = sum(phase["seconds"] for phase in phases.values())
    device_memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "site": site.name, "m": site.m, "d": site.d, "k": site.k, "blocks": site.blocks,
        "rate": rates[dtype], "phases": phases, "decompositions": meter.decompositions,
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
        f"### {model}, {dtype}, matrix products at {rate / 1e12:.3g} T/s\n\n"
        f"{record.table(columns, rows)}\n\n"
        f"{names} of all {blocks} blocks, extrapolated: {record.readable(whole)}{peak}."
    )


if __name__ == "__main__":
    main()
