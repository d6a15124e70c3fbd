"""Signals that end a program: like Ctrl-C, so that nothing half-written is left."""

import signal
import threading
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


def end_tidily() -> None:
    """From now on SIGTERM and SIGHUP unwind the program, which removes what it was writing.

    Only the main thread may say so; what is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for other in ENDING:
        signal.signal(other, _unheard)
    raise SystemExit(128 + number)


def _unheard(number: int, frame: FrameType | None) -> None:
    """A second signal does not disturb the tidying up. Ignored, it might be printed about."""
