"""transformers: a checkpoint as `from_pretrained` loads it, whole, and generating with a cache."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from each import every_folder
from transformers import AutoModelForCausalLM

UNUSED = ("missing_keys", "unexpected_keys", "mismatched_keys")


def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """Raises ValueError where a tensor was left out or made up."""
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, loading = found
    odd = {kind: sorted(map(str, loading[kind])) for kind in UNUSED if loading.get(kind)}
    if odd:
        raise ValueError(f"loaded, but {odd}")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        greedy = model.generate(
            torch.from_numpy(start)[None], max_new_tokens=steps, do_sample=False, eos_token_id=None
        )[0, len(start) :]
    return {"logits": logits.numpy(), "greedy": greedy.tolist()}


if __name__ == "__main__":
    every_folder(run, ["transformers", "torch"])
