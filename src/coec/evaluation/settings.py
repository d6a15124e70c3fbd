"""Settings of `coec eval`, and of the runs that `coec analyze` times.

A field is a flag, its help and its check, and an argument of Python.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

from coec.calibration.sources import Split
from coec.errors import OptionError
from coec.settings.fields import Settings, check_seed, setting
from coec.settings.parts import DtypeName, StartRule

Via: TypeAlias = Literal["coec", "transformers"]
"""Who builds the model that is measured."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Settings):
    """Settings of everything that runs the model."""

    seq_len: int | None = setting(
        None, "Tokens per window; of tasks, the most tokens of a request.", least=2,
        otherwise="4096, or the model's maximum if less; of tasks, the model's maximum",
    )  # fmt: skip
    device: str = setting("auto", "auto (a GPU where there is one), cpu, cuda, cuda:1, …")
    dtype: DtypeName | None = setting(
        None, "Dtype of the forward pass.", otherwise="the model's on a GPU, float32 on the CPU"
    )


@dataclass(frozen=True, kw_only=True)
class TextEvaluation(Measurement):
    """Settings of a perplexity."""

    split: Split = setting("test", "Split of a data set.")
    text_column: str = setting("text", "Column of a jsonl or parquet file, or of a hub: data set.")
    max_windows: int | None = setting(
        None, "Evaluate the first so many windows.", otherwise="all", least=1
    )
    samples: int = setting(64, "Windows to sample, where the text is self.", least=1)
    seed: int = setting(
        1, "Seed of the sampled text, where the text is self.", least=0, check=check_seed
    )
    bos: StartRule = setting(
        "auto",
        "Begin every window with the tokens that the tokenizer puts before a text: on, off, or "
        "auto, where the baseline, or else MODEL, predicts a few windows better behind them by a "
        "tenth of a nat per token, as Gemma does.",
    )
    via: Via = setting(
        "coec",
        "Who builds MODEL: coec, for the architectures that it prunes, or transformers, for any "
        "causal model, quantised or with an adapter too.",
    )


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation(Measurement):
    """Settings of zero-shot tasks."""

    tasks_data: str | Path | None = setting(
        None, "Folder of <task>.jsonl files in the schema of the tasks' hub data sets.",
        otherwise="the hub", objects=True,
    )  # fmt: skip
    limit: int | None = setting(None, "The first N items of each task.", otherwise="all", least=1)
    batch_size: int = setting(8, "Requests per forward pass.", least=1)


@dataclass(frozen=True, kw_only=True)
class Workload(Settings):
    """The work of a run: prefill a prompt, then decode greedily, token by token with a cache.

    Each model has `repeats` timed runs, after `warmup` untimed ones.
    """

    prompt_tokens: int = setting(512, "Prompt of a run, capped by the model.", least=1)
    new_tokens: int = setting(64, "Tokens decoded after it.", least=1)
    batch_size: int = setting(1, "Sequences at once.", least=1)
    repeats: int = setting(5, "Timed runs of each model, in turns.", least=1)
    warmup: int = setting(1, "Untimed runs of each before.", least=0)

    def within(self, positions: int) -> "Workload":
        """Shorten the prompt to leave room for the new tokens; raises OptionError if none is."""
        room = positions - self.new_tokens
        if positions < 2:
            raise OptionError(f"the model has {positions} positions: speed needs two")
        if room < 1:
            raise OptionError(
                f"new_tokens={self.new_tokens} leaves no room for a prompt in the model's "
                f"{positions} positions; use {positions - 1} or less"
            )
        return replace(self, prompt_tokens=min(self.prompt_tokens, room))


class TextSettings(TypedDict, total=False):
    """Settings of `TextEvaluation` as keyword arguments."""

    seq_len: int | None
    device: str
    dtype: DtypeName | None
    split: Split
    text_column: str
    max_windows: int | None
    samples: int
    seed: int
    bos: StartRule
    via: Via


class TaskSettings(TypedDict, total=False):
    """Settings of `TaskEvaluation` as keyword arguments."""

    seq_len: int | None
    device: str
    dtype: DtypeName | None
    tasks_data: str | Path | None
    limit: int | None
    batch_size: int
