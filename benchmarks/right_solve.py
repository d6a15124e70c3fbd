"""The right solve against pymanopt, geoopt and the source's solver.

    python -m benchmarks.right_solve [--shapes 192x404 512x1434 896x3405] [--limit 120 400]

Seconds from the call of a solver until its objective is within 0.1 % of the best that any of them
found on that problem in this run. The baseline of the ratios is `coec conjugate`.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.instances import SHARED, Instance, of_right_shape, right_solve, trained
from benchmarks.peers import BORROWED, OURS, PEERS, SOLVERS, STATED, Trace, run

GAP = 1e-3
SHAPES = ("192x404", "512x1434", "896x3405")
LARGE = 400_000
"""Entries of R from which the second time limit holds."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per problem, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="synthetic b×k")
    parser.add_argument("--sites", nargs="*", default=["mlp", "attention"])
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument(
        "--limit", nargs=2, type=float, default=[120.0, 400.0],
        help="seconds per solver, on small and on large problems",
    )  # fmt: skip
    parser.add_argument(
        "--append", action="store_true", help="keep other problems of the last results"
    )
    chosen = parser.parse_args(arguments)
    solvers = [OURS, *(name for name in chosen.solvers if name != OURS)]
    print(f"Right solve. {record.header()}\n", flush=True)
    kept = record.load("right_solve").get("problems", []) if chosen.append else []
    results: list[dict[str, Any]] = []
    for name in solvers:  # what a library does at its first call is no solver's time
        run(SOLVERS[name], *right_solve(of_right_shape(6, 14)), limit=0.5)
    for instance in _instances(chosen.shared, chosen.sites, chosen.shapes):
        result = measure(instance, solvers, chosen.limit)
        results.append(result)
        print(f"{describe(result)}\n", flush=True)
        problems = record.merged(kept, results, "name")
        record.save("right_solve", arguments, {"gap": GAP, "problems": problems})


def _instances(shared: Path, sites: list[str], shapes: list[str]) -> Any:
    """Made one at a time: the large ones fill memory."""
    if sites and not (shared / "models").is_dir():
        print(f"skipped the trained model's sites: no folder '{shared}' with models/ and data/\n")
        sites = []
    for site in sites:
        yield trained(shared, site)
    for shape in shapes:
        b, k = (int(n) for n in shape.split("x"))
        yield of_right_shape(b, k)


def measure(instance: Instance, solvers: list[str], limits: list[float]) -> dict[str, Any]:
    """All solvers on one problem."""
    problem, R = right_solve(instance)
    limit = limits[R.numel() > LARGE]
    traces: dict[str, Trace] = {}
    for name in solvers:
        traces[name] = run(SOLVERS[name], problem, R, limit)
        print(f"  {instance.name} {name}: {traces[name].best:.6f} after {traces[name].spent:.2f} s "
              f"({traces[name].ended})", file=sys.stderr, flush=True)  # fmt: skip
    best = min(trace.best for trace in traces.values())
    reached = {name: trace.time_to(best * (1 + GAP)) for name, trace in traces.items()}
    # What a solver spent without getting there bounds its time from below.
    spent = {name: min(reached[name], trace.ended_after) for name, trace in traces.items()}
    start = problem.objective(R)
    return {
        "name": instance.name,
        "b": R.shape[0],
        "k": R.shape[1],
        "commit": record.commit(),
        "limit_seconds": limit,
        "objective_at_start": start,
        "best_objective": best,
        "solvers": {
            name: {
                "seconds": spent[name],
                "reached": math.isfinite(reached[name]),
                "ratio": spent[name] / spent[OURS],
                "best_objective": trace.best,
                "evaluations": trace.evaluations,
                "ended": trace.ended,
                "setting": trace.setting,
                "trace": trace.curve(),
            }
            for name, trace in traces.items()
        },
    }


def describe(result: dict[str, Any]) -> str:
    """One problem as a table, and the best peer's ratio in a line."""
    rows = []
    for name, row in result["solvers"].items():
        bound = "" if row["reached"] else "> "
        notes = row["setting"], "" if row["reached"] else row["ended"]
        above = row["best_objective"] / result["best_objective"] - 1
        rows.append([name, f"{bound}{row['seconds']:.3g}", f"{bound}{row['ratio']:.3g}",
                     f"{100 * above:.3f} %", ", ".join(filter(None, notes))])  # fmt: skip
    title = (
        f"### {result['name']}, right solve {result['b']}×{result['k']}, objective "
        f"{result['objective_at_start']:.5f} → {result['best_objective']:.5f}"
    )
    columns = ["solver", "s to 0.1 %", "÷ coec conjugate", "best it found, above the best",
               "note"]  # fmt: skip
    text = f"{title}\n\n{record.table(columns, rows)}"
    kinds = {
        "in our eigenbasis, derivatives by hand": set(PEERS) - {*BORROWED, *STATED},
        "on the problem as stated": set(STATED),
        "with our former preconditioner": set(BORROWED),
    }
    for kind, peers in kinds.items():
        found = {name: row for name, row in result["solvers"].items() if name in peers}
        if found:
            fastest = min(found, key=lambda name: found[name]["ratio"])
            bound = "" if found[fastest]["reached"] else "more than "
            text += (
                f"\n\nThe fastest peer {kind}: {fastest}, {bound}"
                f"{found[fastest]['ratio']:.3g} times as long."
            )
    return text


if __name__ == "__main__":
    main()
