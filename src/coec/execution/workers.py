"""Run jobs by one function, here or in worker processes; results come in the jobs' order."""

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
from typing import Any, TypeVar

from coec.errors import CoecError

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 10
"""Seconds in which the workers of a broken pool end."""


class Workers:
    """Worker processes, which the context manager ends; a `count` of 1 works in this process."""

    def __init__(self, count: int) -> None:
        self._pool = None
        if count > 1:
            threads = max(1, (os.cpu_count() or 1) // count)
            self._pool = ProcessPoolExecutor(
                count, get_context("spawn"), initializer=_begin, initargs=(threads,)
            )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if self._pool:
            if error_type is not None:  # a signal may have reached this process alone
                for process in list(self._pool._processes.values()):
                    process.terminate()
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[_Job], _Result], jobs: Iterable[_Job]) -> Iterator[_Result]:
        """Yield results in the order of the jobs; CoecError where a worker died.

        Function and jobs are pickled.
        """
        if self._pool is None:
            yield from map(function, jobs)
            return
        processes: list[Any] = []
        try:
            with _signals_deferred():
                results = self._pool.map(functools.partial(_run, function), map(_ByValue, jobs))
                processes += self._pool._processes.values()
            yield from results
        except BrokenProcessPool as error:
            _raise_signal_of(processes)
            raise CoecError(
                "a worker process died, probably for lack of memory: use fewer jobs (jobs=N); "
                "what is finished is kept, and the same command goes on with the rest"
            ) from error


def _raise_signal_of(processes: Iterable[Any]) -> None:
    """Raise the signal that ended a worker, since all processes of a run receive it.

    Python swallows an exception that a handler raises in a destructor or a callback; this process
    then learns of the signal only from its workers.
    """
    for process in processes:
        process.join(_PATIENCE)
    codes = {process.exitcode for process in processes}
    for number in _SIGNALS:
        if 128 + number in codes:
            signal.raise_signal(number)


class _ByValue:
    """A job that is pickled at once, and arrives as itself.

    torch would otherwise pass tensors on through a thread of this process, which complains on
    stderr about a worker that has gone meanwhile.
    """

    def __init__(self, job: Any) -> None:
        self._job = job

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (pickle.dumps(self._job),)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals until worker processes that start meanwhile can handle them.

    The mask is for these processes, which inherit it. It defers nothing here: it belongs to one
    thread, and Python passes a signal that any thread receives to the main thread.
    """
    received: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, lambda n, _: received.append(n)) for n in _SIGNALS if main}
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for first in received[:1]:
            signal.raise_signal(first)


def begin_process(threads: int) -> None:
    """Let a new process use so many threads, and keep its libraries from chatter."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _begin(threads: int) -> None:
    """Set up a worker process: its share of the cores, quiet libraries, a silent end at Ctrl-C."""
    begin_process(threads)
    # Signals are not ignored: a half-written output is then removed at once, and nobody waits.
    for number in _SIGNALS:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent ends: after SIGKILL it would wait for jobs for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_state: dict[str, Any] = {"busy": False, "status": None}


def _run(function: Callable[[_Job], _Result], job: _Job) -> _Result:
    """Run one job in a worker; after a signal has unwound a job, the pool must give no other."""
    if _state["status"] is not None:
        os._exit(_state["status"])
    _state["busy"] = True
    try:
        return function(job)
    finally:
        _state["busy"] = False


def _end(number: int, frame: FrameType | None) -> None:
    """Unwind the job; an idle worker ends at once, since the pool would print an exception."""
    _state["status"] = 128 + number
    for name in _SIGNALS:
        # A second signal would disturb tidying up; SIG_IGN makes Python complain of a pending one.
        signal.signal(name, lambda number, frame: None)
    if not _state["busy"]:
        os._exit(128 + number)
    sys.exit(128 + number)
