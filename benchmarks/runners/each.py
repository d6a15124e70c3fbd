"""Runs a client on folders: what every runner here shares. Needs nothing but numpy.

A runner is a script for the client's own environment: `PYTHON run_CLIENT.py OUT NAME=FOLDER …`.
Beside FOLDER lies `FOLDER.npz`, with what is expected. A line of JSON is added to OUT for every
folder, so that what was found stays if the client ends the process.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Path, np.ndarray, np.ndarray, int], dict[str, Any]]
"""(folder, ids, start, steps) → `logits` or `log_probabilities` after each of the ids (or the first
of them), and the `greedy` ids that continue the start."""


def every_folder(run: Run, packages: list[str]) -> None:
    """Runs every folder of the command line; an error is a result, and the next one goes on."""
    out, *folders = sys.argv[1:]
    with open(out, "a", encoding="utf-8") as file:
        write(file, {"versions": {name: version(name) for name in packages}})
        for folder in folders:
            print(folder, flush=True)
            write(file, {"folder": folder, **compared(run, Path(folder))})


def write(file: Any, line: dict[str, Any]) -> None:
    """A line that is there whatever comes next."""
    file.write(json.dumps(line) + "\n")
    file.flush()


def compared(run: Run, folder: Path) -> dict[str, Any]:
    """What the client makes of a folder, beside what is expected; or its error."""
    expected = np.load(folder.with_suffix(".npz"))
    ids, logits, greedy = expected["ids"], expected["logits"], expected["greedy"]
    try:
        found = run(folder, ids, ids[: len(ids) // 4], len(greedy))
    except Exception as error:  # whatever a client raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}
    measure = "logits" if "logits" in found else "log_probabilities"
    reference = logits if measure == "logits" else log_softmax(logits)
    values = np.asarray(found[measure], dtype=np.float64)
    reference = reference[: len(values), : values.shape[1]]
    return {
        "measure": measure,
        "difference": float(np.abs(values - reference).max()),
        "largest": float(np.abs(reference).max()),
        "greedy": [int(token) for token in found["greedy"]] == greedy.tolist(),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of every row."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def continued(logits_of: Callable[[list[int]], Any], start: np.ndarray, steps: int) -> list[int]:
    """A greedy text without a cache, for clients that are asked for logits alone."""
    ids = [int(token) for token in start]
    for _ in range(steps):
        ids.append(int(np.asarray(logits_of(ids))[-1].argmax()))
    return ids[len(start) :]
