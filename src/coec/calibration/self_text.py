"""Token windows sampled from the dense model itself, for users without data."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from coec.calibration.tokens import Windows, digest, encoded
from coec.errors import CalibrationError, ModelError
from coec.events import Progress

BATCH = 32


def sample_from_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    progress: Progress | None = None,
) -> Windows:
    """`samples` windows of `seq_len` tokens drawn from the model at temperature 1.

    Every window starts with what the tokenizer puts before an empty text (a BOS token), or, where
    that is nothing, with one token drawn uniformly from the vocabulary; no end token is drawn after
    that. Penalties and cut-offs of the model's generation_config.json do not apply. The global
    random state is left as it was.

    Args:
        model: the dense model, in memory.
        tokenizer: for the start token; None for a uniform one.
        seed: the same seed gives the same windows on one machine; use different ones for
            calibration and evaluation.
        progress: called with ("sampling text", done, samples).

    Raises:
        CoecError: the tokenizer's start does not fit the model or the windows.
    """
    start = [] if tokenizer is None else encoded(tokenizer, "").tolist()
    vocabulary = int(model.config.vocab_size)
    if any(not 0 <= token < vocabulary for token in start):
        raise ModelError(
            f"the tokenizer starts a text with the tokens {start}, the model's vocabulary has "
            f"{vocabulary}: it was made for another model"
        )
    if seq_len <= len(start):
        raise CalibrationError(
            f"windows of {seq_len} tokens hold nothing but the {len(start)} that the tokenizer "
            "starts a text with; take longer ones (seq_len=N)"
        )
    own = model.generation_config
    banned = sorted(_ids(model.config.eos_token_id) | _ids(own.eos_token_id))
    rows = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        # generate() merges the model's generation configuration into every other.
        model.generation_config = GenerationConfig()
        try:
            for first in range(0, samples, BATCH):
                count = min(BATCH, samples - first)
                if start:
                    prompt = torch.tensor([start]).expand(count, -1)
                else:
                    prompt = torch.randint(vocabulary, (count, 1))
                prompt = prompt.to(model.device)
                rows.append(
                    model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        do_sample=True,
                        temperature=1.0,
                        top_k=0,
                        top_p=1.0,
                        max_new_tokens=seq_len - prompt.shape[1],
                        suppress_tokens=banned or None,
                        pad_token_id=banned[0] if banned else 0,
                    ).cpu()
                )
                if progress:
                    progress("sampling text", first + count, samples)
        finally:
            model.generation_config = own
    ids = torch.cat(rows)
    return Windows(ids, f"self (seed {seed})", ids.numel(), digest(ids), len(start))


def _ids(tokens: int | list[int] | None) -> set[int]:
    """Token ids, however a configuration writes them."""
    if tokens is None:
        return set()
    return {tokens} if isinstance(tokens, int) else set(tokens)
