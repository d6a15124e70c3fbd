"""Signals that end a program, so that nothing half-written is left.

The exception raised by a handler may be replaced by another one (safetensors raises a ValueError if
a signal arrives while it reads a tensor). So the signal is noted, and the command asks for it.
"""

import os
import signal
import threading
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells and typer have it."""
_statuses: list[int] = []
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
STOPPED = "interrupted; nothing half-written is left"


def end_tidily() -> None:
    """Let SIGTERM and SIGHUP unwind the program, which removes what it was writing.

    Only the main thread may set handlers; what is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    forget()
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _unwind)


def _unwind(number: int, frame: FrameType | None) -> None:
    for ignored in END_SIGNALS:
        signal.signal(ignored, _unheard)
    end_with(128 + number)


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
    forget()
    if signal.getsignal(signal.SIGINT) in (_exit, _interrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, f"coec: {STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    end_with(INTERRUPTED)


def forget() -> None:
    """Forget a signal that came before."""
    _statuses.clear()


def end_with(status: int) -> None:
    """Note a signal by the exit status that it asks for, and raise what ends the program.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another signal, with its status.
    """
    _statuses.append(status)
    if _statuses[0] == INTERRUPTED:
        raise KeyboardInterrupt
    raise SystemExit(_statuses[0])


def status() -> int | None:
    """Exit status of the first signal that came; None where none has come."""
    return next(iter(_statuses), None)
