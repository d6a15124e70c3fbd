"""Where the hidden states of the dense and the pruned model are: in this process, or in several.

Whatever a team is asked, every place answers for its own windows, all at once, and the answers come
in the order of the windows.
"""

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from coec.calibration.layers import TOKENS_PER_BATCH
from coec.calibration.measure import DensePass, Source
from coec.calibration.shares import SharedPass
from coec.errors import OptionError
from coec.execution.cluster import Cluster, begin
from coec.models.dense import Dense
from coec.planning import Plan
from coec.side_by_side import PARTS, Given, Pair, Seen, given_of
from coec.types import GramSum

Finished = Callable[[int], Mapping[str, Tensor] | None]
"""The written tensors of a solved block, by its index; None where they were not kept."""


class NothingKeptError(Exception):
    """A place was lost, and what was solved before is not there to go on from."""


class Team(Protocol):
    """All places together."""

    def all(self, name: str, *arguments: Any) -> Iterable[Any]:
        """What a method of `Pair` returns, of all places in their order; begun at once.

        Raises:
            LostError: a place was lost.
        """

    def do(self, name: str, *arguments: Any) -> None:
        """The same for a method that returns nothing; done when this returns."""

    def bring_to(self, index: int, finished: Finished) -> None:
        """Has every place stand before a block, or behind the last.

        Raises:
            NothingKeptError: a block between is not kept.
            LostError: a place was lost.
        """


class Here:
    """A team of one, in this process."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def all(self, name: str, *arguments: Any) -> Iterable[Any]:
        found: Iterable[Any] = getattr(self.pair, name)(*arguments)
        return found

    def do(self, name: str, *arguments: Any) -> None:
        for _ in self.all(name, *arguments):
            pass

    def bring_to(self, index: int, finished: Finished) -> None:
        [at] = self.pair.at()
        for passed in range(at, index):
            self.do("go_past", passed, _kept(finished, passed))


class _Place:
    """A pair in a process of a cluster (an actor)."""

    def __init__(self, dense: Dense, plan: Plan, given: Given, how: dict[str, Any]) -> None:
        begin(how.pop("threads"))
        self._pair = Pair(dense, plan, given, **how)

    def run(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """What a method returns, on the CPU."""
        return [_on_cpu(one) for one in getattr(self._pair, name)(*arguments)]

    def host(self) -> str:
        """The name of the machine."""
        return socket.gethostname()


class OnCluster:
    """A team of processes of a cluster; what is lost there begins anew.

    Args:
        cluster: where.
        given: the windows of every place.
        dense, plan: as in `Pair`.
        how: the rest of what a `Pair` takes, by name.
    """

    def __init__(
        self,
        cluster: Cluster,
        given: Sequence[Given],
        dense: Dense,
        plan: Plan,
        how: Mapping[str, Any],
    ) -> None:
        self._cluster = cluster
        ray = cluster.ray
        place = ray.remote(
            max_restarts=-1, scheduling_strategy="SPREAD", **cluster.half(how["device"])
        )(_Place)
        # Put there and held here: a place that is begun again is given the same once more.
        self._shared = ray.put(dense), ray.put(plan)
        self._given = [ray.put(own) for own in given]
        how = {**how, "threads": cluster.threads}
        self._places = [place.remote(*self._shared, own, how) for own in self._given]

    def all(self, name: str, *arguments: Any) -> Iterable[Any]:
        handed = self._cluster.ray.put(_on_cpu(arguments))
        return self._awaited([place.run.remote(name, handed) for place in self._places])

    def do(self, name: str, *arguments: Any) -> None:
        for _ in self.all(name, *arguments):
            pass

    def bring_to(self, index: int, finished: Finished) -> None:
        stand = list(self.all("at"))
        for passed in range(min(stand), index):
            behind = [n for n, at in enumerate(stand) if at <= passed]
            handed = self._cluster.ray.put((passed, dict(_kept(finished, passed))))
            for _ in self._awaited([self._places[n].run.remote("go_past", handed) for n in behind]):
                pass

    def hosts(self) -> list[str]:
        """The machine of every place."""
        with self._cluster.translated():
            found: list[str] = self._cluster.ray.get([p.host.remote() for p in self._places])
            return found

    def end(self) -> None:
        """Ends all places."""
        for place in self._places:
            self._cluster.ray.kill(place)

    def _awaited(self, references: Sequence[Any]) -> Iterator[Any]:
        def answers() -> Iterator[list[Any]]:
            for reference in references:
                with self._cluster.translated():
                    answer = self._cluster.ray.get(reference)
                yield answer

        return itertools.chain.from_iterable(answers())


@contextmanager
def team_of(source: Source, dense: Dense, plan: Plan, written: torch.dtype) -> Iterator[Team]:
    """Those who hold the windows of a dense pass, as long as the `with` block lasts.

    Args:
        source: whose windows have been made.
        dense: the model.
        plan: the sizes of the pruned one, and how it is made.
        written: the dtype of the written weights.
    """
    assert isinstance(source, DensePass)  # statistics are refused before
    windows, held_out = source.parts()
    size = max(1, min(TOKENS_PER_BATCH // windows.shape[1], len(windows) // PARTS))
    how: dict[str, Any] = {"device": source.device, "dtype": source.dtype, "written": written}
    if not isinstance(source, SharedPass):
        [given] = given_of(windows, held_out, size)
        yield Here(Pair(dense, plan, given, **how))
        return
    source.end()  # the workers of a pass that came before
    shares = given_of(windows, held_out, size, source.workers)
    team = OnCluster(source.cluster, shares, dense, plan, how)
    try:
        source.note(team.hosts(), [tuple(map(_count, given.values())) for given in shares])
        yield team
    finally:
        team.end()


def check_leader(source: Source) -> None:
    """Raises OptionError where blocks in order would be solved by a process without their GPU."""
    if source.device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "the process that leads solves the blocks itself where each waits for the one before, "
            "and has no GPU: run the command on a node that has one, or set device=cpu"
        )


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
