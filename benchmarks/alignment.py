"""What alignment costs: every attention site of the small models, with the penalty and without.

    python -m benchmarks.alignment [--models wt2-llama] [--widths 512] [--repeats 5]

CPU seconds of one thread for whole compensations, tempering included, the least of several runs in
turns; steps of the right solve; the objective's two parts where it ended. The baseline of the
ratios is `lambda_a = 0` in the same run; the source reports +0.5 % at 8 B.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import coec
from benchmarks import record
from benchmarks.instances import SHARED, TEXTS, Instance, sites, synthetic
from benchmarks.operations import Site


def main(arguments: list[str] | None = None) -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="*", default=list(TEXTS))
    parser.add_argument("--widths", nargs="*", type=int, default=[512], help="synthetic sites")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--solver", default="joint")
    chosen = parser.parse_args(arguments)
    print(f"Alignment. {record.header()}\n", flush=True)
    subjects = {f"{width}×{width}": [_synthetic(width)] for width in chosen.widths}
    if (chosen.shared / "models").is_dir():
        for model in chosen.models:
            subjects[model] = [one for one in sites(chosen.shared, model) if one.value is not None]
    else:
        print(f"skipped the models: no folder '{chosen.shared}' with models/ and data/\n")
    results = [
        _measure(name, found, chosen.repeats, chosen.solver) for name, found in subjects.items()
    ]
    print(_table(results))
    record.save("alignment", arguments, {"models": results})


def _synthetic(width: int) -> Instance:
    """An output projection of that width, three quarters kept, values from heads of 64 columns."""
    found = synthetic(Site("attention", width, width, 3 * width // 4))
    heads = torch.randn(3 * width // 4, 64, generator=torch.Generator().manual_seed(1))
    return replace(found, value=heads.to(found.weight))


def _measure(name: str, attention: list[Instance], repeats: int, solver: str) -> dict[str, Any]:
    """Sums over the attention sites of a model."""
    _run(attention[0], solver, aligned=True)  # first calls are nobody's time
    plain, aligned = ({"steps": 0, "seconds": 0.0, "error": 0.0} for _ in range(2))
    penalties = []
    for site in attention:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(repeats):
            for with_penalty in (False, True):
                seconds[with_penalty].append(_timed(site, solver, aligned=with_penalty))
        for total, with_penalty in ((plain, False), (aligned, True)):
            found = _run(site, solver, aligned=with_penalty).diagnostics
            total["steps"] += sum(found["right_iterations"])
            total["seconds"] += min(seconds[with_penalty])
            total["error"] += found["error_after"] / len(attention)
            if with_penalty:
                penalties.append((found["alignment_before"], found["alignment_after"]))
    return {"model": name, "sites": len(attention), "solver": solver, "plain": plain,
            "aligned": aligned, "penalties": penalties}  # fmt: skip


def _timed(site: Instance, solver: str, *, aligned: bool) -> float:
    began = record.clock()
    _run(site, solver, aligned=aligned)
    return record.clock() - began


def _run(site: Instance, solver: str, *, aligned: bool) -> coec.SiteResult:
    options: dict[str, Any] = {} if aligned else {"lambda_a": 0.0}
    return coec.compensate(
        site.weight, site.gram, site.kept, value_weight=site.value, solver=solver, **options
    )


def _table(results: list[dict[str, Any]]) -> str:
    rows = []
    for found in results:
        plain, aligned = found["plain"], found["aligned"]
        before, after = (
            sum(pair[n] for pair in found["penalties"]) / found["sites"] for n in (0, 1)
        )
        rows.append(
            [
                f"{found['model']} × {found['sites']}",
                f"{plain['steps']} → {aligned['steps']}",
                f"{aligned['steps'] / plain['steps']:.2f}",
                f"{plain['seconds']:.2f} → {aligned['seconds']:.2f}",
                f"{aligned['seconds'] / plain['seconds']:.2f}",
                f"{plain['error']:.4f} → {aligned['error']:.4f}",
                f"{before:.1e} → {after:.1e}",
            ]
        )
    columns = ["attention sites", "steps", "ratio", "CPU seconds", "ratio",
               "mean relative error", "mean penalty, slice → end"]  # fmt: skip
    return record.table(columns, rows)


if __name__ == "__main__":
    main()
