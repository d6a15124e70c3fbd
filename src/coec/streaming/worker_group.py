"""Workers that hold the hidden states of the dense and the pruned model, one or several.

Every worker answers for its own windows, all at once; answers come in the order of the windows.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from coec.models.dense import Dense
from coec.models.description import Description
from coec.planning.run import Run
from coec.streaming.layers import HOST
from coec.streaming.two_streams import Shard, TwoStreams

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Finished = Callable[[int], Mapping[str, Tensor] | None]
"""Return the written tensors of a solved block, by its index; None where they were not kept."""


class NothingKeptError(Exception):
    """A worker was lost, and the blocks that were solved before are not there to go on from."""


class WorkerGroup(ABC):
    """The workers that hold all windows, asked through the methods of `TwoStreams`."""

    def each(
        self,
        method: Callable[Concatenate[TwoStreams, Arguments], Iterable[Value]],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Iterable[Value]:
        """Return what a method yields at every worker, in their order; work begins at once.

        Raises:
            LostError: a worker was lost.
        """
        return itertools.chain.from_iterable(self.answers(method, args, kwargs))

    def do(
        self,
        method: Callable[Concatenate[TwoStreams, Arguments], None],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Call a method at every worker, and return when all are done.

        Raises:
            LostError: a worker was lost.
        """
        for _ in self.answers(method, args, kwargs):
            pass

    @abstractmethod
    def answers(
        self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterable[Any]:
        """Call a method at every worker, and return what it returns there, in their order.

        Raises:
            LostError: a worker was lost.
        """

    @abstractmethod
    def solve(self, work: Callable[[], Value]) -> tuple[Value, str | None]:
        """Return what some work returns, which asks this group, and the host if it is another.

        Raises:
            LostError: a worker was lost, or the process that did the work.
        """

    @abstractmethod
    def bring_to(self, index: int, finished: Finished) -> None:
        """Bring every worker before a block, or behind the last.

        Raises:
            NothingKeptError: a block between is not kept.
            LostError: a worker was lost.
        """


def streams_of(run: Run, dense: Dense, shard: Shard, device: torch.device) -> TwoStreams:
    """Return both models of a run before the first block, for the windows of one worker."""
    return TwoStreams(
        dense, Description.of(run.plan.output.config), shard, device,
        home=device if run.states_on_device else HOST, dtype=run.forward, written=run.written,
        propagate=run.recipe.reconstruction.propagate,
    )  # fmt: skip


class LocalGroup(WorkerGroup):
    """A group of one worker, in this process."""

    def __init__(self, streams: TwoStreams) -> None:
        self.streams = streams

    def answers(
        self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterable[Any]:
        return [method(self.streams, *args, **kwargs)]

    def solve(self, work: Callable[[], Value]) -> tuple[Value, str | None]:
        return work(), None

    def bring_to(self, index: int, finished: Finished) -> None:
        # Blocks solved in an earlier run are passed through with the weights that were written.
        for passed in range(self.streams.rewind(index), index):
            self.streams.advance(passed, tensors_of(finished, passed))


def tensors_of(finished: Finished, index: int) -> Mapping[str, Tensor]:
    """Return the written tensors of a block; raises NothingKeptError where they were not kept."""
    tensors = finished(index)
    if tensors is None:
        raise NothingKeptError
    return tensors
