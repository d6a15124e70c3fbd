"""COEC's joint descent against the source's solver, by the public function on plain tensors.

    python -m benchmarks.right_solve [--sites mlp attention] [--shapes 192x577] [--shared ../shared]

Both get the same weight, Gram and kept columns, in float64 on one thread. CPU seconds are of the
whole compensation; the objective is that of the last round. Rows are in
benchmarks/results/right_solve.json.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.instances import SHARED, Instance, synthetic, trained

SOLVERS = ("joint", "gradient")


def main(arguments: list[str] | None = None) -> None:
    """Measure every problem by both solvers, save the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--sites", nargs="*", default=["mlp", "attention"], help="of wt2-llama")
    parser.add_argument("--shapes", nargs="*", default=["192x577"], help="synthetic m×d")
    chosen = parser.parse_args(arguments)
    print(f"{record.header()}\n", flush=True)
    rows: list[dict[str, Any]] = []
    for instance in _instances(chosen.shared, chosen.sites, chosen.shapes):
        rows += [measured(instance, solver) for solver in SOLVERS]
        record.save("right_solve", arguments, {"rows": rows})
    print(table(rows))


def _instances(shared: Path, sites: list[str], shapes: list[str]) -> Iterator[Instance]:
    for site in sites:
        yield trained(shared, site)
    for shape in shapes:
        m, d = map(int, shape.split("x"))
        yield synthetic(m, d)


def measured(instance: Instance, solver: str) -> dict[str, Any]:
    """Compensate once."""
    began = record.clock()
    diagnostics = coec.compensate(
        instance.weight, instance.gram, instance.kept, value_weight=instance.value, solver=solver
    ).diagnostics
    seconds = record.clock() - began
    ends = diagnostics.get("objectives_per_round", diagnostics["errors_per_round"])
    return {"name": instance.name, "solver": solver, "seconds": seconds, "objective": ends[-1],
            "rounds": diagnostics["rounds"]}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [
        [row["name"], row["solver"], f"{row['seconds']:.2f}", f"{row['objective']:.5f}",
         str(row["rounds"])]
        for row in rows
    ]  # fmt: skip
    return record.table(["matrix", "solver", "CPU s", "objective", "rounds"], lines)


if __name__ == "__main__":
    main()
