"""Token windows sampled from the dense model itself, for users without data."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase

from coec.config import nth_seed
from coec.devices import FreeMemory
from coec.errors import CalibrationError, ModelError
from coec.models.description import Description
from coec.planning.memory import MOST_SAMPLED, window_bytes
from coec.text.chats import chat_start, encode
from coec.text.tokens import digest
from coec.text.windows import Windows, check_start

_SHARE = 0.8
"""Share of free memory that the windows which are sampled at once may take."""


def windows_that_fit(model: Description, network: Any, seq_len: int) -> int:
    """Return how many windows are sampled at once of a network in memory, on its device."""
    size = window_bytes(model.shape, model.vocabulary, seq_len, network.dtype.itemsize)
    free, count = FreeMemory.of(network.device).computing, MOST_SAMPLED
    while count > 1 and free is not None and count * size > _SHARE * free:
        count //= 2
    return count


def sample_from_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    first: int = 0,
    at_once: int = MOST_SAMPLED,
) -> Windows:
    """Draw `samples` windows of `seq_len` tokens from the model at temperature 1.

    A model with a chat template writes chats, the user's words too: every window starts with the
    template's tokens before these (Xu et al. 2024, Magpie). Other windows start with the tokens
    that the tokenizer puts before an empty text (a BOS token), or, if none, with one token drawn
    uniformly from the vocabulary; no end token is drawn after that. Penalties and cut-offs of
    the model's generation_config.json do not apply. The global random state is left as it was.

    Args:
        model: the dense model, in memory.
        tokenizer: for the start token; None for a uniform one.
        seed: the same seed gives the same windows on one machine; use different ones for
            calibration and evaluation.
        first: number of the first window; every number has random numbers of its own.
        at_once: number of windows sampled together. Another number gives another text only where
            rounding tips a draw.

    Raises:
        CoecError: the tokenizer's start does not fit the model or the windows; or the model's
            logits are not finite.
    """
    chat = [] if tokenizer is None else chat_start(tokenizer)
    start = _start(model, tokenizer, seq_len, chat)
    rows: list[Tensor] = []
    with torch.no_grad(), _plain_generation(model) as ends:
        for begin in range(first, first + samples, at_once):
            numbers = range(begin, min(begin + at_once, first + samples))
            # A generator for every window, so that its numbers do not depend on the others.
            generators = [
                torch.Generator(model.device).manual_seed(nth_seed(seed, n)) for n in numbers
            ]
            # In a chat, end tokens end a turn.
            rows.append(_drawn(model, start, seq_len, [] if chat else ends, generators))
    ids = torch.cat(rows)
    return Windows(ids, f"self (seed {seed})", ids.numel(), digest(ids), len(start))


def _start(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, seq_len: int, chat: list[int]
) -> list[int]:
    """Return the tokens that every window starts with: the start of a chat, or of a text."""
    start = chat or ([] if tokenizer is None else encode(tokenizer, "").tolist())
    vocabulary = int(model.config.get_text_config().vocab_size)
    if any(not 0 <= token < vocabulary for token in start):
        raise ModelError(
            f"the tokenizer starts a text with the tokens {start}, the model's vocabulary has "
            f"{vocabulary}: it was made for another model"
        )
    check_start(seq_len, len(start))
    return start


@contextlib.contextmanager
def _plain_generation(model: Any) -> Iterator[list[int]]:
    """Take away the model's generation configuration, which generate() merges into every other.

    Gives the end tokens, none of which is drawn.
    """
    own_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield sorted(end_tokens(model.config.get_text_config()) | end_tokens(own_config))
    finally:
        model.generation_config = own_config


class Finite(LogitsProcessor):
    """Raises CalibrationError for logits that are not finite; some may be −∞."""

    def __call__(
        self, input_ids: Int[Tensor, "n length"], scores: Float[Tensor, "n v"]
    ) -> Float[Tensor, "n v"]:
        if not scores.amax(dim=-1).isfinite().all():
            raise CalibrationError(
                "text cannot be sampled from the model: its logits are not finite; run it in "
                "float32 or bfloat16 (forward_dtype=NAME)"
            )
        return scores


class _Draw(Finite):
    """Turns logits into numbers the largest of which is a token drawn at temperature 1.

    Probabilities over exponential numbers, as `torch.multinomial` draws, from one generator for
    each window.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators

    def __call__(
        self, input_ids: Int[Tensor, "n length"], scores: Float[Tensor, "n v"]
    ) -> Float[Tensor, "n v"]:
        # argmax p_i / E_i with exponential E_i draws token i with probability p_i: greedy decoding
        # of these "logits" samples.
        probabilities = super().__call__(input_ids, scores).softmax(dim=-1)
        for row, generator in zip(probabilities, self.generators, strict=True):
            # One row at a time, each from its own generator.
            row /= torch.empty_like(row).exponential_(generator=generator)
        return probabilities


def _drawn(
    model: Any,
    start: list[int],
    seq_len: int,
    ends: list[int],
    generators: list[torch.Generator],
) -> Int[Tensor, "n length"]:
    """Return some windows, sampled together."""
    device, vocabulary = model.device, int(model.config.get_text_config().vocab_size)
    if start:
        prompt = torch.tensor([start], device=device).expand(len(generators), -1)
    else:
        first = [torch.randint(vocabulary, (1, 1), generator=g, device=device) for g in generators]
        prompt = torch.cat(first)
    # No sampling here: the processor has drawn already, and generate takes the largest.
    return _generated(model, prompt, seq_len - prompt.shape[1], ends, [_Draw(generators)])


@torch.no_grad()
def continued(model: Any, prompts: Int[Tensor, "n k"], count: int) -> Int[Tensor, "n count"]:
    """Continue prompts by the most probable tokens, none of which ends a text."""
    with _plain_generation(model) as ends:
        ids = _generated(model, prompts.to(model.device), count, ends, [])
    return ids[:, prompts.shape[1] :]


def _generated(
    model: Any,
    prompts: Int[Tensor, "n k"],
    count: int,
    ends: list[int],
    processors: list[LogitsProcessor],
) -> Int[Tensor, "n length"]:
    ids: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        logits_processor=processors,
        max_new_tokens=count,
        suppress_tokens=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    return ids.cpu()


def end_tokens(config: Any) -> set[int]:
    """Return the end tokens of a configuration, which writes none, one or several."""
    ends = config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)
