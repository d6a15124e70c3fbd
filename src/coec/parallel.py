"""The processes of one run, as `torchrun` starts them; the only file that knows of several.

Every process runs the same program on its share of the calibration windows. The first one alone
reads text, solves what depends on all windows, and writes. With one process every function here
does the work itself and returns.
"""

import contextlib
import io
import itertools
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import call
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from coec.errors import ModelError

Item = TypeVar("Item")
Value = TypeVar("Value")
_RUNS = itertools.count()
"""Numbers of the runs of this program."""
_PATIENCE = timedelta(hours=24)
"""Time that a process waits for another one, which may solve a block or read a text meanwhile."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def launched() -> int:
    """Return the number of processes that were started together: also before `begun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this process is the first, by its environment: also before `begun`."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def begun() -> Iterator[None]:
    """Join the processes that `torchrun` started, while the `with` block lasts.

    Each takes the GPU of its number on its machine. A process that the caller joined stays joined.
    """
    if dist.is_initialized() or launched() == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    joining = dist.rendezvous("env://", timeout=_PATIENCE)  # type: ignore[attr-defined]
    store, number, count = next(joining)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # No key of an attempt that was killed, nor of an earlier run of this program
    own = dist.PrefixStore(f"coec {attempt} {next(_RUNS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own, rank=number, world_size=count, timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def agree(seen: dict[str, str]) -> None:
    """Check that every process sees the same, such as a model's fingerprint and versions.

    Raises:
        ModelError: on every process, naming the first machine that sees something else.
    """
    everyone = _all((socket.gethostname(), seen))
    for number, (host, other) in enumerate(everyone):
        for name, value in everyone[0][1].items():
            if other.get(name) != value:
                raise ModelError(
                    f"process {number} on {host} has {name} {other.get(name)}, the first process "
                    f"{value}: give all machines the same"
                )


def lead(work: Callable[..., Value], *arguments: Any) -> Value:
    """Return the result of the first process on every process; its error ends all of them."""
    if size() == 1:
        return work(*arguments)
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer[0] = _on_cpu(work(*arguments))
        except BaseException as error:
            answer[1] = str(error) or type(error).__name__
            _broadcast(answer, 0)
            raise
    value, failed = _broadcast(answer, 0)
    if failed is not None:
        raise SystemExit(1)
    return value


def lead_only(work: Callable[..., Value], *arguments: Any) -> Value | None:
    """Return a result on the first process only, such as an object with a model; else None."""
    made: list[Value] = []

    def make() -> None:
        made.append(work(*arguments))

    lead(make)
    return made[0] if made else None


@contextmanager
def leading(context: AbstractContextManager[Value]) -> Iterator[Value | None]:
    """Enter a context on the first process, and give None on the others."""
    with contextlib.ExitStack() as stack:
        yield lead_only(stack.enter_context, context)


def each(works: Sequence[Callable[[], Value]]) -> list[Value]:
    """Return the results of all works on every process; process n computes the n-th."""
    if size() == 1:
        return list(map(call, works))
    done = [_on_cpu(works[rank()]())] if rank() < len(works) else [None]
    return [value for [value] in _all(done)][: len(works)]


def share(items: Sequence[Item]) -> Sequence[Item]:
    """Return the items of this process: a run of consecutive ones, about equally long for each."""
    return items[rank() * len(items) // size() : (rank() + 1) * len(items) // size()]


def rounds(items: Sequence[Item], *, alone: bool) -> list[Sequence[Item]]:
    """Split items into runs of one for each process; of one, if they are `alone`."""
    count = 1 if alone else size()
    return [items[start : start + count] for start in range(0, len(items), count)]


def gathered(parts: Iterable[Item], to: int = 0) -> Iterator[Item]:
    """Yield the parts of all processes in their order on one of them, and nothing on the others.

    The other processes send each part when it is made, so that one is in memory at a time.
    """
    if size() == 1:
        yield from parts
    elif rank() != to:
        for part in parts:
            _send(part, to)
        _send(StopIteration, to)
    else:
        for source in range(size()):
            if source == to:
                yield from parts
                continue
            while (part := _receive(source)) is not StopIteration:
                yield part


def sum_to(to: int, parts: Iterable[Any]) -> Any:
    """Return the sum of the parts of all processes, added in their order, on one of them.

    The result does not depend on the number of processes, if the parts do not. None elsewhere, and
    where there are no parts.
    """
    total: Any = None
    for part in gathered(parts, to):
        if total is None:
            total = part
        else:
            total.merge(part)
        del part  # before the next one is made
    return total


def _on_cpu(value: Any) -> Any:
    """Return a value whose tensors are on the CPU, so that any machine can read them."""
    if not torch.cuda.is_available():
        return value

    class Pickler(pickle.Pickler):
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, torch.Tensor) and item.device.type != "cpu":
                return item.cpu().__reduce_ex__(5)
            return NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer, 5).dump(value)
    return pickle.loads(buffer.getvalue())


def _send(value: Any, to: int) -> None:
    dist.send_object_list([_on_cpu(value)], to)


def _receive(source: int) -> Any:
    received: list[Any] = [None]
    dist.recv_object_list(received, source)
    return received[0]


def _broadcast(values: list[Any], source: int) -> list[Any]:
    dist.broadcast_object_list(values, source)
    return values


def _all(value: Any) -> list[Any]:
    """Return the values of all processes."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values
