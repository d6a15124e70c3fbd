"""The plan against runs: predicted and found seconds of every phase, and memory.

    python -m benchmarks.plan_accuracy [--models wt2-llama] [--presets paper fast best]

30 % of two small trained models and of a Llama of 62 M random parameters (two blocks of true
proportions, and 49 M in embedding and head), whose hidden states are those of no trained model; 16
windows. Every run is a process of its own. The machine is measured before each and after it, since
other work slows it by turns, and taken for what lies between. Seconds are CPU time where one thread
runs. The ratio is predicted over found.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from coec.planning import ComputeConfig, Forecast
from coec.planning.machines import Machine
from coec.planning.machines import measure as measure_machine
from coec.settings import PRESETS

TRAINED = {
    "wt2-llama": ("wikitext-2/valid.raw.txt", 512),
    "babyllama-1M": ("tinystories/test.txt", 256),
}
"""The text and the window of each."""
RANDOM, LENGTH, SAMPLES = "random-62M", 256, 16

RUN = """
import json, os, sys, time
alone = os.environ.get("OMP_NUM_THREADS") == "1"
if alone:
    time.perf_counter = time.process_time
import coec.cli.commands, coec.pipeline.prune, coec
began = sum(os.times()[:2]) if alone else float(sys.argv[4])
from coec.devices import peak
import torch
report = coec.prune(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
sites = {}
for row in report.sites:
    sites.setdefault(row["site"], []).append(
        (row["seconds"], row.get("rounds", 0), sum(row.get("right_iterations", ())))
    )
print(json.dumps({"starting": began, "laps": report.seconds, "sites": sites,
                  "bytes": peak(torch.device("cpu"))}))
"""
"""A run in a process of its own: what the report says, and what the process took to start."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per run, writes JSON."""
    names = [*TRAINED, RANDOM]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--again", action="store_true", help="predict again what was found before")
    parser.add_argument("--append", action="store_true", help="keep other runs' last results")
    chosen = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    print(f"The plan against runs. {record.header()}\n", flush=True)
    runs: list[dict[str, Any]] = record.load("plan_accuracy").get("runs", [])
    runs = runs if chosen.append or chosen.again else []
    with tempfile.TemporaryDirectory() as folder:
        if chosen.again:
            runs = [again(run, chosen.shared, Path(folder)) for run in runs]
            record.save("plan_accuracy", arguments, {"runs": runs})
            print("\n\n".join(map(describe, runs)))
            return
        for model in chosen.models:
            where, calibration, length = _model(model, chosen.shared, Path(folder))
            for preset in chosen.presets:
                row = measure(where, calibration, length, preset)
                run = {"run": f"{model}, {preset}", **row}
                print(f"{describe(run)}\n", flush=True)
                runs = record.merged(runs, [run], "run")
                record.save("plan_accuracy", arguments, {"runs": runs})


def _model(name: str, shared: Path, folder: Path) -> tuple[Path, Path, int]:
    """Its folder, what to calibrate on, and the window."""
    if name != RANDOM:
        text, length = TRAINED[name]
        return shared / "models" / name, shared / "data" / text, length
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=32_000, max_position_embeddings=2048,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder / "dense")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 3 * SAMPLES * LENGTH)
    np.save(folder / "tokens.npy", ids)
    return folder / "dense", folder / "tokens.npy", LENGTH


def measure(model: Path, calibration: Path, length: int, preset: str) -> dict[str, Any]:
    """One run, predicted and found."""
    settings = settings_of(calibration, length, preset)
    device = torch.device("cpu")
    plan = coec.plan(model, **settings)
    compute = ComputeConfig.of(plan, device)
    bytes_planned = planned_memory(model, settings)
    before = measure_machine(device)
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-c", RUN, str(model), f"{out}/pruned", json.dumps(settings),
            str(time.time()),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    machine = between(before, measure_machine(device))
    found = json.loads(done.stdout.splitlines()[-1])
    return kept(Forecast.of(plan, compute, machine), bytes_planned, found, machine)


def kept(predicted: Forecast, size: int, found: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """A row, with what another prediction of the same run needs."""
    row = compared(predicted, size, found)
    return {**row, "machine": asdict(machine), "report": found}


def again(run: dict[str, Any], shared: Path, folder: Path) -> dict[str, Any]:
    """A run that was found before, predicted by the tables of now and the rates of then."""
    model, preset = run["run"].split(", ")
    where, calibration, length = _model(model, shared, folder)
    plan = coec.plan(where, **settings_of(calibration, length, preset))
    machine = Machine.of(run["machine"])
    forecast = Forecast.of(plan, ComputeConfig.of(plan, torch.device("cpu")), machine)
    return {**run, **kept(forecast, run["bytes"]["predicted"], run["report"], machine)}


def settings_of(calibration: Path, length: int, preset: str) -> dict[str, Any]:
    """Of every run."""
    return {
        "calibration": str(calibration), "samples": SAMPLES, "seq_len": length, "preset": preset,
        "sparsity": 0.3,
    }  # fmt: skip


def planned_memory(model: Path, settings: dict[str, Any]) -> int:
    """As the command plans it, in a process that holds nothing else."""
    flags = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "coec", "prune", str(model), "--dry-run", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["memory_bytes"]["total"])


def between(one: Machine, other: Machine) -> Machine:
    """Whose times are the mean of two machines' times."""
    rates = {
        name: tuple(
            (size, 2 / (1 / first + 1 / second))
            for (size, first), (_, second) in zip(points, other.rates[name], strict=True)
        )
        for name, points in one.rates.items()
    }
    return replace(one, rates=rates)


def compared(predicted: Forecast, size: int, found: dict[str, Any]) -> dict[str, Any]:
    """Both, by what a report counts."""
    laps = {"starting": found["starting"], **found["laps"]}
    solving = laps.pop("solving", None)
    for kind, sites in found["sites"].items():
        if solving is not None:
            laps[f"solving {kind}"] = sum(site[0] for site in sites)
    guessed: dict[str, list[float]] = {}
    for phase in predicted.phases:
        name = _lap(phase.name, "reconstructing" in laps)
        own = predicted.seconds[phase.name]
        sums = guessed.setdefault(name, [0.0, 0.0, 0.0])
        guessed[name] = [a + b for a, b in zip(sums, (own.typical, own.low, own.high))]
    total = predicted.total
    guessed["all"] = [total.typical, total.low, total.high]
    laps["all"] = sum(laps.values())
    efforts = {
        kind: [sum(site[n] for site in sites) / len(sites) for n in (1, 2)]
        for kind, sites in found["sites"].items()
    }
    return {
        "predicted": {name: guessed.get(name, [0.0, 0.0, 0.0]) for name in laps},
        "found": laps,
        "bytes": {"predicted": size, "found": found["bytes"]},
        "efforts": efforts,
    }


def _lap(phase: str, reconstructs: bool) -> str:
    """What a report counts a phase of a plan under."""
    if phase in ("measuring bos", "sampling text"):
        return "reading text"
    if phase in ("starting", "checking", "allocating", "writing"):
        return phase
    if reconstructs:
        return "reconstructing"
    return phase if phase.startswith("solving") else "calibrating"


def describe(run: dict[str, Any]) -> str:
    """One run as a table."""
    rows = []
    for name, seconds in run["found"].items():
        typical, least, most = run["predicted"][name]
        if max(seconds, typical) < 0.05 and name != "all":
            continue
        ratio = f"{typical / seconds:.2f}" if seconds else "–"
        rows.append([name, f"{typical:.3g} ({least:.3g}–{most:.3g})", f"{seconds:.3g}", ratio])
    sizes = run["bytes"]
    rows.append([
        "memory, MB", f"{sizes['predicted'] / 1e6:.0f}", f"{sizes['found'] / 1e6:.0f}",
        f"{sizes['predicted'] / sizes['found']:.2f}",
    ])  # fmt: skip
    text = f"### {run['run']}\n\n" + record.table(
        ["phase", "predicted, s", "found, s", "ratio"], rows
    )
    for kind, (rounds, steps) in run["efforts"].items():
        if steps:
            text += f"\n\n{kind}: {rounds:.1f} rounds and {steps:.0f} steps per matrix."
    return text


if __name__ == "__main__":
    main()
