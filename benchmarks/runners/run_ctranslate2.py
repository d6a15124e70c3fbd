"""CTranslate2, through its converter of transformers' models."""

import tempfile
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from each import continued, every_folder


def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """Converted and run in float32."""
    with tempfile.TemporaryDirectory() as place:
        made = ctranslate2.converters.TransformersConverter(str(folder)).convert(f"{place}/model")
        generator = ctranslate2.Generator(made, device="cpu", compute_type="float32")

        def logits(tokens: list[int]) -> np.ndarray:
            found: np.ndarray = np.asarray(generator.forward_batch([tokens]))[0]
            return found

        return {"logits": logits(ids.tolist()), "greedy": continued(logits, start, steps)}


if __name__ == "__main__":
    every_folder(run, ["ctranslate2", "transformers"])
