"""The dense pass on a cluster: every worker carries its share of the windows through the blocks.

The workers stand in a row. A block's sums go from one to the next, and each adds its own batches to
them: the additions are those of one process, in their order, so that the result is the same to the
bit for any number of workers. While the second worker adds to the sums of a block, the first is at
the next block.
"""

import socket
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from coec.devices import at_hand, choose_solve_dtype
from coec.distributed.cluster import (
    LOOK_S,
    RETRIES,
    Cluster,
    LostError,
    Shortage,
    begin,
    joined,
    lost,
)
from coec.errors import OptionError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.layout import BlockLayout
from coec.models.prefetcher import Prefetcher
from coec.settings import Calibration, Runtime
from coec.streaming.dense_stream import DenseStream, Measured, Sums, batch_size, in_parts
from coec.streaming.layers import State
from coec.streaming.measure import DensePass, SavedPass, Source
from coec.streaming.statistics import Statistics

Given = tuple[Int[Tensor, "_ length"], Int[Tensor, "_ length"] | None]
"""Windows to fit on, and others whose statistics are kept apart."""


class Share:
    """One worker: some of the windows and their hidden states, before any block that is asked for.

    States are kept from the oldest block on that may be asked for again. Where they are not there,
    in a worker that was lost and begins anew, the windows are run through the blocks before.

    Args:
        dense: the model.
        given: of `shares`.
        device: where to compute.
        dtype: of the forward pass.
        threads: of the process.
    """

    def __init__(
        self,
        dense: Dense,
        given: Given,
        *,
        device: torch.device,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        begin(threads)
        self._dense, self._device = dense, device
        fit, held = given
        self._stream = DenseStream(dense, fit, holdout=held, device=device, dtype=dtype)
        self._ahead = Prefetcher(dense, last=len(dense.layout.blocks) - 1)
        self._stream.begin()
        self._before: dict[int, list[State]] = {0: list(self._stream.states)}

    def add(self, index: int, sums: Sums, oldest: int) -> Sums:
        """The sums of a block with this share's batches added.

        Args:
            index: of the block.
            sums: of the workers before.
            oldest: the first block that may be asked for later.
        """
        self._go_to(index)
        sums = sums.to(self._device)
        self._advance(index, sums)
        for before in [n for n in self._before if n < oldest]:
            del self._before[before]
        return sums.to(torch.device("cpu"))

    def _go_to(self, index: int) -> None:
        """Sets the stream's states to those before a block."""
        known = [n for n in self._before if n <= index]
        if not known:
            self._stream.begin()
            self._before[0] = list(self._stream.states)
            known = [0]
        self._stream.states = list(self._before[max(known)])
        for between in range(max(known), index):
            self._advance(between, None)

    def _advance(self, index: int, sums: Sums | None) -> None:
        block = self._dense.layout.blocks[index]
        self._stream.advance(block, self._ahead.tensors(block), sums)
        self._before[index + 1] = list(self._stream.states)


class _Worker:
    """A share in a process of a cluster (an actor), which is made again where that is new."""

    def __init__(self) -> None:
        self._share: Share | None = None

    def add(
        self, dense: Dense, given: Given, how: dict[str, Any], index: int, sums: Sums, oldest: int
    ) -> Sums:
        """As `Share.add`, of the share that these make."""
        if self._share is None:
            self._share = Share(dense, given, **how)
        return self._share.add(index, sums, oldest)

    def host(self) -> str:
        """The name of the machine."""
        return socket.gethostname()


@dataclass(frozen=True, eq=False)
class PendingBlock:
    """A block whose statistics are on their way through the workers.

    Attributes:
        block: which one.
        sums: a reference to its `Sums`, complete.
        stages: one to those after every worker, the same at the end.
    """

    block: BlockLayout
    sums: Any
    stages: Sequence[Any]


class DistributedPass(DensePass):
    """The dense model run over a calibration text by the workers of a cluster.

    Args:
        dense: the model, in a folder that all nodes see.
        calibration: which text, and how much of it.
        runtime: how many workers, and on what.
        cluster: where they are.
        progress: called while a long text is tokenised.

    Raises:
        CoecError: the text cannot be used, or the cluster has no room.
    """

    def __init__(
        self,
        dense: Dense,
        calibration: Calibration,
        runtime: Runtime,
        cluster: Cluster,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(dense, calibration, runtime, progress, cluster.device(runtime.device))
        self.cluster = cluster
        self.workers = cluster.workers(runtime.workers, self.device)
        cluster.check_store(statistics_bytes(dense, calibration))
        cluster.check_nodes(
            _Look(dense), dense.fingerprint, f"the model that is in '{dense.folder}' here"
        )
        self._row: list[tuple[Any, tuple[Any, ...]]] = []
        self._shortage = Shortage(cluster, self.device)
        self._account: list[dict[str, Any]] = []

    @property
    def in_flight(self) -> int:
        """How many blocks are on their way at once: as many as the object stores hold."""
        size = statistics_bytes(self._dense, self._calibration)
        room = min(node.store for node in self.cluster.nodes) // size - 1
        return max(1, min(self.workers + 2, room))

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        wanted = [b.index for b in self._dense.layout.blocks if b.index not in skip]
        for number, index in enumerate(wanted):
            for attempt in range(RETRIES + 1):
                arriving = self.arriving(index, oldest=index)
                try:
                    while not self.cluster.ray.wait([arriving.sums], timeout=LOOK_S)[0]:
                        if self.refitted():
                            raise LostError("workers were begun anew")
                    sums = self.cluster.get(arriving.sums)
                    break
                except LostError as error:
                    if attempt == RETRIES:
                        raise lost(error) from error
            block = arriving.block
            fit, held = sums.to(at_hand(self.device)).grams()
            yield Measured(block, self._dense.tensors(block), fit, held)
            if progress:
                progress("calibrating", number + 1, len(wanted))

    def solve_dtype(self, asked: str) -> torch.dtype:
        """As a worker's device has it: the leading process may have none like it."""
        if asked != "auto" or self.device.type == "cpu":
            return super().solve_dtype(asked)
        choose = self.cluster.ray.remote(**self.cluster.half(self.device))(choose_solve_dtype)
        chosen: torch.dtype = self.cluster.result(choose.remote(asked, self.device))
        return chosen

    def account(self) -> dict[str, Any]:
        """The windows of every worker that ran, and its host."""
        if self._row:
            hosts = self.cluster.hosts([worker for worker, _ in self._row])
            given = shares(*self.parts(), self.workers)
            self.note(hosts, [(len(f), 0 if h is None else len(h)) for f, h in given])
        return {"workers": self._account}

    def note(self, hosts: Sequence[str], windows: Sequence[tuple[int, ...]]) -> None:
        """Of every worker its host, and how many windows it fits on and holds out."""
        self._account = [
            {"host": host, "windows": fit, "held_out": held}
            for host, (fit, held) in zip(hosts, windows, strict=True)
        ]

    def arriving(self, index: int, *, oldest: int) -> PendingBlock:
        """Sends a block's sums on their way.

        Args:
            index: of the block.
            oldest: the first block that may be asked for later.
        """
        sums: Any = Sums()
        stages = []
        for worker, own in self._begun():
            sums = worker.add.remote(*own, index, sums, oldest)
            stages.append(sums)
        return PendingBlock(self._dense.layout.blocks[index], sums, stages)

    def _begun(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The workers and what each is given; begun when needed, when there are windows."""
        if not self._row:
            ray = self.cluster.ray
            worker = ray.remote(
                max_restarts=-1, max_task_retries=RETRIES, scheduling_strategy="SPREAD",
                **self.cluster.half(self.device),
            )(_Worker)  # fmt: skip
            how = {"device": self.device, "dtype": self.dtype, "threads": self.cluster.threads}
            dense = ray.put(self._dense)
            parts = shares(*self.parts(), self.workers)
            self._row = [(worker.remote(), (dense, ray.put(given), how)) for given in parts]
        return self._row

    def refitted(self) -> bool:
        """Whether fewer workers have to be begun, since a node was lost; those before are ended.

        Raises:
            CoecError: there was no room for a single one for too long.
        """
        fewer = self._shortage.fewer(len(self._row)) if self._row else None
        if fewer is None:
            return False
        self.end()
        self.workers = fewer
        return True

    def end(self) -> None:
        """Ends the workers."""
        for worker, _ in self._row:
            self.cluster.ray.kill(worker)
        self._row = []


@contextmanager
def sourced(
    dense: Dense,
    calibration: Calibration,
    runtime: Runtime,
    statistics: Statistics | None = None,
    progress: Progress | None = None,
) -> Iterator[Source]:
    """Statistics that are there already, or a dense pass whose text is checked now.

    Where the pass is a cluster's, that is joined as long as the `with` block lasts.

    Raises:
        CoecError: the statistics are of another model, the text cannot be used, or the cluster.
    """
    if statistics is not None:
        if runtime.executor == "ray":
            raise OptionError(
                "executor = ray has no effect with statistics, which are read by one process: "
                "leave it out, or calibrate on the text"
            )
        yield SavedPass(statistics, dense, runtime)
    elif runtime.executor == "ray":
        with joined(runtime.address) as cluster:
            source = DistributedPass(dense, calibration, runtime, cluster, progress)
            try:
                yield source
            finally:
                source.end()
    else:
        yield DensePass(dense, calibration, runtime, progress)


@dataclass(frozen=True)
class _Look:
    """What a node sees of a model's folder."""

    dense: Dense

    def __call__(self) -> str:
        return Dense.open(self.dense.folder).fingerprint


def shares(
    windows: Int[Tensor, "n length"], held_out: Int[Tensor, "h length"] | None, count: int
) -> list[Given]:
    """The windows of every worker: whole batches, those fitted on and those held out in a row.

    With more workers than batches there are as many shares as batches.
    """
    size = batch_size(windows.shape[1])
    fit, held = windows.split(size), () if held_out is None else held_out.split(size)
    count = min(count, len(fit))
    return [
        (torch.cat(list(own)), torch.cat(list(others)) if others else None)
        for own, others in zip(in_parts(fit, count), in_parts(held, count), strict=True)
    ]


def statistics_bytes(dense: Dense, calibration: Calibration) -> int:
    """Of the block whose statistics are largest."""
    kinds = 2 if calibration.held_out else 1
    blocks = dense.layout.blocks
    return 8 * kinds * max(sum(s.columns**2 + 2 * s.columns for s in b.sites) for b in blocks)
