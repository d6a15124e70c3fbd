"""Trains a tiny Mixtral on a text, so that pruning experts can be tried on weights that learned.

python -m benchmarks.tiny_moe TEXT FOLDER_OF_TOKENIZER OUT

300 steps, some five minutes on one core.
"""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LENGTH, BATCH, STEPS, PEAK, WARM_UP = 256, 16, 300, 3e-3, 40
BALANCE = 0.02
"""Weight of the loss that keeps every expert in use."""


def train(
    text: Path, tokenizer: Path, out: Path, *, seed: int = 0, sizes: dict[str, Any] | None = None
) -> None:
    """Writes `out`: a model, and the tokenizer's files.

    Args:
        text: what is learned.
        tokenizer: folder of the tokenizer.
        out: folder that is made.
        seed: of the weights and the batches.
        sizes: keys of the configuration in place of those in SIZES.
    """
    torch.manual_seed(seed)
    ids = AutoTokenizer.from_pretrained(tokenizer)(text.read_text(), return_tensors="pt").input_ids
    windows = ids[0, : ids.shape[1] // LENGTH * LENGTH].view(-1, LENGTH)
    config = MixtralConfig(
        **SIZES | (sizes or {}),
        vocab_size=int(ids.max()) + 1,
        bos_token_id=None,
        eos_token_id=None,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE,
    )
    model = MixtralForCausalLM(config).train()
    _fit(model, windows)
    model.config.output_router_logits = False
    model.eval().save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


def _fit(model: MixtralForCausalLM, windows: Tensor) -> None:
    """AdamW; the rate rises, and falls to a tenth along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(STEPS):
        share = (step + 1) / STEPS
        rate = PEAK * min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = windows[torch.randint(len(windows), (BATCH,))]
        found = model(input_ids=batch, labels=batch)
        optimizer.zero_grad()
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"{step + 1} steps of {STEPS}: loss {float(found.loss):.3f}", flush=True)


if __name__ == "__main__":
    train(*(Path(argument) for argument in sys.argv[1:4]))
