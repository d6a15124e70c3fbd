"""Settings of `coec eval`, and of the runs that `coec analyze` times.

A field is a flag, its help and its check, and an argument of Python.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from coec.calibration.sources import Split
from coec.errors import OptionError
from coec.settings.fields import Settings, check_seed, setting
from coec.settings.parts import DtypeName, StartRule

Via: TypeAlias = Literal["coec", "transformers"]
"""Who builds the model that is measured."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Settings):
    """Settings of everything that runs the model.

    Attributes:
        seq_len: Tokens per window; of tasks, the most tokens of a request.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1, …
        dtype: Dtype of the forward pass.
    """

    seq_len: int | None = setting(
        None, least=2,
        otherwise="4096, or the model's maximum if less; of tasks, the model's maximum",
    )  # fmt: skip
    device: str = setting("auto")
    dtype: DtypeName | None = setting(None, otherwise="the model's on a GPU, float32 on the CPU")


@dataclass(frozen=True, kw_only=True)
class TextEvaluation(Measurement):
    """Settings of a perplexity.

    Attributes:
        split: Split of a data set.
        text_column: Column of a jsonl or parquet file, or of a hub: data set.
        max_windows: Evaluate the first so many windows.
        samples: Windows to sample, where the text is self.
        seed: Seed of the sampled text, where the text is self.
        bos: Begin every window with the tokens that the tokenizer puts before a text: on, off, or
            auto, where the baseline, or else MODEL, predicts a few windows better behind them by a
            tenth of a nat per token, as Gemma does.
        via: Who builds MODEL: coec, for the architectures that it prunes, or transformers, for any
            causal model, quantised or with an adapter too.
    """

    split: Split = setting("test")
    text_column: str = setting("text")
    max_windows: int | None = setting(None, otherwise="all", least=1)
    samples: int = setting(64, least=1)
    seed: int = setting(1, least=0, check=check_seed)
    bos: StartRule = setting("auto")
    via: Via = setting("coec")


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation(Measurement):
    """Settings of zero-shot tasks.

    Attributes:
        tasks_data: Folder of <task>.jsonl files in the schema of the tasks' hub data sets.
        limit: The first N items of each task.
        batch_size: Requests per forward pass.
    """

    tasks_data: str | Path | None = setting(None, otherwise="the hub", objects=True)
    limit: int | None = setting(None, otherwise="all", least=1)
    batch_size: int = setting(8, least=1)


@dataclass(frozen=True, kw_only=True)
class Workload(Settings):
    """The work of a run: prefill a prompt, then decode greedily, token by token with a cache.

    Attributes:
        prompt_tokens: Prompt of a run, capped by the model.
        new_tokens: Tokens decoded after it.
        batch_size: Sequences at once.
        repeats: Timed runs of each model, in turns.
        warmup: Untimed runs of each before.
    """

    prompt_tokens: int = setting(512, least=1)
    new_tokens: int = setting(64, least=1)
    batch_size: int = setting(1, least=1)
    repeats: int = setting(5, least=1)
    warmup: int = setting(1, least=0)

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
