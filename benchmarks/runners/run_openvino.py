"""OpenVINO, through optimum-intel's export."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from each import every_folder
from optimum.intel import OVModelForCausalLM

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """Exported in float32."""
    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, load_in_8bit=False, ov_config=EXACT
    )
    prompt = torch.from_numpy(ids)[None]
    logits = model(input_ids=prompt, attention_mask=torch.ones_like(prompt)).logits[0]
    begun = torch.from_numpy(start)[None]
    greedy = model.generate(
        begun, attention_mask=torch.ones_like(begun), max_new_tokens=steps, do_sample=False,
        eos_token_id=None,
    )[0, len(start) :]  # fmt: skip
    return {"logits": np.asarray(logits), "greedy": greedy.tolist()}


if __name__ == "__main__":
    every_folder(run, ["optimum-intel", "openvino", "transformers", "torch"])
