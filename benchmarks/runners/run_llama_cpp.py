"""llama.cpp, through llama-cpp-python: the file `FOLDER.gguf` that coec export wrote."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from each import continued, every_folder

sys.path.append(str(Path(__file__).parents[2] / "tests/exporting"))
from llama import Llama


def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """In float32, with a cache in float32 and without flash attention."""
    return computed(folder.with_suffix(".gguf"), ids, start, steps)


def computed(file: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """What a GGUF file computes; raises ValueError where llama.cpp does not load it."""
    model = Llama(file)
    try:
        return {
            "logits": model.logits(ids.tolist()).numpy(),
            "greedy": continued(lambda tokens: model.logits(tokens).numpy(), start, steps),
        }
    finally:
        model.close()


if __name__ == "__main__":
    every_folder(run, ["llama-cpp-python", "gguf"])
