"""The dense pass on a cluster: every worker carries its share of the windows through the blocks.

The workers stand in a row. A block's sums go from one to the next, and each adds its own batches to
them: the additions are those of one process, in their order, so that the result is the same to the
bit for any number of workers. While the second worker adds to the sums of a block, the first is at
the next block. Blocks whose sums are complete are solved as tasks meanwhile.
"""

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from coec.devices import at_hand
from coec.distributed.cluster import AGAIN, HALF, LOOK_S, RETRIES, Cluster, LostError, lost
from coec.distributed.ray_group import RayGroup
from coec.distributed.workers import WorkerPool, WorkerWindows
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.planning.run import Run
from coec.settings import Calibration, Runtime
from coec.streaming.dense_stream import Measured, Sums, batch_size, in_parts
from coec.streaming.layers import tokens_per_batch
from coec.streaming.passes import DensePass
from coec.streaming.worker_group import WorkerGroup

_Value = TypeVar("_Value")


class DistributedPass(DensePass):
    """The dense model, in a folder that all nodes see, run over a text by a cluster's workers.

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
        super().__init__(dense, calibration, runtime, cluster.device(runtime.device), progress)
        self.cluster = cluster
        self._count = cluster.workers(runtime.workers, self.device)
        cluster.check_store(statistics_bytes(dense, calibration))
        cluster.check_nodes(
            functools.partial(_fingerprint, dense.folder),
            dense.fingerprint,
            f"the model that is in '{dense.folder}' here",
        )
        self._pool = WorkerPool(cluster, self.device, RETRIES)
        self._arguments: list[tuple[Any, ...]] = []
        self._account: list[JsonDict] = []

    @property
    def _most_pending(self) -> int:
        """Number of blocks on their way at once: as many as the object stores hold."""
        size = statistics_bytes(self._dense, self._calibration)
        # A block for each worker and two more, as far as the object store of every node has room.
        room = min(node.store for node in self.cluster.nodes) // size - 1
        return max(1, min(self._count + 2, room))

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Measured]:
        blocks = [b for b in self._dense.layout.blocks if b.index not in skip]
        for number, block in enumerate(blocks):
            sums: Sums = self._sums(block.index)
            fit, validation = sums.to(at_hand(self.device)).grams()
            yield Measured(block, self._dense.tensors(block), fit, validation)
            if progress:
                progress("calibrating", number + 1, len(blocks))

    def _sums(self, index: int) -> Sums:
        """Return the complete sums of a block, whose workers are asked again where some is lost."""
        losses = 0
        while True:
            complete = self.stages(index, oldest=index)[-1]
            try:
                # Waiting in short turns, between which the nodes are looked at.
                while not self.cluster.ray.wait([complete], timeout=LOOK_S)[0]:
                    if self.end_if_crowded():
                        raise LostError("workers were begun anew")
                sums: Sums = self.cluster.get(complete)
                return sums
            except LostError as error:
                losses += 1
                if losses > RETRIES:
                    raise lost(error) from error

    def map(
        self,
        function: Callable[[Measured], _Value],
        skip: Container[int],
        progress: Progress | None,
    ) -> Iterator[tuple[_Value, str | None]]:
        """Yield `(function(block), host)` for each block not in `skip`, each a task of the cluster.

        Lost work is done again: of a pending block all of it, of a worker's windows what is needed
        to go on. Raises CoecError where work was lost too often.
        """
        scheduler = BlockScheduler(self, function, self._dense, self._most_pending)
        return scheduler.results(skip, progress)

    def account(self) -> JsonDict:
        """Return the windows of every worker that ran, and its host."""
        if self._pool.workers:
            windows = self._shares()
            counts = [(len(f), 0 if h is None else len(h)) for f, h in windows]
            self._note(self._pool.hosts(), counts)
        return {"workers": self._account}

    def _shares(self) -> list[WorkerWindows]:
        tokens = tokens_per_batch(self.device, self._dense.shape.hidden)
        return shares(*self.windows_of_text(), self._count, tokens)

    def _note(self, hosts: Sequence[str], windows: Sequence[tuple[int, ...]]) -> None:
        self._account = [
            {"host": host, "windows": fit, "held_out": validation}
            for host, (fit, validation) in zip(hosts, windows, strict=True)
        ]

    def stages(self, index: int, *, oldest: int) -> list[Any]:
        """Send a block's sums on their way; return references to the sums behind every worker.

        The last ones are complete. Workers are begun where there are none. `oldest` is the first
        block that may be asked for later.
        """
        if not self._pool.workers:
            ray = self.cluster.ray
            dense, windows = ray.put(self._dense), self._shares()
            constants = (self.dtype, self.device, self.cluster.threads)
            self._arguments = [(dense, ray.put(share), *constants) for share in windows]
            self._pool.begin(len(windows))
        # Empty sums → first worker → … → last worker; what travels between them are references.
        stages: list[Any] = [Sums()]
        for worker, arguments in zip(self._pool.workers, self._arguments, strict=True):
            stages.append(worker.add.remote(*arguments, (index, oldest), stages[-1]))
        return stages[1:]

    def end_if_crowded(self) -> bool:
        """End the workers where a lost node left too little room; fewer are begun then."""
        fewer = self._pool.end_if_crowded()
        self._count = fewer or self._count
        return fewer is not None

    @contextmanager
    def worker_group(self, run: Run) -> Iterator[WorkerGroup]:
        self.end()  # the workers of a pass that came before
        group = RayGroup(self.cluster, self.windows_of(run), self._count, self._dense, run)
        try:
            yield group
            self._note(*group.account())
        finally:
            group.end()

    def end(self) -> None:
        """End the workers."""
        self._pool.end()


class BlockScheduler:
    """Scheduler of at most `limit` blocks at once: through the workers, then to a task for each."""

    def __init__(
        self, source: DistributedPass, function: Callable[[Measured], Any], dense: Dense, limit: int
    ) -> None:
        self._source, self._function, self._dense, self._limit = source, function, dense, limit
        self._cluster = source.cluster
        # By the task that solves a block: the block's index, and the sums behind every worker
        self._pending: dict[Any, tuple[int, list[Any]]] = {}

    def results(self, skip: Container[int], progress: Progress | None) -> Iterator[tuple[Any, str]]:
        """Yield result and host of every block that is not in `skip`, as they finish."""
        waiting = [b.index for b in self._dense.layout.blocks if b.index not in skip]
        total, losses, finished = len(waiting), 0, 0
        progress = progress or (lambda phase, finished, total: None)
        while waiting or self._pending:
            # Hand out blocks up to the limit → wait for any → begin anew after a loss → yield
            while waiting and len(self._pending) < self._limit:
                oldest = min([*waiting, *self._indices()])
                self._hand_out(waiting.pop(0), oldest)
            ready, _ = self._cluster.ray.wait(list(self._pending), timeout=1)
            self._show(progress, finished, total)
            if not ready and self._source.end_if_crowded():
                # The workers are new: all sums on their way are lost, and begin again.
                self._cluster.cancel(list(self._pending))
                waiting = sorted([*waiting, *self._indices()])
                self._pending.clear()
            for task in ready:
                index, _ = self._pending.pop(task)
                try:
                    (result, hashes), host = self._cluster.get(task)
                except LostError as error:
                    losses += 1
                    if losses > RETRIES * len(self._dense.layout.blocks):
                        raise lost(error, losses) from error
                    # First again: workers keep states from the oldest block to come.
                    waiting.insert(0, index)
                    continue
                finished += 1
                # The task read the weights: note their digests, as if read here.
                self._dense.hashes.update(hashes)
                yield result, host
                progress("solving", finished, total)

    def _indices(self) -> list[int]:
        return [index for index, _ in self._pending.values()]

    def _hand_out(self, index: int, oldest: int) -> None:
        """Send a block through the workers, and then to a task that solves it."""
        stages, device = self._source.stages(index, oldest=oldest), self._source.device
        task = self._cluster.submit(
            device, HALF, _compute, self._function, stages[-1], self._dense, index, device, **AGAIN
        )
        self._pending[task] = index, stages

    def _show(self, progress: Progress, finished: int, total: int) -> None:
        """Report how many times a worker has passed a block: one bar for all workers."""
        stages = [stage for _, of_block in self._pending.values() for stage in of_block]
        if stages:
            passed, _ = self._cluster.ray.wait(
                stages, num_returns=len(stages), timeout=0, fetch_local=False
            )
            each = len(stages) // len(self._pending)
            progress("calibrating", finished * each + len(passed), total * each)


def _compute(
    function: Callable[[Measured], Any], sums: Sums, dense: Dense, index: int, device: torch.device
) -> tuple[Any, dict[str, str]]:
    """Return what a function makes of a block, and the hashes of its weights."""
    block = dense.layout.blocks[index]
    tensors = dense.tensors(block)
    fit, validation = sums.to(device).grams()
    result = function(Measured(block, tensors, fit, validation))
    return result, {name: dense.hashes[name] for name in tensors}


def _fingerprint(folder: Path) -> str:
    """Return the fingerprint of the model in a folder as a node sees it."""
    return Dense.open(folder).fingerprint


def shares(
    windows: Tensor, validation: Tensor | None, count: int, tokens: int
) -> list[WorkerWindows]:
    """Return the windows of every worker: whole batches in a row, at most as many as batches.

    `tokens` are run at once, at most.
    """
    size = batch_size(windows.shape[1], tokens)
    fit_batches = windows.split(size)
    validation_batches = () if validation is None else validation.split(size)
    # Whole batches: sums then are those of one process, batch by batch.
    count = min(count, len(fit_batches))
    return [
        (torch.cat(list(fit)), torch.cat(list(apart)) if apart else None)
        for fit, apart in zip(
            in_parts(fit_batches, count), in_parts(validation_batches, count), strict=True
        )
    ]


def statistics_bytes(dense: Dense, calibration: Calibration) -> int:
    """Return the bytes of the block whose statistics are largest."""
    sums_per_site = 2 if calibration.validation else 1
    largest = max(
        sum(site.columns**2 + 2 * site.columns for site in block.sites)
        for block in dense.layout.blocks
    )
    return 8 * sums_per_site * largest
