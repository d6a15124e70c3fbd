"""Rows as a sweep writes them, made up but of the right shape; the same on every run."""

import hashlib
import json
import random
from pathlib import Path

from coec.experiments.files import RESULTS
from coec.experiments.reporting.frame import frame_of, read_rows
from coec.experiments.reporting.sections import Section, of_all_cells, of_grids

MODELS = {"stories260K": 4.6, "babyllama-1M": 21.0, "wt2-llama": 24.0}
TASKS = {"boolq": 0.5, "rte": 0.5, "hellaswag": 0.25, "winogrande": 0.5, "arc_easy": 0.25,
         "arc_challenge": 0.25, "openbookqa": 0.25}  # fmt: skip
NATIVE = {"wanda-sp": "none", "flap": "bias", "rcpu": "rcpu"}
EFFECT = {"none": 1.0, "bias": 0.9, "rcpu": 0.75, "least-squares": 0.6, "ridge-to-slice": 0.61,
          "coec": 0.58}  # fmt: skip
HARM = {"wanda-sp": 1.3, "flap": 1.0, "rcpu": 0.9}
OPTIONS = {"alpha": 0.9, "lambda_a": 50.0, "delta": 7e-4, "solver": "joint", "rounds": 50}
BLOCKS = 4
DIGEST = hashlib.sha256(b"text").hexdigest()


def row(model="wt2-llama", sparsity=0.3, selection="rcpu", compensation="coec", **changes) -> dict:
    """A row without measurements; changes go to the settings, or replace what they name."""
    options = OPTIONS if compensation == "coec" else {}
    own = {"samples", "seed", "holdout", "options", "calibration", "seq_len"}
    settings = {
        "sparsity": sparsity, "selection": selection, "compensation": compensation,
        "options": options, "calibration": "data/wikitext2/train.txt", "samples": 64,
        "seq_len": 256, "seed": 0, "holdout": None,
    } | {name: value for name, value in changes.items() if name in own}  # fmt: skip
    digest = hashlib.sha256(json.dumps([model, settings]).encode()).hexdigest()[:12]
    return {
        "cell": digest, "grids": [], "labels": {}, "status": "done", "error": None, "model": model,
        "settings": settings, "perplexity": None, "zero_shot": None, "sites": [],
        **{name: value for name, value in changes.items() if name not in own},
    }  # fmt: skip


def dense(model="wt2-llama", **changes) -> dict:
    return row(model, 0.0, None, "dense", **changes)


def perplexity(value: float, **changes) -> dict:
    """A perplexity result with that value."""
    return {
        "perplexity": value, "windows": 1000, "tokens": 255000, "seq_len": 256,
        "text": "data/wikitext2/test.txt", "text_sha256": DIGEST, "special_tokens": 0,
        "parameters": 2300000, "seconds": 3.1, **changes,
    }  # fmt: skip


def zero_shot(mean: float, tasks=TASKS) -> dict:
    """A zero-shot result whose tasks all score the same."""
    entry = {"acc_norm": None, "items": 100, "metric": "acc", "stderr": 0.02}
    return {
        "tasks": {t: {**entry, "acc": mean, "value": mean, "chance": c} for t, c in tasks.items()},
        "mean": mean, "mean_stderr": 0.01,
    }  # fmt: skip


def measured(model, sparsity, selection, compensation, draw, **changes) -> dict:
    """A row with everything measured, noise included."""
    made = row(model, sparsity, selection, compensation, **changes)
    harm = 4 * sparsity**1.5 * HARM.get(selection, 0) * EFFECT.get(compensation, 1)
    samples = made["settings"]["samples"]
    harm *= 1 + 4 / samples + draw.gauss(0, 0.02)
    before = 260_000 if model == "stories260K" else 3_050_000
    made["perplexity"] = perplexity(MODELS[model] * (1 + harm))
    made["zero_shot"] = zero_shot(0.39 - 0.05 * harm)
    made["parameters"] = {"before": before, "after": int(before * (1 - 0.8 * sparsity))}
    made["cost"] = {
        "weight_bytes": 4 * made["parameters"]["after"], "peak_memory_bytes": 600 * 2**20,
    }  # fmt: skip
    made["calibration"] = {
        "source": "data/wikitext2/train.txt", "windows": samples, "seq_len": 256,
        "tokens_available": 2_500_000, "text_sha256": DIGEST[::-1], "windows_sha256": DIGEST,
    }  # fmt: skip
    made["seconds"] = {"collecting": 4.2, "pruning": 11 * draw.random(), "evaluating": 9.0}
    made["peak_memory_bytes"] = 900 * 2**20
    made["environment"] = {
        "coec": "0.1.0", "python": "3.11", "torch": "2.13.0", "transformers": "5.23.0",
        "device": "cpu", "machine": "x86_64",
    }  # fmt: skip
    if compensation != "dense":
        made["sites"] = [
            site(block, kind, sparsity, compensation, draw)
            for block in range(BLOCKS)
            for kind in ("attention", "mlp")
        ]
    return made


def site(block, kind, sparsity, compensation, draw) -> dict:
    """One module: errors, and for COEC its rounds and angles."""
    first = sparsity * (0.5 + 0.1 * block + 0.05 * draw.random())
    last = first * EFFECT[compensation] * draw.uniform(0.8, 1.1)
    over = {"none": 1.0, "bias": 1.01, "rcpu": 1.02, "least-squares": 1.5, "ridge-to-slice": 1.4,
            "coec": 1.06}  # fmt: skip
    name = "self_attn.o_proj" if kind == "attention" else "mlp.down_proj"
    made = {
        "module": f"model.layers.{block}.{name}", "site": kind, "block": block,
        "error_before": first, "error_after": last, "holdout_before": first * 1.01,
        "holdout_after": last * over[compensation], "events": [], "seconds": 0.4, "geometry": None,
    }  # fmt: skip
    if compensation == "coec":
        count = draw.randint(6, 14)
        rounds = [last + (first - last) * 0.5**step for step in range(count)]
        made["errors_per_round"] = rounds
        made["rounds"], made["gcv_lambda"] = count, draw.uniform(0.1, 2.0)
        made["objectives_per_round"] = [value + 1e-4 for value in rounds]
        op = draw.uniform(14, 30)
        made["geometry"] = {
            "angle_op": op, "angle_oc": op + draw.gauss(0.6, 1), "angle_pc": draw.uniform(2, 6),
            "discrepancy": draw.uniform(0.005, 0.03),
        }  # fmt: skip
    return made


def sweep(seed: int = 0) -> list[dict]:
    """Most ready grids, a grid of a user's own, and a failed cell."""
    draw = random.Random(seed)
    made = []

    def add(grid, *place, **changes):
        made.append(measured(*place, draw, grids=[grid], **changes))

    for model in MODELS:
        made.append(measured(model, 0.0, None, "dense", draw, grids=["main"]))
        for sparsity in (0.1, 0.2, 0.3):
            for selection, native in NATIVE.items():
                for compensation in (native, "coec"):
                    add("main", model, sparsity, selection, compensation)
            for samples in (16, 32, 64, 128):
                for compensation in ("none", "rcpu", "coec"):
                    add("calibration-size", model, sparsity, "rcpu", compensation, samples=samples)
        for samples in (10, 40, 160):
            for compensation, options in fitted_compensations():
                add("overfitting", model, 0.3, "rcpu", compensation, holdout=0.2, samples=samples,
                    options=options)  # fmt: skip
    _one_option(add)
    failed = row("stories260K", 0.3, "flap", "bias", grids=["main"], status="failed")
    made.append(failed | {"error": "the logits overflow & the 100% _cross-entropy_ is #1 <NaN>"})
    return made  # the last line of a cell counts


def fitted_compensations() -> list[tuple[str, dict]]:
    """The compensations of the grid `overfitting`, with their options."""
    ridges = [("least-squares", ridge) for ridge in (1e-3, 1e-2, 1e-1, 1.0, 10.0)]
    ridges += [("ridge-to-slice", ridge) for ridge in (1e-2, 1.0)]
    solvers = [("coec", OPTIONS | {"solver": s}) for s in ("joint", "conjugate", "gradient")]
    swept = [(name, {"ridge": ridge}) for name, ridge in ridges]
    return [("none", {}), ("rcpu", {}), *solvers, *swept]


def _one_option(add) -> None:
    """Seeds, options, and a grid of a user's own."""
    for seed in range(3):
        for compensation in ("none", "rcpu", "coec"):
            add("seeds", "wt2-llama", 0.3, "rcpu", compensation, seed=seed)
    for grid, name, values in (
        ("alpha", "alpha", (0.3, 0.5, 0.7, 0.9, 1.0)),
        ("my-grid", "rounds", (1, 10, 50)),
    ):
        for value in values:
            add(grid, "wt2-llama", 0.3, "rcpu", "coec", options=OPTIONS | {name: value})
    for solver in ("joint", "gradient"):
        for rounds in (1, 10, 50, 100):
            options = OPTIONS | {"rounds": rounds, "solver": solver}
            add("rounds", "wt2-llama", 0.3, "rcpu", "coec", options=options)
    for rotation in ("left", "two-sided"):
        for ridge in (None, 0.0, 0.1, 1.0, 10.0):
            rule = "gcv" if ridge is None else "fixed"
            own = {"rotation": rotation, "rescale": rule, "rescale_ridge": ridge or 0.0}
            add("rescale-ridge", "wt2-llama", 0.3, "rcpu", "coec", options=OPTIONS | own)


def sections(folder: Path, rows: list[dict]) -> dict[str, Section]:
    """The sections of the report on some rows, by their titles."""
    read, _ = read_rows(write(folder, rows))
    cells = frame_of(read)
    made = [*of_grids(cells), *of_all_cells(read, cells)]
    return {section.title: section for section in made}


def table(folder: Path, rows: list[dict], title: str) -> list[list[str]]:
    """Heads and entries of the table of a section, with a star before what is bold."""
    written = sections(folder, rows)[title].table.written(str, "*{}".format)
    return [list(written.columns), *written.to_numpy().tolist()]


def write(folder: Path, rows: list[dict], tail: str = "") -> Path:
    """The rows as a sweep's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in rows)
    (folder / RESULTS).write_text(lines + tail, encoding="utf-8")
    return folder
