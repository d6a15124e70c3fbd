"""Signals that end a program: like Ctrl-C, so that nothing half-written is left."""

import signal
import threading
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
_statuses: list[int] = []
"""The exit status of the signal that came, once one has."""


def end_tidily() -> None:
    """From now on SIGTERM and SIGHUP unwind the program, which removes what it was writing.

    Only the main thread may say so; what is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _statuses.clear()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for other in ENDING:
        signal.signal(other, _unheard)
    _statuses.append(128 + number)
    raise SystemExit(128 + number)


def status_of_signal() -> int | None:
    """Exit status of the signal that ends the program; None where none has come.

    Ray, asked for something meanwhile, raises a SystemExit of its own in the place of ours.
    """
    return next(iter(_statuses), None)


def _unheard(number: int, frame: FrameType | None) -> None:
    """A second signal does not disturb the tidying up. Ignored, it might be printed about."""
