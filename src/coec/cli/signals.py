"""Signals that end a program, so that nothing half-written is left.

The exception that a signal handler raises may be replaced by another one (safetensors raises a
ValueError when it is interrupted while it reads), so the signal is also noted here.
"""

import os
import signal
import threading
from types import FrameType

END_SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n))
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells and typer."""
STOPPED = "interrupted; nothing half-written is left"
_statuses: list[int] = []


def status() -> int | None:
    """Return the exit status of the first signal that came; None if none has come."""
    return next(iter(_statuses), None)


def begin() -> None:
    """Let SIGTERM and SIGHUP unwind the program, and Ctrl-C end it on the spot at first.

    Until `interruptible` nothing has been written, and an exception would go through the libraries'
    start-up code in C++, which may abort. Only the main thread may set handlers; an ignored signal,
    as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _statuses.clear()
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _unwind)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def interruptible() -> None:
    """Make Ctrl-C an exception from now on, which lets work undo its unfinished part."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _interrupt)


def end() -> None:
    """Leave Ctrl-C to Python again, and forget a signal that came."""
    _statuses.clear()
    if signal.getsignal(signal.SIGINT) in (_exit, _interrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _unwind(number: int, frame: FrameType | None) -> None:
    for ignored in END_SIGNALS:  # by a handler: a library may print about SIG_IGN
        signal.signal(ignored, lambda number, frame: None)
    _statuses.append(128 + number)
    raise SystemExit(_statuses[0])


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, f"coec: {STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _statuses.append(INTERRUPTED)
    raise KeyboardInterrupt
