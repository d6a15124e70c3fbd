"""Calibration windows of a text, or of text that the dense model itself writes.

A text is read and checked before any work. The model writes its text when it is needed, and then
also chooses whether windows begin with the tokenizer's start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from coec import parallel
from coec.config import is_own, nth_seed
from coec.config.recipe import Recipe
from coec.devices import hand_back
from coec.errors import CalibrationError, NumericalError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.folder import generation_digest, tokenizer_digest
from coec.planning.plan import Plan
from coec.streams.answers import Once, Prompts, Writer
from coec.streams.head import Head
from coec.streams.layers import Layers
from coec.text.tokens import Extent, Stream, load_tokenizer, source_of
from coec.text.windows import (
    CHOICE,
    DEFAULT_SEQ_LEN,
    Windows,
    first_windows,
    mixed,
    resolve_seq_len,
    sample_windows,
    shares,
    source_digest,
    split_windows,
    text_notes,
    text_stream,
    validation_count,
)

MEASURED_TOKENS, _MEASURED_LENGTH = 2048, 512
"""Tokens after a start on which it is measured, and of each window, at most; the same without."""


class CalibrationWindows(NamedTuple):
    """Token ids to fit on, and for validation; and the record of both."""

    fit: Int[Tensor, "n length"]
    validation: Int[Tensor, "h length"] | None
    record: JsonDict


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """The text of a run, checked.

    Attributes:
        dense: the model, whose tokenizer reads it.
        recipe: says which text, and how many windows.
        source: the text, as it is read.
        drawn: windows of every text, without the tokenizer's start or with it, or both; None for a
            text that the model writes.
        prompts: the prompts of every text that answers them; else None.
        start: the tokenizer's start.
    """

    dense: Dense
    recipe: Recipe
    source: Any
    drawn: list[list[Windows | None]]
    prompts: list[Prompts | None]
    start: Int[Tensor, " k"]

    @classmethod
    def read(cls, dense: Dense, recipe: Recipe, progress: Progress | None) -> "CalibrationText":
        """Read the text, and draw its windows.

        Raises:
            CoecError: it cannot be read, or is too short.
        """
        validation_count(recipe.samples, recipe.holdout)
        seq_len = resolve_seq_len(recipe.seq_len, dense.positions, DEFAULT_SEQ_LEN)
        text = source_of(recipe.calibration, recipe.text_column)
        sources = shares(text, recipe.samples)
        prompts: list[Prompts | None] = [None] * len(sources)
        if recipe.own:
            tokenizer = load_tokenizer(dense.folder, trust_remote_code=recipe.trust_remote_code)
            longest = recipe.answer_tokens or seq_len
            prompts = [
                Prompts.read(source, recipe.text_column, tokenizer, longest, dense.positions)
                for source, _ in sources
            ]
        streams = [
            None if is_own(source) else text_stream(
                dense, source, recipe.text_column, Extent(CHOICE * samples * seq_len),
                trust_remote_code=recipe.trust_remote_code, progress=progress,
            )
            for source, samples in sources
        ]  # fmt: skip
        # Ways of drawing: without the start, with it, or both for the dense model to choose from
        starts = [stream.start for stream in streams if stream is not None]
        start = max(starts, key=len, default=torch.empty(0, dtype=torch.int64))
        if recipe.bos == "on" and not len(start):
            raise CalibrationError(
                f"bos=on has no effect on '{text}': token ids, chats and the model's own text are "
                "taken as they are, and to other text this tokenizer may add no start; leave bos "
                "out"
            )
        ways = [recipe.bos == "on"]
        if recipe.bos == "auto" and 0 < len(start) < seq_len // 2:  # two tokens can be compared
            ways = [False, True]
        counts = [samples for _, samples in sources]
        drawn = [_drawn(streams, counts, recipe, seq_len, bos=bos) for bos in ways]
        return cls(dense, recipe, text, drawn, prompts, start)

    @property
    def identity(self) -> JsonDict:
        """Facts on which the windows depend, JSON-ready; texts by digests of their content."""
        folder = self.dense.folder
        generation = {"generation_config": generation_digest(folder)} if self.recipe.own else {}
        return {
            "calibration": source_digest(self.source),
            "tokenizer": tokenizer_digest(folder),
            **generation,
        }

    def windows(self, plan: Plan, once: Once, progress: Progress | None) -> CalibrationWindows:
        """Return the windows; `once` keeps those that the model writes or chooses, and chats, whose
        template may write the date.
        """
        chats = any(windows is not None and windows.chats for windows in self.drawn[0])
        if len(self.drawn) == 1 and not self.recipe.own and not chats:
            windows = self._mixed(self.drawn[0])
        else:

            def make() -> tuple[dict[str, Tensor], JsonDict]:
                texts = self.drawn[0]
                if len(self.drawn) > 1:
                    texts = parallel.lead(self._chosen, plan, progress)
                if self.recipe.own:
                    texts = self._with_own(texts, plan, once, progress)
                made = self._mixed(texts)
                return {"input_ids": made.ids}, made.record()

            tensors, record = once("windows", make)
            windows = Windows.of_record(tensors["input_ids"], record)
        hand_back()  # memory of a text, or of the whole model
        fit, validation = split_windows(windows, self.recipe.holdout, self.recipe.seed)
        account = windows.record()
        return CalibrationWindows(fit, validation, account | {"notes": text_notes(account)})

    def _mixed(self, texts: Sequence[Windows | None]) -> Windows:
        return mixed([windows for windows in texts if windows], str(self.recipe.calibration))

    def _chosen(self, plan: Plan, progress: Progress | None) -> list[Windows | None]:
        """Choose between windows with the tokenizer's start and without, by the dense model."""
        plain, begun = self.drawn
        ids, count = self._mixed(begun).ids, len(self.start)
        ids = ids[(ids[:, :count] == self.start).all(dim=1)]  # chats are taken as they are
        on, off = start_entropies(self.dense, ids, count, plan, progress)
        if not (math.isfinite(on) and math.isfinite(off)):
            raise NumericalError(
                "whether the dense model predicts better after the tokenizer's start cannot be "
                "measured: its predictions are not finite; set bos=on or bos=off"
            )
        entropies = {"on": on, "off": off}
        return [
            w and replace(w, bos_cross_entropy=entropies) for w in (begun if on < off else plain)
        ]

    def _with_own(
        self, texts: Sequence[Windows | None], plan: Plan, once: Once, progress: Progress | None
    ) -> list[Windows | None]:
        """Add the windows that the model writes, for which alone the whole network is in memory."""
        recipe, folder = self.recipe, self.dense.folder
        tokenizer = load_tokenizer(folder, trust_remote_code=recipe.trust_remote_code)
        sources = shares(self.source, recipe.samples)
        try:
            network = partial(self.dense.network, plan.device, plan.forward, noted=True)
            writer = Writer(
                self.dense, tokenizer, lambda name, make: once(name, partial(parallel.lead, make)),
                progress, parallel.lead_only(network),
            )  # fmt: skip
            return [
                windows or writer.windows(
                    self.prompts[number], samples=samples, seq_len=plan.seq_len,
                    seed=_seed(recipe, number, len(sources)), name=f"answers {number}",
                )
                for number, (windows, (_, samples)) in enumerate(zip(texts, sources, strict=True))
            ]  # fmt: skip
        except torch.OutOfMemoryError:
            elsewhere = "" if plan.device.type == "cpu" else ", or device=cpu"
            raise CalibrationError(
                f"text cannot be sampled from the model: {plan.device} has no room for all of it: "
                f"calibrate on a text, not on self{elsewhere}"
            ) from None


def _seed(recipe: Recipe, number: int, sources: int) -> int:
    """Return the seed of one of several texts."""
    return nth_seed(recipe.seed, number) if sources > 1 else recipe.seed


def _drawn(
    streams: Sequence[Stream | None],
    counts: Sequence[int],
    recipe: Recipe,
    seq_len: int,
    *,
    bos: bool,
) -> list[Windows | None]:
    """Draw the windows of every text from its stream, with a seed of its own."""
    return [
        None if stream is None else sample_windows(
            stream, samples=samples, seq_len=seq_len, bos=bos, in_mixture=len(streams) > 1,
            seed=_seed(recipe, number, len(streams)),
        )
        for number, (stream, samples) in enumerate(zip(streams, counts, strict=True))
    ]  # fmt: skip


@torch.no_grad()
def start_entropies(
    dense: Dense,
    windows: Int[Tensor, "n length"],
    start: int,
    plan: Plan,
    progress: Progress | None,
) -> tuple[float, float]:
    """Return the dense model's cross-entropy on a few windows' text, after its start and without.

    Both are means over the same tokens, in nats. One block is in memory at a time.

    Args:
        dense: the model.
        windows: token ids.
        start: how many of them, in every window, are the tokenizer's start.
        plan: says where and in which dtype.
        progress: called with ("measuring bos", done, blocks).
    """
    length = min(_MEASURED_LENGTH, windows.shape[1] - start)
    # Windows of the same text twice: after the start, and without it.
    begun = first_windows(windows[:, :length], MEASURED_TOKENS)
    plain = windows[: len(begun), start : start + length]
    layers = Layers(dense, device=plan.device, dtype=plan.forward)
    states = layers.embed({0: torch.cat([begun, plain])}, dense.outside_tensors())[0]
    for block in dense.layout.blocks:
        layers.load(block, dense.tensors(block))
        states = layers.advance(block.index, states)
        layers.drop(block.index)
        if progress:
            progress("measuring bos", block.index + 1, len(dense.layout.blocks))
    head = Head(dense, device=plan.device, dtype=plan.forward)
    # As model and baseline, both over the text that follows the start.
    prediction = head.predicted(
        states[..., : len(begun), start:, :],
        states[..., len(begun) :, : length - start, :],
        begun[:, start:],
    )
    return prediction.cross_entropy, prediction.baseline_cross_entropy
