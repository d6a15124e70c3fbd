"""The hidden states of the dense and the pruned model, held by the workers of a Ray cluster."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from coec.distributed.cluster import HALF, LOOK_S, PATIENCE_S, Cluster, LostError
from coec.distributed.workers import WorkerPool, to_cpu
from coec.models.dense import Dense
from coec.planning.run import Run
from coec.streaming.two_streams import Shard, TwoStreams, shards
from coec.streaming.worker_group import Finished, Value, WorkerGroup, tensors_of


class RayGroup(WorkerGroup):
    """A group of workers on a cluster; one that is lost begins anew, on another node if need be.

    Args:
        cluster: where they are.
        windows: those to fit on, and those for validation.
        workers: how many there are, as long as there is room for them.
        dense: the model.
        run: the sizes of the pruned model, and how it is made.
    """

    def __init__(
        self,
        cluster: Cluster,
        windows: tuple[Tensor, Tensor | None],
        workers: int,
        dense: Dense,
        run: Run,
    ) -> None:
        self._cluster = cluster
        self._pool = WorkerPool(cluster, run.device)
        # References: this object travels with every block that is solved.
        self._windows, self._dense = cluster.ray.put(windows), cluster.ray.put(dense)
        self._run, self._device = cluster.ray.put(run), run.device
        self._tokens = run.tokens_per_batch
        self._attempt = 0
        self._begin(workers)

    def _begin(self, workers: int) -> None:
        shards = self._shards(workers)
        self._arguments = [
            (self._dense, self._run, self._cluster.ray.put(s), self._device, self._cluster.threads)
            for s in shards
        ]
        self._pool.begin(len(shards))

    def _shards(self, workers: int) -> Sequence[Shard]:
        fit, validation = self._cluster.ray.get(self._windows)
        return shards(fit, validation, workers, tokens=self._tokens)

    def _check_room(self) -> None:
        """Begin fewer workers where a lost node leaves no room; raises LostError then."""
        if fewer := self._pool.end_if_crowded():
            self._begin(fewer)
            raise LostError("workers were begun anew")

    def answers(
        self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterable[Any]:
        # Put once, read by all workers: it does not travel once for each.
        arguments = self._cluster.ray.put((to_cpu(tuple(args)), to_cpu(dict(kwargs))))
        references = [self._call(worker, method, arguments) for worker in self._pool.workers]
        return map(self._cluster.get, references)

    def _call(self, worker: Any, method: Callable[..., Any], arguments: Any) -> Any:
        return worker.call.remote(self._attempt, method, arguments)

    def solve(self, work: Callable[[], Value]) -> tuple[Value, str | None]:
        # Not done again by Ray: the workers have to stand before the block first.
        reference = self._cluster.submit(self._device, HALF, work, max_retries=0)
        while not self._cluster.ray.wait([reference], timeout=LOOK_S)[0]:
            try:
                self._check_room()
            except LostError:
                self._cluster.cancel([reference])
                raise
        result: tuple[Value, str | None] = self._cluster.get(reference)
        return result

    def bring_to(self, index: int, finished: Finished) -> None:
        self._attempt += 1
        numbers = range(len(self._pool.workers))
        # Where every worker stands → blocks that the hindmost have not passed yet
        answers = [self._rewind(n, index) for n in numbers]
        before = [self._awaited(n, index, answers[n]) for n in numbers]
        for passed in range(min(before), index):
            behind = [self._pool.workers[n] for n in numbers if before[n] <= passed]
            tensors = dict(tensors_of(finished, passed))
            arguments = self._cluster.ray.put(((passed, tensors), {}))
            for reference in [self._call(w, TwoStreams.advance, arguments) for w in behind]:
                self._cluster.get(reference)

    def _rewind(self, number: int, limit: int) -> Any:
        told = *self._arguments[number], limit, self._attempt
        return self._pool.workers[number].rewind.remote(*told)

    def _awaited(self, number: int, limit: int, answer: Any) -> int:
        """Return the block before which a worker stands, which may be about to begin anew."""
        ray, until = self._cluster.ray, time.monotonic() + PATIENCE_S
        while True:
            with self._cluster.translated():
                try:
                    while not ray.wait([answer], timeout=LOOK_S)[0]:
                        self._check_room()
                    index: int = ray.get(answer)
                    return index
                except ray.exceptions.ActorUnavailableError:
                    # The process is gone and Ray starts another: asked again until it answers.
                    if time.monotonic() > until:
                        raise
            self._check_room()
            time.sleep(1)
            answer = self._rewind(number, limit)

    def account(self) -> tuple[list[str], list[tuple[int, ...]]]:
        """Return the machine of every worker, and how many windows it fits on and holds out."""
        counts = [
            tuple(
                sum(len(batch.ids) for batches in by_part for batch in batches)
                for by_part in s.values()
            )
            for s in self._shards(len(self._pool.workers))
        ]
        return self._pool.hosts(), counts

    def end(self) -> None:
        """End all workers."""
        self._pool.end()
