"""The settings of `coec recover`."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from coec.errors import OptionError, check_installed
from coec.settings.fields import Settings, check_seed, check_whole, setting, without_effect
from coec.settings.parts import Source

TeacherPlace = Literal["beside", "stored"]
PassDtypeName = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "adamw-8bit"]
DEFAULT_TOKENS = 10_000_000
KNOWN_GAIN = "100,000 tokens took 13 % off the KL of SmolLM2-135M"
"""What training gave on a real model, from `fast` by block at 30 % (docs/RECOVER.md)."""
_MOST_WINDOWS, _LEAST_STEPS = 8, 500
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmb]?)", re.IGNORECASE)


def token_count(amount: Any) -> int:
    """Return a number of tokens, written as 20_000_000, "20M", "1.5b" or "300k".

    Raises:
        OptionError: it is no number of tokens, or less than one.
    """
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount.strip().replace(",", ""))
        if match is None:
            raise OptionError(f"tokens is a number such as 300k, 20M or 1B, got {amount!r:.80}")
        amount = int(float(match[1]) * _UNITS[match[2].lower()])
    return check_whole("tokens", amount)


def check_can_train(recovery: "Recovery | None" = None) -> None:
    """Raise OptionError unless the packages that train can be imported."""
    check_installed("training", "'coec[recover]'", "accelerate")
    if recovery is not None and recovery.lora is not None:
        check_installed("training", "'coec[recover]'", "peft")
    if recovery is not None and recovery.optimizer == "adamw-8bit":
        check_installed("training", "torchao", "torchao")


@dataclass(frozen=True, kw_only=True)
class Recovery(Settings):
    """Settings of a recovery: its text, its budget, and how weights are trained.

    `tokens` is a number once the object is made; None where `minutes` decides.

    Attributes:
        text: What is trained on: wikitext2; c4; hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (their
            train splits); self (text that the dense model writes); a .txt, .jsonl, .parquet, .npy
            or .safetensors file; or a mixture, as in calibration.
        tokens: Number of tokens to train on, such as 300k or 20M.
        minutes: Minutes of training, in place of tokens, by the speed of the first steps.
        lora: Train low-rank additions (LoRA) of this rank to every linear layer in place of all
            weights, and merge them in the end.
        learning_rate: Peak learning rate; it then falls linearly to zero.
        optimizer: `adamw`, or `adamw-8bit`, whose two moments take a byte each in place of four
            (needs torchao).
        cross_entropy: Share of the text's own cross-entropy in the loss; the rest is the divergence
            from the dense model.
        batch_size: Windows per optimiser step.
        seq_len: Tokens per window.
        teacher: The dense model: `beside` the pruned one in memory, or its most probable next
            tokens `stored` on the disk before training.
        checkpointing: Gradient checkpointing: activations are computed again, not kept, which takes
            less memory and a third more time.
        forward_dtype: Dtype of forward and backward passes; trained weights are float32 meanwhile.
        seed: Random seed for the validation windows and the order of the others.
        text_column: Column of a jsonl or parquet file, or of a hub: data set.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1, …
    """

    text: Source = setting("wikitext2", objects=True)
    tokens: Any = setting(None, otherwise="10M, or what minutes are for")
    minutes: float | None = setting(None, otherwise="none", least=0)
    lora: int | None = setting(None, otherwise="all weights are trained", least=1)
    learning_rate: float | None = setting(
        None, otherwise="by the size of the weights (docs/RECOVER.md)", least=0
    )
    optimizer: OptimizerName = setting("adamw")
    cross_entropy: float = setting(0.0, least=0, most=1)
    batch_size: int | None = setting(
        None,
        otherwise=f"{_MOST_WINDOWS}, or fewer where a budget would not give {_LEAST_STEPS} steps",
        least=1,
    )
    seq_len: int | None = setting(None, otherwise="2048, or the model's maximum if less", least=2)
    teacher: TeacherPlace = setting("beside")
    checkpointing: bool | None = setting(None, otherwise="where they would not fit")
    forward_dtype: PassDtypeName | None = setting(
        None, otherwise="bfloat16 for narrow models on a GPU, else float32"
    )
    seed: int = setting(0, least=0, check=check_seed)
    text_column: str = setting("text")
    device: str = setting("auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:
            object.__setattr__(self, "tokens", token_count(self.tokens))
        if self.minutes is not None:
            if self.tokens is not None:
                raise OptionError("tokens and minutes are both a budget: give one of them")
            if not self.minutes:
                raise OptionError("minutes=0 is no budget: give more")
            if self.teacher == "stored":
                raise without_effect("minutes", "teacher=stored, whose tokens are written first")
        elif self.tokens is None:
            object.__setattr__(self, "tokens", DEFAULT_TOKENS)
        if self.learning_rate == 0:
            raise OptionError("learning_rate=0 changes nothing: leave it out, or give a rate")

    def windows_per_step(self, seq_len: int, tokens: int | None) -> int:
        """Return the windows of a step: as asked, or as many as leave a budget enough steps.

        Args:
            tokens: the budget; None where it is not known yet.

        Raises:
            OptionError: one step would be more than the budget.
        """
        if self.batch_size is not None:
            largest = self.batch_size if tokens is None else max(1, tokens // seq_len)
            if self.batch_size > largest:
                raise OptionError(
                    f"one step of batch_size={self.batch_size} windows of {seq_len:,} tokens is "
                    f"more than the {tokens:,} tokens to train on: take at most {largest:,} "
                    "windows, or more tokens"
                )
            return self.batch_size
        if tokens is None:
            return _MOST_WINDOWS
        return min(_MOST_WINDOWS, max(1, tokens // (_LEAST_STEPS * seq_len)))

    @property
    def own(self) -> bool:
        """True where the text is the dense model's own."""
        return isinstance(self.text, str) and self.text == "self"
