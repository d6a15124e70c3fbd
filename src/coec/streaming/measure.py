"""Where the statistics of a model's blocks come from: a dense pass over text, or a folder."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coec.calibration.tokens import Windows, hold_out
from coec.calibration.windows import (
    source_digest,
    window_length,
    with_judges,
)
from coec.devices import choose_device, choose_forward_dtype, choose_solve_dtype, hand_back
from coec.events import Progress
from coec.execution.journal import Journal
from coec.models.companion_files import tokenizer_digest
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import read_tensors, write_tensors
from coec.settings import Calibration, Runtime
from coec.streaming.dense_stream import DenseStream, Measured
from coec.streaming.statistics import Statistics
from coec.streaming.windows import window_maker

TEXT = "windows"
"""The piece of a run that holds its calibration windows."""


def depends_on(dense: Dense, calibration: Calibration, device: torch.device) -> dict[str, Any]:
    """All that the statistics of a dense pass depend on, JSON-ready, by the names of settings.

    The model is there by its fingerprint, the text by a digest of its content, and what a setting
    leaves open as it is resolved for this model and device.
    """
    dtype = choose_forward_dtype(calibration.forward_dtype, dense.dtype, device)
    return calibration.record() | {
        "judging": with_judges(calibration, dense).judging,
        "model": dense.fingerprint,
        "tokenizer": tokenizer_digest(dense.folder),
        "calibration": source_digest(calibration.source),
        "seq_len": window_length(calibration, dense),
        "forward_dtype": str(dtype).removeprefix("torch."),
    }


class Source(ABC):
    """Where the statistics of a model's blocks come from.

    Attributes:
        device: where they are.
    """

    device: torch.device

    @property
    @abstractmethod
    def made_with(self) -> dict[str, Any]:
        """All that they depend on, JSON-ready; model and text by what tells them from others."""

    @property
    def made_of(self) -> dict[str, str]:
        """The weights of which they were made, as in `Dense.digests_of`, where that is known."""
        return {}

    @property
    def forward_dtype(self) -> str:
        """In which they are computed."""
        return str(self.made_with["forward_dtype"])

    def solve_dtype(self, asked: str) -> torch.dtype:
        """In which compensations are computed on its device."""
        return choose_solve_dtype(asked, self.device)

    @abstractmethod
    def begin(self, done: Journal, progress: Progress | None) -> dict[str, Any]:
        """Makes the windows, or takes those that `done` has; returns their record."""

    def account(self) -> dict[str, Any]:
        """Who computed them, where that was not one process; JSON-ready."""
        return {}

    @abstractmethod
    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        """The blocks in order, without those in `skip`."""


class DensePass(Source):
    """The dense model run over a calibration text, which is checked before anything is computed.

    Args:
        dense: the model.
        calibration: which text, and how much of it.
        runtime: where to run.
        progress: called while a long text is tokenised.
        device: where to run, if that is not this process's to choose.

    Raises:
        CoecError: the text cannot be read, or is too short.
    """

    def __init__(
        self,
        dense: Dense,
        calibration: Calibration,
        runtime: Runtime,
        progress: Progress | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._dense, self._calibration = dense, calibration
        self.device = device or choose_device(runtime.device)
        asked = calibration.forward_dtype
        self._dtype = choose_forward_dtype(asked, dense.dtype, self.device)
        self._make = window_maker(dense, calibration, runtime, progress)
        self.windows: Windows | None = None

    @cached_property
    def made_with(self) -> dict[str, Any]:
        return depends_on(self._dense, self._calibration, self.device)

    def begin(self, done: Journal, progress: Progress | None) -> dict[str, Any]:
        """Text sampled from the model is kept: making it again would take its time again."""
        if TEXT in done:
            ids = read_tensors(done.path(TEXT))["input_ids"]
            self.windows = Windows.of_record(ids, done.facts(TEXT))
        else:
            made = self.draw(progress)
            if self._calibration.written:
                done.put(
                    TEXT,
                    done.work / "windows.safetensors",
                    lambda path: write_tensors({"input_ids": made.ids}, path),
                    **made.record(),
                    made_of=self._dense.digests_of(self._dense.layout.blocks),
                )
            self.windows = made
        return self.windows.record()

    def draw(self, progress: Progress | None = None) -> Windows:
        """Makes the windows anew."""
        windows = self._make(self.device, self._dtype, progress)
        hand_back()  # what a text took, or the whole model
        return windows

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The windows to fit on, and those that are held out, where some are."""
        assert self.windows is not None  # `begin` made them
        return hold_out(self.windows, self._calibration.held_out, self._calibration.seed)

    @property
    def dtype(self) -> torch.dtype:
        """Of the forward pass."""
        return self._dtype

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        fit, held = self.parts()
        stream = DenseStream(
            self._dense, fit, holdout=held, device=self.device, dtype=self._dtype,
            progress=progress,
        )  # fmt: skip
        return stream.blocks(skip)


class SavedPass(Source):
    """Statistics that `collect` kept, of this very model.

    Raises:
        OptionError: they are of another model.
    """

    def __init__(self, statistics: Statistics, dense: Dense, runtime: Runtime) -> None:
        statistics.check({"model": dense.fingerprint})
        self._statistics, self._dense = statistics, dense
        self.device = choose_device(runtime.device)

    @property
    def made_with(self) -> dict[str, Any]:
        return self._statistics.made_with

    @property
    def made_of(self) -> dict[str, str]:
        return self._statistics.made_of

    def begin(self, done: Journal, progress: Progress | None) -> dict[str, Any]:
        return self._statistics.calibration

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        return self._statistics.blocks(self._dense, self.device, skip)


def expect_unchanged(done: Journal, dense: Dense, source: Source) -> None:
    """Has the dense model compared, as it is read, with what a run goes on from.

    Args:
        done: holds pieces that were made of it.
        dense: the model.
        source: of the run; its statistics may have been made of it.

    Raises:
        ModelError: it is another one by now.
    """
    begun = (
        "it was read by a run that this one goes on with: give the model as it was, or pass "
        "restart=True to begin anew"
    )
    collected = "its statistics were collected: collect them again"
    dense.expect(
        [*((known, begun) for known in done.every("made_of")), (source.made_of, collected)]
    )


def adopted(
    statistics: Statistics, asked: Calibration, model: Description, given: Collection[str] | None
) -> Calibration:
    """The calibration that statistics were made with, instead of the one that was asked for.

    Args:
        statistics: made of this model.
        asked: what gives way.
        model: the dense one.
        given: the settings that somebody asked for, which must then agree; None for those that
            differ from their defaults.

    Raises:
        OptionError: the statistics were made with others.
    """
    settings, default = asked.record(), Calibration().record()
    if given is None:
        given = [name for name, value in settings.items() if not _equal(value, default[name])]
    wanted = {n: value for n, value in settings.items() if n in given and value is not None}
    if "calibration" in wanted:
        wanted["calibration"] = source_digest(asked.source)
    if "seq_len" in wanted:
        wanted["seq_len"] = window_length(asked, model)
    statistics.check(wanted)
    own = Calibration.of(statistics.settings)
    return replace(own, judging=statistics.made_with["judging"])


def _equal(one: Any, other: Any) -> bool:
    """Token ids are no default."""
    return not isinstance(one, Tensor | np.ndarray) and bool(one == other)
