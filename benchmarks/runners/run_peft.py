"""peft: LoRA of every linear map, attached, at work and merged."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from each import every_folder
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


@torch.no_grad()
def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """With an adapter that does nothing yet; raises ValueError where merging changes logits."""
    torch.manual_seed(0)
    prompt, begun = torch.from_numpy(ids)[None], torch.from_numpy(start)[None]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).eval()
    logits = model(input_ids=prompt).logits[0]
    greedy = model.generate(
        input_ids=begun, max_new_tokens=steps, do_sample=False, eos_token_id=None
    )[0, len(start) :]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    adapted = model(input_ids=prompt).logits[0]
    merged = model.merge_and_unload()(input_ids=prompt).logits[0]
    away, change = (merged - adapted).abs().max(), (adapted - logits).abs().max()
    if away > 1e-3 or change < 1e-2:
        raise ValueError(f"merged is {away:.2g} off; the adapter changes logits by {change:.2g}")
    return {"logits": logits.numpy(), "greedy": greedy.tolist()}


if __name__ == "__main__":
    every_folder(run, ["peft", "transformers", "torch"])
