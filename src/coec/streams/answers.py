"""Text that the dense model writes: from nothing, or as its answers to a user's prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from coec.config import OWN, asks, nth_seed
from coec.errors import CalibrationError, first_line
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import Kept
from coec.streams.self_text import Finite, end_tokens, sample_from_model, windows_that_fit
from coec.text.chats import ChatTemplate
from coec.text.packing import Chat, packed
from coec.text.sources import read_prompts
from coec.text.tokens import digest
from coec.text.windows import Windows

GROUP = 32
"""Least number of answers to prompts, and of windows, that are kept together."""
_PASSES = 8
"""Largest number of answers to one prompt."""
Prompt = Int[Tensor, " n"]
Ask = Callable[[int, Sequence[Prompt], int], list[Chat]]
"""Return the answers to a group of prompts, given its number and a seed."""
Once = Callable[[str, Callable[[], Kept]], Kept]


@dataclass(frozen=True, eq=False)
class Prompts:
    """A user's prompts.

    Attributes:
        source: the text, as the user gave it.
        all: tokens of every prompt, up to the answer.
        longest: number of tokens of the longest answer.
        positions: of the model.
    """

    source: str
    all: Sequence[Prompt]
    longest: int
    positions: int

    @classmethod
    def read(
        cls,
        source: Any,
        column: str,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        positions: int,
    ) -> "Prompts | None":
        """Read the prompts of `self:FILE`, rendered by the tokenizer's chat template; None for any
        other text.

        A row has a `prompt`, a text or messages, or `messages` that end with the user's turn.

        Args:
            source: with a jsonl or parquet file.
            column: of the prompts; `text` for `prompt`.
            tokenizer: of the model that answers.
            longest: as in the attributes.
            positions: as in the attributes.

        Raises:
            CalibrationError: a row has no prompt, which the message names by its line.
        """
        if not asks(source):
            return None
        template = ChatTemplate(lambda: tokenizer)

        def rendered(document: str | list[Any]) -> Prompt:
            ids = template.prompt(document)
            if len(ids) >= positions:
                raise CalibrationError(
                    f"the prompt has {len(ids)} tokens, and the model {positions} positions: "
                    "shorten it"
                )
            return ids

        path = Path(source.removeprefix(f"{OWN}:"))
        return cls(source, list(read_prompts(path, column, rendered)), longest, positions)

    def windows(
        self,
        ask: Ask,
        *,
        samples: int,
        seq_len: int,
        seed: int,
        group: int,
        fewer: bool = False,
        progress: Progress | None = None,
    ) -> Windows:
        """Pack the first `samples` windows of answers.

        Prompts are drawn by the seed. If all are answered they are asked again, with other seeds.

        Args:
            ask: answers a group of prompts.
            samples: number of windows.
            seq_len: tokens of a window.
            seed: of the order of prompts, and of the answers.
            group: number of prompts in a group.
            fewer: ask every prompt once, and return what windows there are.
            progress: called with ("answering prompts", done, samples).

        Raises:
            CalibrationError: the answers are too few for so many windows.
        """
        order = torch.randperm(len(self.all), generator=torch.Generator().manual_seed(seed))
        groups, chats, tokens = order.split(group), list[Chat](), 0
        windows, known = packed(chats, seq_len).windows, set[str]()
        for number in range(len(groups) * (1 if fewer else _PASSES)):
            asked = [self.all[int(n)] for n in groups[number % len(groups)]]
            answers = ask(number, asked, nth_seed(seed, number))
            texts = {digest(chat.ids) for chat in answers}
            if number >= len(groups) and texts <= known:
                break  # the model does not draw its words
            known |= texts
            chats += answers
            tokens += sum(len(chat.ids) for chat in answers)
            if progress:
                progress("answering prompts", min(tokens // seq_len, samples), samples)
            if tokens >= samples * seq_len:  # packing leaves some out
                windows = packed(chats, seq_len).windows
                if len(windows) >= samples:
                    break
        if len(windows) < samples:
            windows = packed(chats, seq_len).windows
        if len(windows) < (1 if fewer else samples):
            raise CalibrationError(
                f"too few answers: '{self.source}' has {len(self.all)} prompts, whose answers fill "
                f"{len(windows)} windows of {seq_len} tokens, and {samples} are asked for: give "
                "more prompts, longer answers (answer_tokens=N), or fewer windows"
            )
        label = f"{self.source} ({len(chats):,} answers, seed {seed})"
        return Windows(ids := windows[:samples], label, tokens, digest(ids))

    def answered(
        self, model: Any, prompts: Sequence[Prompt], seed: int, at_once: int
    ) -> list[Chat]:
        """Let a model in memory answer prompts by its own generation settings.

        The global random state is left as it was.

        Args:
            model: the dense model.
            prompts: their tokens.
            seed: of the draws, if the settings draw.
            at_once: number of prompts in a batch, the shortest first.
        """
        chats, prompts = list[Chat](), sorted(prompts, key=len)
        for first in range(0, len(prompts), at_once):
            batch = prompts[first : first + at_once]
            count = min(self.longest, self.positions - len(batch[-1]))
            chats += _generated(model, batch, count, nth_seed(seed, first))
        return chats


@torch.no_grad()
def _generated(model: Any, prompts: Sequence[Prompt], count: int, seed: int) -> list[Chat]:
    """Return prompts with their answers of at most `count` tokens, all in one batch."""
    ends = sorted(end_tokens(model.generation_config))
    # Prompts end in the same place, after fillers that no token sees: a prompt's own first token,
    # since rules on repeated tokens may count them.
    width = max(map(len, prompts))
    ids = torch.stack([F.pad(p, (width - len(p), 0), value=int(p[0])) for p in prompts])
    mask = torch.stack([F.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts])
    on_gpu = model.device.type == "cuda"
    try:
        with torch.random.fork_rng(devices=[model.device] if on_gpu else []):
            torch.manual_seed(seed)
            whole = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=count,
                pad_token_id=ends[0] if ends else 0, num_return_sequences=1,
                return_dict_in_generate=False, logits_processor=[Finite()],
            )  # fmt: skip
    except (ImportError, TypeError, ValueError) as error:  # settings that generate cannot follow
        raise CalibrationError(
            f"the model cannot answer prompts ({first_line(error)}): mend its "
            "generation_config.json"
        ) from error
    chats = []
    for prompt, words in zip(prompts, whole[:, width:].cpu(), strict=True):
        found = torch.isin(words, torch.tensor(ends, dtype=words.dtype)).nonzero()
        row = torch.cat([prompt, words[: int(found[0]) + 1] if len(found) else words])
        chats.append(Chat(row, torch.arange(len(row)) >= len(prompt)))
    return chats


@dataclass(eq=False)
class Writer:
    """Lets the dense model write windows; answers are kept by `once`, group by group.

    Attributes:
        dense: the model.
        tokenizer: of the model.
        once: returns tensors and facts that are kept under a name, or makes and keeps them, where
            the network is.
        progress: called with (phase, done, samples).
        network: the model in memory, on the first process alone.
        fewer: as in `Prompts.windows`.
    """

    dense: Dense
    tokenizer: PreTrainedTokenizerBase
    once: Once
    progress: Progress | None
    network: Any = None
    fewer: bool = False

    def windows(
        self, prompts: Prompts | None, *, samples: int, seq_len: int, seed: int, name: str
    ) -> Windows:
        """Return windows of answers to prompts, or of text that begins with nothing.

        Args:
            prompts: the prompts; None for none.
            samples: number of windows.
            seq_len: tokens of a window.
            seed: of all draws.
            name: under which answers are kept, with the number of their group.
        """
        length = seq_len if prompts is None else max(map(len, prompts.all)) + prompts.longest

        def fit() -> Kept:
            count = windows_that_fit(self.dense, self.network, length)
            return {"at_once": torch.tensor(count)}, {}

        # A resumed run takes the same batches, whatever memory is free then.
        at_once = int(self.once(f"{name} at once", fit)[0]["at_once"])
        if prompts is None:
            return self._sampled(samples, seq_len, seed, name, at_once)

        # A group fills a batch, but asks no more prompts than the windows need at the least.
        size = max(GROUP, min(at_once, samples * seq_len // length))

        def ask(group: int, asked: Sequence[Prompt], seed: int) -> list[Chat]:
            def make() -> Kept:
                return _stored(prompts.answered(self.network, asked, seed, at_once)), {}

            return _restored(self.once(f"{name} {group}", make)[0])

        return prompts.windows(
            ask, samples=samples, seq_len=seq_len, seed=seed, group=size, fewer=self.fewer,
            progress=self.progress,
        )  # fmt: skip

    def _sampled(self, samples: int, seq_len: int, seed: int, name: str, at_once: int) -> Windows:
        """Return windows of text that begins with nothing."""
        parts, size = [], max(GROUP, at_once)
        for first in range(0, samples, size):

            def make(first: int = first) -> Kept:
                windows = sample_from_model(
                    self.network, self.tokenizer, samples=min(size, samples - first), first=first,
                    seq_len=seq_len, seed=seed, at_once=at_once,
                )  # fmt: skip
                return {"ids": windows.ids}, windows.record()

            tensors, facts = self.once(f"{name} {first // size}", make)
            parts.append(Windows.of_record(tensors["ids"], facts))
            if self.progress:
                self.progress("sampling text", min(first + size, samples), samples)
        ids = torch.cat([part.ids for part in parts])
        return replace(parts[0], ids=ids, available=ids.numel(), text_sha256=digest(ids))


def unkept(name: str, make: Callable[[], Kept]) -> Kept:
    """Make tensors and facts, and keep nothing."""
    return make()


def _stored(chats: Sequence[Chat]) -> dict[str, Tensor]:
    """Return chats as tensors of a file."""
    return {
        "ids": torch.cat([chat.ids for chat in chats]),
        "answered": torch.cat([chat.answered for chat in chats]),
        "lengths": torch.tensor([len(chat.ids) for chat in chats]),
    }


def _restored(tensors: Mapping[str, Tensor]) -> list[Chat]:
    """Return the chats of a file."""
    lengths = tensors["lengths"].tolist()
    parts = zip(tensors["ids"].split(lengths), tensors["answered"].split(lengths), strict=True)
    return [Chat(ids, answered) for ids, answered in parts]
