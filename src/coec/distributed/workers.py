"""Worker processes of a Ray cluster, each with some of the calibration windows.

A worker is an actor. What it holds is made anew where its process is new, so that losing one costs
the work it had in hand. Where a lost node leaves no room for as many, the pool goes on with fewer.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from coec.distributed.cluster import (
    HALF,
    LOOK_S,
    PATIENCE_S,
    SHORT_S,
    Cluster,
    LostError,
    begin_process,
)
from coec.errors import CoecError
from coec.events import record
from coec.models.dense import Dense, Prefetcher
from coec.planning.run import Run
from coec.streaming.dense_stream import DenseStream, Sums
from coec.streaming.layers import State
from coec.streaming.two_streams import ConsumerStatistics, Shard, TwoStreams
from coec.streaming.worker_group import streams_of
from coec.types import GramSum

WorkerWindows = tuple[Int[Tensor, "_ length"], Int[Tensor, "_ length"] | None]
"""Windows of one worker to fit on, and others whose statistics are kept apart."""


class WindowWorker:
    """Hidden states of some windows, in a process of a cluster (an actor)."""

    def __init__(self) -> None:
        self._stream: SummingStream | None = None
        self._streams: TwoStreams | None = None
        self._attempt = 0

    def add(
        self,
        dense: Dense,
        windows: WorkerWindows,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
        block: tuple[int, int],
        sums: Sums,
    ) -> Sums:
        """Return the sums of a block with this worker's batches added, on the CPU.

        Args:
            dense, windows, dtype, device: as in `SummingStream`.
            threads: of this process.
            block: its index, and the oldest index that may be asked for later.
            sums: those of the workers before.
        """
        if self._stream is None:
            begin_process(threads)
            self._stream = SummingStream(dense, windows, dtype, device)
        return self._stream.add(*block, sums)

    def rewind(
        self,
        dense: Dense,
        run: Run,
        shard: Shard,
        device: torch.device,
        threads: int,
        limit: int,
        attempt: int,
    ) -> int:
        """Return the index of the block before which both models stand, at most `limit`.

        From now on calls of this attempt are answered, and of no other.
        """
        self._attempt = attempt
        if self._streams is None:
            begin_process(threads)
            self._streams = streams_of(run, dense, shard, device)
        return self._streams.rewind(limit)

    def call(
        self,
        attempt: int,
        method: Callable[..., Any],
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
    ) -> list[Any] | None:
        """Return what a method of `TwoStreams` yields, on the CPU.

        Raises:
            LostError: in a new process, and for a block that has been given up: its calls may come
                behind the `rewind`, since Ray keeps the order of one caller's alone.
        """
        if self._streams is None or attempt != self._attempt:
            raise LostError("a block or a process was begun anew")
        args, kwargs = arguments
        values = method(self._streams, *args, **kwargs)
        # A comprehension would keep each value while the next is made.
        return None if values is None else list(map(to_cpu, values))

    def host(self) -> str:
        """Return the name of the machine."""
        return socket.gethostname()


class SummingStream:
    """The dense model over some windows, before any block that is asked for.

    States are kept from the oldest block on that may be asked for again. Where they are not there,
    in a worker that was lost, the windows are run through the blocks before.
    """

    def __init__(
        self, dense: Dense, windows: WorkerWindows, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dense, self._device = dense, device
        fit, validation = windows
        self._stream = DenseStream(dense, fit, holdout=validation, device=device, dtype=dtype)
        self._prefetcher = Prefetcher(dense, last=len(dense.layout.blocks) - 1)
        self._before: dict[int, dict[int, State]] = {}

    def add(self, index: int, oldest: int, sums: Sums) -> Sums:
        """Return the sums of a block with these windows' batches added, on the CPU."""
        self._go_to(index)
        sums = sums.to(self._device)
        self._advance(index, sums)
        for before in [n for n in self._before if n < oldest]:
            del self._before[before]
        return sums.to(torch.device("cpu"))

    def _go_to(self, index: int) -> None:
        """Set the stream's states to those before a block."""
        # The nearest states before the block; where there are none, those behind the embedding.
        indices = [n for n in self._before if n <= index]
        if not indices:
            self._stream.begin()
            self._before[0] = dict(self._stream.states)
            indices = [0]
        self._stream.states = dict(self._before[max(indices)])
        for between in range(max(indices), index):
            self._advance(between, None)

    def _advance(self, index: int, sums: Sums | None) -> None:
        block = self._dense.layout.blocks[index]
        self._stream.advance(block, self._prefetcher.tensors(block), sums)
        self._before[index + 1] = dict(self._stream.states)


class WorkerPool:
    """The workers of one pass, as many as there is room for beside a block being solved.

    Workers of a lost node begin anew on others and may take the last room there: a block would wait
    for ever. The pool is the one place that sees this, and begins fewer. Ray itself does a lost
    call again `retries` times.
    """

    def __init__(self, cluster: Cluster, device: torch.device, retries: int = 0) -> None:
        self.cluster, self.device = cluster, device
        self._retries = retries
        self._looked, self._since = 0.0, math.inf
        self.workers: list[Any] = []

    def begin(self, count: int) -> None:
        """Begin so many workers."""
        worker = self.cluster.ray.remote(
            max_restarts=-1, max_task_retries=self._retries, scheduling_strategy="SPREAD",
            **self.cluster.resources(self.device, HALF),
        )(WindowWorker)  # fmt: skip
        self.workers = [worker.remote() for _ in range(count)]

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            self.cluster.ray.kill(worker)
        self.workers = []

    def hosts(self) -> list[str]:
        """Return the machine of every worker; "lost" where one is being begun anew."""
        hosts = []
        for answer in [worker.host.remote() for worker in self.workers]:
            try:
                hosts.append(self.cluster.get(answer))
            except LostError:
                hosts.append("lost")
        return hosts

    def end_if_crowded(self) -> int | None:
        """End all workers where a lost node leaves no room for as many; return how many there is.

        None where there is room, or may be again soon. Raises CoecError where there was no room for
        a single one for too long.
        """
        clock, count = time.monotonic(), len(self.workers)
        if not count or clock - self._looked < LOOK_S:
            return None
        self._looked = clock
        # One slot is left for a block that is solved.
        room = self.cluster.slots(self.cluster.alive(), self.device) - 1
        if room >= count:
            self._since = math.inf
            return None
        # Since when there is too little room: a node that restarts soon is worth waiting for.
        self._since = min(self._since, clock)
        short = clock - self._since
        if room < 1:
            self._wait(short)
        elif short >= SHORT_S:
            self._since = math.inf
            record(
                f"the cluster lost a node: {count} workers leave no room for a block being "
                f"solved, so {room} go on with their windows"
            )
            self.end()
            return room
        return None

    def _wait(self, short: float) -> None:
        """Say what is waited for; raises CoecError where that took too long."""
        each = "half a GPU" if self.device.type == "cuda" else f"{self.cluster.threads / 2:g} CPUs"
        record(
            f"the cluster lost a node: waiting for one with room for a worker and a block being "
            f"solved, each of {each}, for {PATIENCE_S} s"
        )
        if short >= PATIENCE_S:
            raise CoecError(
                f"the cluster has had no room for a worker and a block being solved for "
                f"{PATIENCE_S} s: add a node; what is finished is kept, and the same command "
                "goes on with the rest"
            )


def to_cpu(value: Any) -> Any:
    """Return what travels between processes: tensors on the CPU, however deep they lie."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, GramSum):
        return value.to("cpu")
    if isinstance(value, ConsumerStatistics):
        return replace(value, **{f.name: to_cpu(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, dict):
        return {name: to_cpu(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(to_cpu, value))
    return value
