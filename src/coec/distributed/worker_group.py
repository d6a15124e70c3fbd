"""Where the hidden states of the dense and the pruned model are: in this process, or in several.

Whatever a team is asked, every place answers for its own windows, all at once, and the answers come
in the order of the windows.
"""

import itertools
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coec.distributed.cluster import LOOK_S, PATIENCE_S, Cluster, LostError, Shortage, begin
from coec.distributed.shares import DistributedPass
from coec.models.dense import Dense
from coec.pipeline.solve import SolvedBlock
from coec.planning import Plan
from coec.streaming.dense_stream import batch_size
from coec.streaming.measure import DensePass, Source
from coec.streaming.two_streams import Given, Seen, TwoStreams, given_of
from coec.types import GramSum

Finished = Callable[[int], Mapping[str, Tensor] | None]
"""The written tensors of a solved block, by its index; None where they were not kept."""


class NothingKeptError(Exception):
    """A place was lost, and what was solved before is not there to go on from."""


class WorkerGroup(ABC):
    """All places together."""

    @abstractmethod
    def all(self, name: str, *arguments: Any) -> Iterable[Any]:
        """What a method of `TwoStreams` returns, of all places in their order; begun at once.

        Raises:
            LostError: a place was lost.
        """

    def do(self, name: str, *arguments: Any) -> None:
        """The same for a method that returns nothing; done when this returns."""
        for _ in self.all(name, *arguments):
            pass

    @abstractmethod
    def solve(self, work: Callable[[], SolvedBlock]) -> SolvedBlock:
        """What some work returns that asks this team, done where there is a device for it.

        Raises:
            LostError: a place was lost, or who did the work.
        """

    @abstractmethod
    def bring_to(self, index: int, finished: Finished) -> None:
        """Has every place stand before a block, or behind the last.

        Raises:
            NothingKeptError: a block between is not kept.
            LostError: a place was lost.
        """


class LocalGroup(WorkerGroup):
    """A team of one, in this process."""

    def __init__(self, pair: TwoStreams) -> None:
        self.pair = pair

    def all(self, name: str, *arguments: Any) -> Iterable[Any]:
        found: Iterable[Any] = getattr(self.pair, name)(*arguments)
        return found

    def solve(self, work: Callable[[], SolvedBlock]) -> SolvedBlock:
        return work()

    def bring_to(self, index: int, finished: Finished) -> None:
        [at] = self.pair.stand(index)
        for passed in range(at, index):
            self.do("go_past", passed, _kept(finished, passed))


class WindowWorker:
    """A pair in a process of a cluster (an actor), which is there when it was asked to stand."""

    def __init__(self) -> None:
        self._pair: TwoStreams | None = None

    def stand(self, dense: Dense, plan: Plan, given: Given, how: dict[str, Any], most: int) -> int:
        """Begins, where this process is new; returns the block before which the pair stands."""
        if self._pair is None:
            how = dict(how)
            begin(how.pop("threads"))
            self._pair = TwoStreams(dense, plan, given, **how)
        [at] = self._pair.stand(most)
        return at

    def run(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """What a method returns, on the CPU.

        Raises:
            LostError: this process is new.
        """
        if self._pair is None:
            raise LostError("a process was begun anew")
        return [_on_cpu(one) for one in getattr(self._pair, name)(*arguments)]

    def host(self) -> str:
        """The name of the machine."""
        return socket.gethostname()


class RayGroup(WorkerGroup):
    """A team of processes of a cluster; one that is lost is begun anew, on another node if need be.

    Args:
        cluster: where.
        shared: the windows of every place, of so many.
        workers: how many there are, as long as there is room for them.
        what: the dense model and the plan, as in `TwoStreams`.
        how: the rest of what a `TwoStreams` takes, by name.
    """

    def __init__(
        self,
        cluster: Cluster,
        shared: Callable[[int], Sequence[Given]],
        workers: int,
        what: tuple[Dense, Plan],
        how: Mapping[str, Any],
    ) -> None:
        self._cluster, self._device = cluster, how["device"]
        self._shared, self._shortage = shared, Shortage(cluster, self._device)
        self._what = tuple(map(cluster.ray.put, what))
        self._how = {**how, "threads": cluster.threads}
        self._begin(workers)

    def _begin(self, workers: int) -> None:
        ray = self._cluster.ray
        place = ray.remote(
            max_restarts=-1, scheduling_strategy="SPREAD", **self._cluster.half(self._device)
        )(WindowWorker)
        given = self._shared(workers)
        self._given = [(*self._what, ray.put(share), self._how) for share in given]
        self._places = [place.remote() for _ in given]

    def _check_room(self) -> None:
        """Raises LostError where a node was lost, and fewer places were begun instead."""
        if fewer := self._shortage.fewer(len(self._places)):
            self.end()
            self._begin(fewer)
            raise LostError("places were begun anew")

    def all(self, name: str, *arguments: Any) -> Iterable[Any]:
        handed = self._cluster.ray.put(_on_cpu(arguments))
        return self._awaited([place.run.remote(name, handed) for place in self._places])

    def solve(self, work: Callable[[], SolvedBlock]) -> SolvedBlock:
        # Not done again by Ray: the places have to stand before the block first.
        task = self._cluster.ray.remote(max_retries=0, **self._cluster.half(self._device))(_solve)
        handed: SolvedBlock = self._awaited_in_room(task.remote(work, self._cluster.threads))
        return handed

    def _awaited_in_room(self, reference: Any) -> Any:
        """What remote work returns; raises LostError where it waits for what a lost node had."""
        ray = self._cluster.ray
        while not ray.wait([reference], timeout=LOOK_S)[0]:
            try:
                self._check_room()
            except LostError:
                ray.cancel(reference)
                raise
        return self._cluster.get(reference)

    def bring_to(self, index: int, finished: Finished) -> None:
        numbers = range(len(self._places))
        asked = [self._stand(n, index) for n in numbers]
        stand = [self._patiently(n, index, asked[n]) for n in numbers]
        for passed in range(min(stand), index):
            behind = [n for n, at in enumerate(stand) if at <= passed]
            handed = self._cluster.ray.put((passed, dict(_kept(finished, passed))))
            for _ in self._awaited([self._places[n].run.remote("go_past", handed) for n in behind]):
                pass

    def _stand(self, number: int, most: int) -> Any:
        return self._places[number].stand.remote(*self._given[number], most)

    def _patiently(self, number: int, most: int, answer: Any) -> int:
        """Where a place stands, which may be about to begin anew."""
        until = time.monotonic() + PATIENCE_S
        while True:
            with self._cluster.translated():
                try:
                    while not self._cluster.ray.wait([answer], timeout=LOOK_S)[0]:
                        self._check_room()
                    at: int = self._cluster.ray.get(answer)
                    return at
                except self._cluster.ray.exceptions.ActorUnavailableError:
                    if time.monotonic() > until:
                        raise
            self._check_room()
            time.sleep(1)
            answer = self._stand(number, most)

    def hosts(self) -> list[str]:
        """The machine of every place."""
        return self._cluster.hosts(self._places)

    def windows(self) -> list[tuple[int, ...]]:
        """How many windows every place fits on, and holds out."""
        return [tuple(map(_count, g.values())) for g in self._shared(len(self._places))]

    def end(self) -> None:
        """Ends all places."""
        for place in self._places:
            self._cluster.ray.kill(place)

    def _awaited(self, references: Sequence[Any]) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(self._cluster.get, references))


@contextmanager
def worker_group(
    source: Source, dense: Dense, plan: Plan, written: torch.dtype
) -> Iterator[WorkerGroup]:
    """Those who hold the windows of a dense pass, as long as the `with` block lasts.

    Args:
        source: whose windows have been made.
        dense: the model.
        plan: the sizes of the pruned one, and how it is made.
        written: the dtype of the written weights.
    """
    assert isinstance(source, DensePass)  # statistics are refused before
    windows, held_out = source.parts()
    size = batch_size(windows.shape[1], len(windows))
    how: dict[str, Any] = {"device": source.device, "dtype": source.dtype, "written": written}
    if not isinstance(source, DistributedPass):
        [given] = given_of(windows, held_out, size)
        yield LocalGroup(TwoStreams(dense, plan, given, **how))
        return
    source.end()  # the workers of a pass that came before

    ray = source.cluster.ray  # what `shared` holds travels with every task
    handed = ray.put((windows, held_out))

    def shared(workers: int) -> Sequence[Given]:
        fit, held = ray.get(handed)
        return given_of(fit, held, size, workers)

    team = RayGroup(source.cluster, shared, source.workers, (dense, plan), how)
    try:
        yield team
        source.note(team.hosts(), team.windows())
    finally:
        team.end()


def _solve(work: Callable[[], SolvedBlock], threads: int) -> SolvedBlock:
    """In a process of the cluster."""
    begin(threads)
    return work().signed()


def _kept(finished: Finished, index: int) -> Mapping[str, Tensor]:
    tensors = finished(index)
    if tensors is None:
        raise NothingKeptError
    return tensors


def _count(parts: Sequence[Sequence[Any]]) -> int:
    return sum(len(batch.ids) for part in parts for batch in part)


def _on_cpu(value: Any) -> Any:
    """What travels between processes: tensors on the CPU, however deep they lie."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, GramSum):
        return value.to("cpu")
    if isinstance(value, Seen):
        return Seen(_on_cpu(value.gram), _on_cpu(value.missing), value.added, value.scale)
    if isinstance(value, dict):
        return {name: _on_cpu(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_on_cpu, value))
    return value
