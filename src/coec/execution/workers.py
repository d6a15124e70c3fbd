"""Many jobs by one function: here, or in processes of their own; results in the jobs' order."""

import functools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from types import FrameType
from typing import Any, Protocol, TypeVar

from coec.errors import CoecError

Job = TypeVar("Job")
Result = TypeVar("Result")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED_S = 10
"""Seconds in which workers of a broken pool, which are ended, are gone."""


class Executor(Protocol):
    """What carries out jobs, wherever that is."""

    def map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """The results in the order of the jobs; function and jobs are pickled.

        Raises:
            CoecError: a worker died.
        """


class Workers:
    """Carries out jobs; a context that ends its processes.

    Args:
        count: of processes; 1 works in this one.
    """

    def __init__(self, count: int) -> None:
        self._pool = None
        if count > 1:
            threads = max(1, (os.cpu_count() or 1) // count)
            self._pool = ProcessPoolExecutor(
                count, get_context("spawn"), initializer=_begin, initargs=(threads,)
            )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._pool:
            if kind is not None:  # a signal that reached this process alone: nobody waits for jobs
                for process in list(self._pool._processes.values()):
                    process.terminate()
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """The results in the order of the jobs; function and jobs are pickled.

        Raises:
            CoecError: a worker died.
        """
        if self._pool is None:
            yield from map(function, jobs)
            return
        processes: list[Any] = []
        try:
            with _deferred():
                results = self._pool.map(
                    functools.partial(_carry_out, function), map(_ByValue, jobs)
                )
                processes += self._pool._processes.values()
            yield from results
        except BrokenProcessPool as error:
            _raise_signal_of(processes)
            raise CoecError(
                "a worker process died, probably for lack of memory: use fewer jobs (jobs=N); "
                "what is finished is kept, and the same command goes on with the rest"
            ) from error


def _raise_signal_of(processes: Iterable[Any]) -> None:
    """Does as this process should have, where a signal to all of them ended a worker.

    Python swallows what a handler raises in a destructor or a callback, and then learns of the
    signal from its workers alone.
    """
    for process in processes:
        process.join(ENDED_S)
    codes = {process.exitcode for process in processes}
    for number in ENDING:
        if 128 + number in codes:
            signal.raise_signal(number)


class _ByValue:
    """A job on its way to a worker, where it arrives as itself.

    Otherwise torch hands tensors over through a thread of this process, which complains on stderr
    of a worker that has gone meanwhile.
    """

    def __init__(self, job: Any) -> None:
        self._job = job

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (pickle.dumps(self._job),)


@contextmanager
def _deferred() -> Iterator[None]:
    """Signals wait, also in processes that are started meanwhile, until these can take them.

    The mask is for those, which inherit it. Here it holds back nothing: it is this thread's alone,
    and Python hands the main thread what any other one takes.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, lambda got, _: came.append(got)) for n in ENDING if main}
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        for first in came[:1]:
            signal.raise_signal(first)


def _begin(threads: int) -> None:
    """Sets a worker process up: its share of the cores, no chatter, a silent end at Ctrl-C."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # not ignored: what a job has half-written is then removed at once, and nobody waits for it
    for number in ENDING:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """Where the parent is killed, nobody would tell a worker: it would wait for jobs for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_state: dict[str, Any] = {"busy": False, "status": None}


def _carry_out(function: Callable[[Job], Result], job: Job) -> Result:
    """A job in a worker, which a signal unwinds; after it the pool would hand it the next."""
    if _state["status"] is not None:
        os._exit(_state["status"])
    _state["busy"] = True
    try:
        return function(job)
    finally:
        _state["busy"] = False


def _end(number: int, frame: FrameType | None) -> None:
    """Unwinds a job; a worker that has none ends at once, as the pool would print an exception."""
    _state["status"] = 128 + number
    for other in ENDING:
        # A second one would disturb the tidying up; of one that SIG_IGN overtakes Python complains.
        signal.signal(other, lambda number, frame: None)
    if not _state["busy"]:
        os._exit(128 + number)
    sys.exit(128 + number)
