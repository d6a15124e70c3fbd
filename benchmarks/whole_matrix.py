"""Whole matrices: this package against the literal form with a decomposition in every step.

    python -m benchmarks.whole_matrix [--synthetic 256x512] [--rounds 50]

Seconds of one compensation, tempering included, without alignment, and the tempered relative error
it ends at. The baseline of the ratios is the literal form with the source's right solve.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.instances import (
    ALPHA,
    SHARED,
    Instance,
    of_right_shape,
    synthetic,
    tempered,
    trained,
)
from benchmarks.literal import literal
from benchmarks.operations import Site

EFFORTS = [*((1, 2**n) for n in range(8)), *((2**n, 200) for n in range(1, 6)), (50, 200)]
"""(rounds, iterations) of growing length, to find the least work that reaches a given error."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--sites", nargs="*", default=["mlp", "attention"])
    parser.add_argument("--synthetic", nargs="*", default=["256x512"], help="m×d")
    parser.add_argument("--rounds", type=int, default=50, help="limit, of every method")
    chosen = parser.parse_args(arguments)
    print(f"Whole matrices. {record.header()}\n", flush=True)
    coec.compensate(*_parts(of_right_shape(6, 14)))  # first calls are nobody's time
    results = []
    for instance in _instances(chosen.shared, chosen.sites, chosen.synthetic):
        results.append(measure(instance, chosen.rounds))
        print(f"{describe(results[-1])}\n", flush=True)
        record.save("whole_matrix", arguments, {"matrices": results})


def _instances(shared: Path, sites: list[str], shapes: list[str]) -> Iterator[Instance]:
    if sites and not (shared / "models").is_dir():
        print(f"skipped the trained model's sites: no folder '{shared}' with models/ and data/\n")
        sites = []
    for site in sites:
        yield trained(shared, site)
    for shape in shapes:
        m, d = (int(n) for n in shape.split("x"))
        yield synthetic(Site("mlp", m, d, math.ceil(0.7 * d)))


def measure(instance: Instance, rounds: int) -> dict[str, Any]:
    """The literal form, the factored form of the same descent, and the default, on one matrix."""
    problem = tempered(instance)
    parts = _parts(instance)
    rows: dict[str, dict[str, Any]] = {}

    began = record.clock()
    W, errors = literal(*parts, alpha=ALPHA, rounds=rounds)
    rows["literal form"] = {
        "seconds": record.clock() - began,
        "error": problem.error(W),
        "rounds": len(errors) - 2,
    }
    _progress(instance, "literal form", rows["literal form"])
    goal = rows["literal form"]["error"]
    for name, options in {
        "coec, gradient": {"solver": "gradient"},
        "coec, conjugate": {"solver": "conjugate"},
        "coec, default": {},
    }.items():
        seconds, result = _timed(instance, {**options, "rounds": rounds})
        rows[name] = {
            "seconds": seconds,
            "error": problem.error(result.weight),
            "rounds": result.diagnostics.get("rounds"),
        }
        _progress(instance, name, rows[name])
    for limit, iterations in EFFORTS:
        seconds, result = _timed(instance, {"rounds": limit, "iterations": iterations})
        error = problem.error(result.weight)
        if error <= goal:
            rows["coec, default, to the literal form's error"] = {
                "seconds": seconds, "error": error, "rounds": result.diagnostics.get("rounds"),
                "iterations": iterations,
            }  # fmt: skip
            break
    base = rows["literal form"]["seconds"]
    for row in rows.values():
        row["ratio"] = base / row["seconds"]
    b, k = instance.shape
    m, d = instance.weight.shape
    return {
        "name": instance.name, "m": m, "d": d, "b": b, "k": k,
        "error_of_slice": problem.error(instance.weight[:, instance.kept.indices]), "methods": rows,
    }  # fmt: skip


def _progress(instance: Instance, name: str, row: dict[str, Any]) -> None:
    print(f"  {instance.name} {name}: {row['error']:.6f} in {row['seconds']:.3g} s",
          file=sys.stderr, flush=True)  # fmt: skip


def _parts(instance: Instance) -> tuple[Any, Any, Any]:
    return instance.weight, instance.gram, instance.kept


def _timed(instance: Instance, options: dict[str, Any]) -> tuple[float, coec.SiteResult]:
    """The fastest of three runs, or of one where that took more than two seconds."""
    best = math.inf
    for _ in range(3):
        began = record.clock()
        result = coec.compensate(*_parts(instance), **options)
        best = min(best, record.clock() - began)
        if best > 2:
            break
    return best, result


def describe(result: dict[str, Any]) -> str:
    """One matrix as a table."""
    rows = [
        [name, f"{row['seconds']:.3g}", f"{row['ratio']:.3g}", f"{row['error']:.5f}",
         str(row["rounds"])]
        for name, row in result["methods"].items()
    ]  # fmt: skip
    return (
        f"### {result['name']}, {result['m']}×{result['d']}, k = {result['k']}, slice "
        f"{result['error_of_slice']:.5f}\n\n"
        + record.table(["method", "s", "literal ÷ it", "tempered error", "rounds"], rows)
    )


if __name__ == "__main__":
    main()
