"""Single matrices at the widths of real models, to the end: seconds by phase, and memory.

    python -m benchmarks.true_widths [--sites 896x3405 2048x5734] [--dtype float64] [--former]
    python -m benchmarks.true_widths --sites Llama-3.1-8B --dtype float32

A site is m×d, of which `⌈0.7 d⌉` columns stay, or a model: then its down_proj and o_proj at 30 %.
Power-law Gram and weight (benchmarks/instances.py), no alignment; beyond WIDE columns those of
benchmarks/elimination.py, which take no decomposition to make. `--former` runs each site again
with the preconditioner in float64, as it was: the baseline. Within 1 % and 0.1 % is of the lowest
objective that either run found. Every phase and step is printed as it is done, so that a run that
is ended says how far it came.
"""

import argparse
import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import coec
from benchmarks import elimination, record
from benchmarks.instances import Instance, synthetic
from benchmarks.meter import Meter, product_rates
from benchmarks.operations import MODELS, Site
from coec.linalg import conjugate as solver
from coec.types import Gram, KeptSet

SHAPES = {
    "Qwen2.5-1.5B": (Site("down_proj", 1536, 8960, 6272, 28), Site("o_proj", 1536, 1536, 1536, 28)),
    "Llama-3.1-8B": MODELS["Llama-3.1-8B"],
}
"""At 30 %. Qwen2.5-1.5B has two KV groups, of which both stay: its o_proj loses nothing."""

WIDE = 10_000

GOALS = (1e-2, 1e-3)
"""How far above the best objective."""

Steps = list[tuple[float, float]]
"""Seconds since the beginning of a compensation, and the objective then."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per site, writes JSON; a site that was there before is replaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--sites", nargs="+", default=["896x3405", "2048x5734"], help="m×d, a model"
    )
    parser.add_argument("--only", nargs="+", help="of a model's sites")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    parser.add_argument("--former", action="store_true", help="the former preconditioner as well")
    chosen = parser.parse_args(arguments)
    print(f"True widths. {record.header()}\n", flush=True)
    rates = product_rates(torch.device("cpu"))
    first = synthetic(Site("mlp", 16, 64, 45))
    with Meter(torch.device("cpu")).running():  # first calls are nobody's time
        coec.compensate(first.weight, first.gram, first.kept)
    for name, site in _sites(chosen.sites, chosen.only):
        if site.k == site.d:
            print(f"{name}: every column stays, nothing to solve\n", flush=True)
            continue
        found = measure(name, site, getattr(torch, chosen.dtype), rates, former=chosen.former)
        old = record.load("true_widths").get("sites", [])
        sites = record.merged(old, [found], "name")
        record.save("true_widths", arguments, {"sites": sites})
        print(f"{describe(found)}\n", flush=True)


def _sites(names: list[str], only: list[str] | None) -> Iterator[tuple[str, Site]]:
    for name in names:
        if name in SHAPES:
            for site in SHAPES[name]:
                if only is None or site.name in only:
                    yield f"{name} {site.name} {site.m}×{site.d}", site
        else:
            m, d = (int(n) for n in name.split("x"))
            yield f"{m}×{d}", Site("mlp", m, d, math.ceil(0.7 * d))


def measure(
    name: str,
    site: Site,
    dtype: torch.dtype,
    rates: dict[torch.dtype, float],
    *,
    former: bool,
) -> dict[str, Any]:
    """One site, with the preconditioner as it is and, where asked, as it was."""
    runs = {"now": _run(name, site, dtype, rates)}
    if former:
        with mock.patch.object(solver, "WORKING", torch.float64):
            runs["preconditioner in float64"] = _run(name, site, dtype, rates)
    best = min(run["steps"][-1][1] for run in runs.values())
    for run in runs.values():
        run["to"] = [_reached(run["steps"], best * (1 + goal)) for goal in GOALS]
    return {
        "name": name, "m": site.m, "d": site.d, "k": site.k, "dtype": str(dtype)[6:],
        "rates": {str(kind)[6:]: rate for kind, rate in rates.items()}, "runs": runs,
    }  # fmt: skip


def _run(
    name: str,
    site: Site,
    dtype: torch.dtype,
    rates: dict[torch.dtype, float],
) -> dict[str, Any]:
    instance = _instance(site, dtype)
    gc.collect()
    made = record.resident("VmRSS")
    record.forget_peak()
    meter = Meter(torch.device("cpu"), rates, _told(name))
    with _traced(name) as steps, meter.running():
        result = coec.compensate(instance.weight, instance.gram, instance.kept)
    found = result.diagnostics
    laps = meter.phases()
    right, count = laps["right"], sum(found["right_iterations"])
    return {
        "phases": laps,
        "decompositions": meter.decompositions,
        "seconds": sum(phase["seconds"] for phase in laps.values()),
        "steps": steps,
        "right_iterations": found["right_iterations"],
        "seconds_per_step": right["seconds"] / max(count, 1),
        "error_before": found["error_before"],
        "error_after": found["error_after"],
        "objective": found["errors_per_round"][-1],
        "problem_gib": made / 2**30,
        "peak_gib": record.resident("VmHWM") / 2**30,
        "events": list(found["events"]),
    }


def _instance(site: Site, dtype: torch.dtype) -> Instance:
    if site.d <= WIDE:
        return synthetic(site, dtype=dtype)
    W, G = elimination.problem(site)
    gram = Gram(G.to(dtype), torch.zeros(site.d, dtype=dtype), site.d)
    kept = torch.randperm(site.d, generator=torch.Generator().manual_seed(0))[: site.k]
    return Instance(site.name, W.to(dtype), gram, KeptSet(kept.sort().values, site.d))


def _told(name: str) -> Callable[[str, float], None]:
    def tell(phase: str, seconds: float) -> None:
        peak = record.resident("VmHWM") / 2**30
        print(f"  {name} {phase}: {seconds:.3g} s, {peak:.1f} GiB", file=sys.stderr, flush=True)

    return tell


@contextlib.contextmanager
def _traced(name: str) -> Iterator[Steps]:
    """The objective after every step of the right solves, by time; printed as well."""
    inner, steps, began = solver._line_search, [], record.clock()

    def watched(*given: Any) -> Any:
        moved = inner(*given)
        if moved is not None:
            steps.append((record.clock() - began, moved[0].value))
            at, value = steps[-1]
            peak = record.resident("VmHWM") / 2**30
            told = f"  {name} step {len(steps)}: {value:.6f} at {at:.0f} s, {peak:.1f} GiB"
            print(told, file=sys.stderr, flush=True)
        return moved

    with mock.patch.object(solver, "_line_search", watched):
        yield steps


def _reached(steps: Steps, objective: float) -> float:
    """When; infinity for never."""
    return next((seconds for seconds, value in steps if value <= objective), math.inf)


def describe(found: dict[str, Any]) -> str:
    """A row per phase of the run, and one line per run."""
    runs, rates = found["runs"], found["rates"]
    now = runs["now"]
    rows = [
        [phase, f"{row['seconds']:.3g}", f"{row['operations']:.2e}", f"{row['floor_seconds']:.3g}",
         f"{100 * row['share_of_peak']:.0f} %"]
        for phase, row in now["phases"].items()
    ]  # fmt: skip
    columns = ["phase", "s", "operations", "floor, s", "share of product rate"]
    ends = [
        [name, f"{run['seconds']:.4g}", *(_seconds(at) for at in run["to"]),
         f"{len(run['steps'])}", f"{run['seconds_per_step']:.3g}", f"{run['objective']:.6f}",
         f"{run['problem_gib']:.1f} → {run['peak_gib']:.1f} GiB"]
        for name, run in runs.items()
    ]  # fmt: skip
    return (
        f"### {found['name']}, k = {found['k']}, {found['dtype']}\n\n"
        f"Products at {rates['float64'] / 1e9:.0f} G/s in float64, "
        f"{rates['float32'] / 1e9:.0f} in float32; whole: "
        f"{record.readable(now['seconds'])}.\n\n"
        + record.table(columns, rows) + "\n\n"
        + record.table(["preconditioner", "s", "to 1 %", "to 0.1 %", "steps", "s per step",
                        "tempered error", "memory, problem → peak"], ends)
    )  # fmt: skip


def _seconds(at: float | None) -> str:
    return "never" if at is None or math.isinf(at) else f"{at:.4g}"


if __name__ == "__main__":
    main()
