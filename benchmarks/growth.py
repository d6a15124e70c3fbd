"""How the cost grows with k: seconds per right-solve step and of a whole compensation.

    python -m benchmarks.growth [--sizes 100 200 400 800 1600]

Synthetic power-law problems with b = 0.4 k at 30 %. A slope is the exponent p of `seconds ∝ k^p`,
fitted by least squares on logarithms over all sizes, and over the three largest, where what is
negligible at small sizes no longer flattens it.
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

import coec
from benchmarks import record
from benchmarks.instances import of_right_shape, right_solve
from coec.linalg.conjugate import conjugate
from coec.linalg.gradient import gradient
from coec.linalg.right import RightProblem

SIZES = (100, 200, 400, 800, 1600)
SERIES = {
    "conjugate_step": "a step of `conjugate`",
    "gradient_step": "a step of `gradient`",
    "eigh": "eigenpairs of Gxx",
    "whole": "the whole matrix",
}


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with slopes, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="values of k")
    chosen = parser.parse_args(arguments)
    print(f"Growth with k, b = 0.4 k. {record.header()}\n", flush=True)
    rows = []
    for k in sorted(chosen.sizes):
        rows.append(measure(k))
        print("  " + ", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()),
              file=sys.stderr, flush=True)  # fmt: skip
        slopes = fit(rows)
        record.save("growth", arguments, {"sizes": rows, "slopes": slopes})
    print(describe(rows, slopes), flush=True)


def fit(rows: list[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """The slope of every series, over all sizes and over the three largest."""

    def over(count: int, name: str) -> float | None:
        chosen = rows[-count:]
        if len(chosen) < 2:
            return None
        return record.slope([row["k"] for row in chosen], [row[name] for row in chosen])

    return {name: {"all": over(len(rows), name), "largest": over(3, name)} for name in SERIES}


def measure(k: int) -> dict[str, float]:
    """One size; steps are timed over at least a second."""
    instance = of_right_shape(round(0.4 * k), k)
    problem, R = right_solve(instance)
    began = record.clock()
    torch.linalg.eigh(instance.gram.xx[:k, :k])
    eigh = record.clock() - began
    began = record.clock()
    result = coec.compensate(instance.weight, instance.gram, instance.kept)
    whole = record.clock() - began
    return {
        "k": k,
        "b": len(R),
        "d": instance.weight.shape[1],
        "conjugate_step": _per_step(problem, R, "conjugate"),
        "gradient_step": _per_step(problem, R, "gradient"),
        "eigh": eigh,
        "whole": whole,
        "rounds": result.diagnostics.get("rounds", 0),
    }


def _per_step(problem: RightProblem, R: Tensor, solver: str) -> float:
    """Seconds per step, the solver's preparation included in proportion."""
    steps, spent = 0, 0.0
    while spent < 1:
        began = record.clock()
        if solver == "conjugate":
            _, end = conjugate(problem, R, tolerance=0, iterations=10)
        else:
            _, end = gradient(problem, R, delta=0, iterations=10)
        spent += record.clock() - began
        steps += max(1, end.iterations)
    return spent / steps


def describe(rows: list[dict[str, float]], slopes: dict[str, dict[str, Any]]) -> str:
    """Seconds, and slopes in the last lines."""
    cells = [[str(row["k"]), str(row["b"]), *(f"{row[name]:.3g}" for name in SERIES)]
             for row in rows]  # fmt: skip
    for kind, title in (("all", "slope"), ("largest", "slope, three largest")):
        values = [slopes[name][kind] for name in SERIES]
        cells.append([title, "", *("" if v is None else f"{v:.2f}" for v in values)])
    return record.table(["k", "b", *(f"{title}, s" for title in SERIES.values())], cells)


if __name__ == "__main__":
    main()
