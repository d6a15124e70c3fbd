"""Sources of measured blocks: a dense pass over text, or statistics on the disk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from coec.calibration.windows import (
    Windows,
    source_digest,
    split_windows,
    window_length,
    with_validation,
)
from coec.devices import DTYPES, choose_device, choose_forward_dtype, choose_solve_dtype, hand_back
from coec.errors import OptionError
from coec.events import Progress
from coec.execution.journal import Journal
from coec.models.dense import Dense
from coec.models.files import JsonDict, read_tensors, write_tensors
from coec.models.folder import tokenizer_digest
from coec.planning.run import Run
from coec.settings import Calibration, Runtime
from coec.streaming.dense_stream import DenseStream, Measured
from coec.streaming.statistics import Statistics
from coec.streaming.two_streams import shards
from coec.streaming.windows import window_maker
from coec.streaming.worker_group import LocalGroup, WorkerGroup, streams_of

_TEXT = "windows"
"""The piece of a run that holds its calibration windows."""
_NO_TEXT = "statistics hold sums only, and no windows: leave them out"
_Value = TypeVar("_Value")


def depends_on(dense: Dense, calibration: Calibration, device: torch.device) -> JsonDict:
    """Return all that the statistics of a dense pass depend on, JSON-ready, by setting.

    The model stands there by its fingerprint and the text by a digest of its content.
    """
    dtype = choose_forward_dtype(
        calibration.forward_dtype, dense.dtype, device, summed=calibration.summed
    )
    return calibration.record() | {
        "judging": with_validation(calibration, dense).guard_share,
        "model": dense.fingerprint,
        "tokenizer": tokenizer_digest(dense.folder),
        "calibration": source_digest(calibration.source),
        "seq_len": window_length(calibration, dense),
        "forward_dtype": str(dtype).removeprefix("torch."),
    }


class BlockSource(ABC):
    """A source of measured blocks: a dense pass over text, or statistics on the disk."""

    def __init__(self, dense: Dense, device: torch.device) -> None:
        self._dense, self.device = dense, device

    @property
    @abstractmethod
    def made_with(self) -> JsonDict:
        """Settings and digests that the statistics depend on, JSON-ready."""

    @property
    def made_of(self) -> dict[str, str]:
        """Digests of the weights that the statistics were made of, where they are known."""
        return {}

    @property
    def forward_dtype(self) -> str:
        """Name of the dtype of the forward pass."""
        return str(self.made_with["forward_dtype"])

    @abstractmethod
    def begin(self, journal: Journal, progress: Progress | None) -> JsonDict:
        """Make the windows, or take those that the journal has; return their record."""

    def account(self) -> JsonDict:
        """Return who computed the statistics, where that was not one process; JSON-ready."""
        return {}

    @abstractmethod
    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        """Yield the blocks in order, without those in `skip`."""

    def map(
        self,
        function: Callable[[Measured], _Value],
        skip: Container[int],
        progress: Progress | None,
    ) -> Iterator[tuple[_Value, str | None]]:
        """Yield `(function(block), host)` for each block not in `skip`.

        The function is pure and can be pickled; the host is None for this process. `progress` is
        called with ("solving", finished, blocks).
        """
        for measured in self.blocks(skip, progress):
            index = measured.index
            yield function(measured), None
            if progress:
                progress("solving", index + 1, len(self._dense.layout.blocks))

    def windows_of(self, run: Run) -> tuple[Tensor, Tensor | None]:
        """Return the windows that a run is fitted on, by its recipe, and those for validation."""
        fit, validation = self.windows_of_text()
        apart = 0 if validation is None else len(validation)
        return fit[: run.recipe.calibration.samples - apart], validation

    def windows_of_text(self) -> tuple[Tensor, Tensor | None]:
        """Return the windows to fit on, and those for validation, where there are some."""
        raise OptionError(_NO_TEXT)

    def worker_group(self, run: Run) -> AbstractContextManager[WorkerGroup]:
        """Give the workers that hold both models' hidden states, while the `with` block lasts."""
        raise OptionError(_NO_TEXT)


class DensePass(BlockSource):
    """The dense model run over a calibration text, which is checked before anything is computed.

    Raises:
        CoecError: the text cannot be read, or is too short.
    """

    def __init__(
        self,
        dense: Dense,
        calibration: Calibration,
        runtime: Runtime,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(dense, device)
        self._calibration = calibration
        self._make = window_maker(dense, calibration, runtime, progress)
        self.windows: Windows | None = None

    @cached_property
    def made_with(self) -> JsonDict:
        return depends_on(self._dense, self._calibration, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the forward pass."""
        return DTYPES[self.forward_dtype]

    def begin(self, journal: Journal, progress: Progress | None) -> JsonDict:
        """Make the windows; those that the model writes or chooses are kept."""
        if _TEXT in journal:
            ids = read_tensors(journal.path(_TEXT))["input_ids"]
            self.windows = Windows.of_record(ids, journal.facts(_TEXT))
        else:
            self.windows = windows = self.draw(progress)
            # Sampled text and a measured choice cost time, and are kept for a resume; windows that
            # are cut from a text are cut again.
            if self._calibration.own or windows.bos_cross_entropy:
                journal.put(
                    _TEXT,
                    journal.work / "windows.safetensors",
                    lambda path: write_tensors({"input_ids": windows.ids}, path),
                    **windows.record(),
                    made_of=self._dense.digests_of(self._dense.layout.blocks),
                )
        return self.windows.record()

    def draw(self, progress: Progress | None = None) -> Windows:
        """Make the windows anew."""
        windows = self._make(self.device, self.dtype, progress)
        hand_back()  # what a text took, or the whole model
        return windows

    def windows_of_text(self) -> tuple[Tensor, Tensor | None]:
        assert self.windows is not None  # `begin` made them
        return split_windows(self.windows, self._calibration.validation, self._calibration.seed)

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        fit, validation = self.windows_of_text()
        stream = DenseStream(
            self._dense, fit, holdout=validation, device=self.device, dtype=self.dtype,
            progress=progress,
        )  # fmt: skip
        return stream.blocks(skip)

    @contextmanager
    def worker_group(self, run: Run) -> Iterator[WorkerGroup]:
        [shard] = shards(*self.windows_of(run), tokens=run.tokens_per_batch)
        yield LocalGroup(streams_of(run, self._dense, shard, self.device))


class SavedPass(BlockSource):
    """Statistics that `collect` kept, of this very model.

    Raises:
        OptionError: they are of another model.
    """

    def __init__(self, statistics: Statistics, dense: Dense, device: torch.device) -> None:
        statistics.check({"model": dense.fingerprint})
        super().__init__(dense, device)
        self._statistics = statistics

    @property
    def made_with(self) -> JsonDict:
        return self._statistics.made_with

    @property
    def made_of(self) -> dict[str, str]:
        return self._statistics.made_of

    def begin(self, journal: Journal, progress: Progress | None) -> JsonDict:
        return self._statistics.calibration

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        return self._statistics.blocks(self._dense, self.device, skip)


class Backend:
    """Place of work: this process. `coec.distributed` has a Ray cluster instead."""

    def device(self, name: str) -> torch.device:
        """Return the device to compute on; raises OptionError where it is not there."""
        return choose_device(name)

    def solve_dtype(self, name: str, device: torch.device) -> torch.dtype:
        """Return the dtype of compensations on that device."""
        return choose_solve_dtype(name, device)

    def dense_pass(
        self,
        dense: Dense,
        calibration: Calibration,
        runtime: Runtime,
        progress: Progress | None = None,
    ) -> DensePass:
        """Return a dense pass whose text is checked; raises CoecError where it cannot be used."""
        return DensePass(dense, calibration, runtime, self.device(runtime.device), progress)


def expect_unchanged(journal: Journal, dense: Dense, source: BlockSource) -> None:
    """Compare the dense model, as it is read, with the one that finished pieces were made of.

    Where it was changed since, reading its weights raises ModelError.
    """
    begun = (
        "it was read by a run that this one goes on with: give the model as it was, or pass "
        "restart=True to begin anew"
    )
    collected = "its statistics were collected: collect them again"
    dense.expect(
        [*((digests, begun) for digests in journal.every("made_of")), (source.made_of, collected)]
    )
