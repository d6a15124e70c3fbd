"""Signals that end a program, so that nothing half-written is left."""

import os
import signal
import threading
from types import FrameType

from coec import ending

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
STOPPED = "interrupted; nothing half-written is left"


def end_tidily() -> None:
    """Let SIGTERM and SIGHUP unwind the program, which removes what it was writing.

    Only the main thread may set handlers; what is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    ending.forget()
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _unwind)


def _unwind(number: int, frame: FrameType | None) -> None:
    for ignored in END_SIGNALS:
        signal.signal(ignored, _unheard)
    ending.end_with(128 + number)


def _unheard(number: int, frame: FrameType | None) -> None:
    """Keep a second signal from disturbing the tidying up. Ignored, it might be printed about."""


def end_at_once() -> None:
    """Let Ctrl-C end the process on the spot until `interruptible`: nothing has been written.

    An exception would go through the libraries' start-up code in C++, which may abort at it.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def interruptible() -> None:
    """Make Ctrl-C an exception from now on, which lets work undo what it has half done."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _interrupt)


def as_before() -> None:
    """Leave Ctrl-C to Python again, where it is ours, and forget a signal that came."""
    ending.forget()
    if signal.getsignal(signal.SIGINT) in (_exit, _interrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, f"coec: {STOPPED}\n".encode())
    os._exit(ending.INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    ending.end_with(ending.INTERRUPTED)
