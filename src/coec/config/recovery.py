"""The settings of `coec recover`."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from coec.config import Settings, asks, own_parts, setting, without_effect
from coec.errors import OptionError

PassDtypeName = Literal["float32", "bfloat16"]
DEFAULT_TOKENS = 10_000_000
_MOST_WINDOWS, _LEAST_STEPS = 8, 500
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


class Recovery(Settings):
    """Settings of a recovery: its text, its budget, and how weights are trained.

    `tokens` is a number once the object is made; None if `minutes` are the budget.
    """

    text: Any = setting("wikitext2")
    """Text to train on: wikitext2; c4; hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (their train
    splits); self (text that the teacher writes); self:PROMPTS.jsonl (its answers to prompts); a
    .txt, .jsonl, .parquet, .npy or .safetensors file; or a mixture, as in calibration."""
    answer_tokens: int | None = setting(None, ge=1, otherwise="as many as a window has")
    """Number of tokens of the longest answer to a prompt."""
    tokens: int | None = setting(None, ge=1, otherwise="10M, unless minutes are given")
    """Number of tokens to train on, such as 300k or 20M."""
    minutes: float | None = setting(None, gt=0, otherwise="none")
    """Minutes of training instead of tokens, converted by the speed of the first steps."""
    lora: int | None = setting(None, ge=1, otherwise="all weights are trained")
    """Train low-rank additions (LoRA) of this rank to every linear layer, and merge them in the
    end."""
    learning_rate: float | None = setting(
        None, gt=0, otherwise="by the size of the weights (docs/RECOVER.md)"
    )
    """Peak learning rate; it then falls linearly to zero."""
    optimizer: Literal["adamw", "adamw-8bit"] = setting("adamw")
    """`adamw`, or `adamw-8bit`, whose two moments take one byte each instead of four (needs
    torchao)."""
    cross_entropy: float = setting(0.0, ge=0, le=1)
    """Share of the text's own cross-entropy in the loss; the rest is the divergence from the
    teacher."""
    batch_size: int | None = setting(
        None,
        ge=1,
        otherwise=f"{_MOST_WINDOWS}, or fewer if a budget would give less than {_LEAST_STEPS} "
        "steps",
    )
    """Windows per optimiser step."""
    seq_len: int | None = setting(None, ge=2, otherwise="2048, or the model's maximum if less")
    """Tokens per window."""
    teacher: str | Path | None = setting(None, otherwise="the dense model")
    """Model to learn from, by folder or hub name, such as a larger or fine-tuned one with the same
    tokenizer."""
    predictions: Literal["live", "stored"] = setting("live")
    """Predictions of the teacher: `live` if it is in memory during training, or its most probable
    next tokens `stored` on the disk before."""
    checkpointing: bool | None = setting(None, otherwise="on if activations would not fit")
    """Gradient checkpointing: recompute activations, which takes less memory and a third more
    time."""
    forward_dtype: PassDtypeName | None = setting(
        None, otherwise="bfloat16 for narrow models on a GPU, else float32"
    )
    """Dtype of forward and backward passes; trained weights are float32 meanwhile."""
    seed: int = setting(0, ge=0)
    """Random seed for the choice of validation windows and the order of the others."""
    text_column: str = setting("text")
    """Column of a jsonl or parquet file, or of a hub: data set."""
    device: str = setting("auto")
    """auto (a GPU if there is one), cpu, cuda, cuda:1, …"""

    @model_validator(mode="before")
    @classmethod
    def _default_budget(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = values.get("tokens") is not None or values.get("minutes") is not None
        return values if given else {**values, "tokens": DEFAULT_TOKENS}

    @field_validator("tokens", mode="before")
    @classmethod
    def _number_of_tokens(cls, amount: Any) -> Any:
        """Read a number of tokens, written as 20_000_000, "20M", "1.5b" or "300k"."""
        if not isinstance(amount, str):
            return amount
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", amount.lower().replace(",", ""))
        if match is None:
            raise ValueError("be a number such as 300k, 20M or 1B")
        return int(float(match[1]) * _UNITS[match[2]])

    @model_validator(mode="after")
    def _one_budget(self) -> "Recovery":
        if self.tokens is not None and self.minutes is not None:
            raise OptionError("tokens and minutes are both a budget: give one of them")
        if self.answer_tokens is not None and not asks(self.text):
            raise without_effect("answer_tokens", "without text = self:PROMPTS.jsonl")
        if self.minutes is not None and self.predictions == "stored":
            raise OptionError("minutes cannot be a budget with predictions=stored: give tokens")
        return self

    def windows_per_step(self, seq_len: int, tokens: int | None) -> int:
        """Return the windows of a step: as asked, or as many as leave a budget enough steps.

        Args:
            seq_len: tokens per window.
            tokens: the budget; None if it is not known yet.

        Raises:
            OptionError: one step would be more than the budget.
        """
        if self.batch_size is None:
            most = _MOST_WINDOWS if tokens is None else tokens // (_LEAST_STEPS * seq_len)
            return min(_MOST_WINDOWS, max(1, most))
        if tokens is not None and self.batch_size > max(1, tokens // seq_len):
            raise OptionError(
                f"batch_size={self.batch_size} windows of {seq_len:,} tokens are more than the "
                f"{tokens:,} tokens to train on: lower it, or take more tokens"
            )
        return self.batch_size

    @property
    def own(self) -> bool:
        """True if the teacher writes the text, or a part of it."""
        return bool(own_parts(self.text))
