"""The settings of `coec eval`."""

from typing import Literal

from coec.config import DtypeName, Settings, setting


class TextEvaluation(Settings):
    """Settings of a perplexity."""

    split: Literal["train", "validation", "test"] = setting("test")
    """Split of a data set."""
    text_column: str = setting("text")
    """Column of a jsonl or parquet file, or of a hub: data set."""
    max_windows: int | None = setting(None, ge=1, otherwise="all")
    """Evaluate only the first windows, at most this many."""
    samples: int = setting(64, ge=1)
    """Number of windows of the text self, and the most of self:PROMPTS.jsonl."""
    seed: int = setting(1, ge=0)
    """Seed of the sampled text."""
    answer_tokens: int | None = setting(None, ge=1, otherwise="as many as a window has")
    """Number of tokens of the longest answer to a prompt."""
    bos: Literal["auto", "on", "off"] = setting("auto")
    """Begin every window with the tokens that the tokenizer puts before a text: on, off, or auto:
    on if the baseline, or else MODEL, then predicts a few windows better by a tenth of a nat per
    token, as Gemma does."""
    via: Literal["coec", "transformers"] = setting("coec")
    """Program that builds MODEL: coec, for the architectures that it prunes, or transformers, for
    any causal model, also quantised or with an adapter."""
    seq_len: int | None = setting(None, ge=2, otherwise="4096, or the model's maximum if less")
    """Tokens per window."""
    device: str = setting("auto")
    """auto (a GPU if there is one), cpu, cuda, cuda:1, …"""
    dtype: DtypeName | None = setting(None, otherwise="the model's on a GPU, float32 on the CPU")
    """Dtype of the forward pass."""
