"""The command: flags to settings, results to text or JSON. Nothing is computed here.

Results go to stdout, everything else to stderr. Exit status 0; 1 for an error the user can mend;
2 for wrong usage; 130 after Ctrl-C. One module per command, each of which imports what it needs
only when it runs: help is there at once. This module imports nothing but the standard library, so
that an interrupt during any other import is caught here.
"""

import io
import os
import shlex
import signal
import sys
import threading
from types import FrameType

from coec.cli.signals import ENDING, end_tidily, status_of_signal

ENDED = tuple(128 + number for number in ENDING)
"""The exit statuses after the other signals that end a run."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells and typer have it."""
STOPPED = "interrupted; nothing half-written is left"
LOWER = "--samples or --seq-len (of --tasks, --batch-size)"


def main() -> None:
    """Runs the command line; errors a user can mend become one line and exit status 1."""
    end_tidily()
    _end_at_once()
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
        _run()
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        _say_ended(error)
        _leave(INTERRUPTED)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _leave(1)
    except OSError as error:
        name = "the output" if error.filename is None else f"'{error.filename!s:.200}'"
        _say(f"{name} cannot be used: {error.strerror or error}")
        _leave(1)
    finally:
        interruptible()


def _end_at_once() -> None:
    """Until `interruptible`, Ctrl-C ends the process on the spot: nothing has been written.

    An exception would go through the libraries' start-up code in C++, which may abort at it.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"coec: {STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def interruptible() -> None:
    """From now on Ctrl-C is an exception, which lets work undo what it has half done."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run() -> None:
    if "" in sys.argv[1:]:
        _say("an argument is empty: leave it out, or say what is meant")
        sys.exit(2)
    from coec.cli.commands import app
    from coec.cli.spelling import flag_of, spelled
    from coec.errors import CoecError
    from coec.settings import RENAMED

    for before, name in RENAMED.items():
        if any(word.split("=")[0] == flag_of(before) for word in sys.argv[1:]):
            _say(f"{flag_of(before)} is {flag_of(name)} now")
            sys.exit(2)
    try:
        app(prog_name="coec")
    except CoecError as error:
        _fail(spelled(str(error)), error)
    except MemoryError as error:
        _fail(f"out of memory: lower {LOWER}, or use --device cpu {_first_line(error)}", error)
    except RuntimeError as error:
        # torch is not imported for this: whoever raised its errors has imported it.
        if type(error).__name__ == "OutOfMemoryError":
            _fail(f"out of memory: lower {LOWER}, or use --device cpu {_first_line(error)}", error)
        if "DefaultCPUAllocator" not in str(error):  # what torch raises for the CPU's memory
            raise
        _fail(f"out of memory: lower {LOWER}", error)
    except SystemExit as error:
        error.code = status_of_signal() or error.code
        if error.code == INTERRUPTED:
            raise KeyboardInterrupt from error
        if error.code in ENDED:
            _say_ended(error)
        sys.stdout.flush()  # while a failure can still be told
        raise


def _first_line(error: Exception) -> str:
    return "".join(f"({line})" for line in str(error).strip().splitlines()[:1])


def _fail(message: str, error: BaseException) -> None:
    _say(message)
    _say_what_is_kept(error)
    sys.exit(1)


def _say_ended(error: BaseException) -> None:
    """What a signal leaves: nothing, or finished work and the line that goes on with it."""
    if not _kept(error):
        _say(STOPPED)
        return
    _say("interrupted")
    _say_what_is_kept(error)


def _say_what_is_kept(error: BaseException) -> None:
    kept = _kept(error)
    for note in kept:
        _say(note)
    if kept:
        again = [word for word in sys.argv[1:] if word != "--restart"]
        _say(f"to go on: {shlex.join(['coec', *again])}")


def _kept(error: BaseException | None) -> list[str]:
    """The notes that the journal put on an error, which another may have taken the place of."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if hasattr(error, "__notes__"):
            return list(error.__notes__)
        seen.append(error)
        error = error.__cause__ or error.__context__
    return []


def _say(message: str) -> None:
    """One line on stderr; control characters of a file's name do not reach the terminal."""
    line = " ".join(message.split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    print(f"coec: {shown}", file=sys.stderr)


def _leave(status: int) -> None:
    """Ends with nothing more on stdout: what cannot be written would be tried again at exit."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
