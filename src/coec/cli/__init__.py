"""The command: flags to settings, results to text or JSON. Nothing is computed here.

Results go to stdout, everything else to stderr. Exit status 0; 1 for an error the user can mend;
2 for wrong usage; 130 after Ctrl-C. Commands import what they need only when they run: help is
there at once. This module imports nothing beyond the standard library, so that an interrupt during
any other import is caught here.
"""

import io
import os
import shlex
import sys

from coec.cli import signals

_ENDED = tuple(128 + number for number in signals.END_SIGNALS)
"""Exit statuses after the other signals that end a run."""
_LOWER = "--samples or --seq-len"


def main() -> None:
    """Run the command line; errors a user can mend become one line and exit status 1."""
    # SIGTERM and SIGHUP unwind the program; Ctrl-C ends it until work has begun.
    signals.end_tidily()
    signals.end_at_once()
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
        _run()
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        _say_ended(error)
        _leave(signals.INTERRUPTED)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _leave(1)
    except OSError as error:
        name = "the output" if error.filename is None else f"'{error.filename!s:.200}'"
        _say(f"{name} cannot be used: {error.strerror or error}")
        _leave(1)
    finally:
        signals.as_before()


def _run() -> None:
    if "" in sys.argv[1:]:
        _say("an argument is empty: leave it out, or say what is meant")
        sys.exit(2)
    from coec.cli.commands import app
    from coec.errors import CoecError

    try:
        app(prog_name="coec")
    except BaseException as error:
        _end_by_signal(error)
        if isinstance(error, CoecError):
            from coec.cli.flags import spelled

            _fail(spelled(str(error)), error)
        if isinstance(error, (MemoryError, RuntimeError)):
            _fail_without_memory(error)
        sys.stdout.flush()  # while a failure can still be told
        raise


def _end_by_signal(error: BaseException) -> None:
    """Raise the exit of the signal that came, if one has, whatever arrives in its place.

    What was finished all the same is no failure.
    """
    asked = error.code if isinstance(error, SystemExit) else signals.status()
    if not asked:
        return
    status = signals.status() or asked
    if status == signals.INTERRUPTED:
        raise KeyboardInterrupt from error
    if status in _ENDED:
        _say_ended(error)
        sys.stdout.flush()
        raise SystemExit(status) from error


def _fail_without_memory(error: MemoryError | RuntimeError) -> None:
    """Say what to lower where memory was the problem; raises any other error again.

    torch is not imported to tell its errors: whoever raised them has imported it.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        first = "".join(f"({line})" for line in str(error).strip().splitlines()[:1])
        _fail(f"out of memory: lower {_LOWER}, or use --device cpu {first}", error)
    if "DefaultCPUAllocator" not in str(error):  # what torch raises for the CPU's memory
        raise error
    _fail(f"out of memory: lower {_LOWER}", error)


def _fail(message: str, error: BaseException) -> None:
    _say(message)
    _say_what_is_kept(error)
    sys.exit(1)


def _say_ended(error: BaseException) -> None:
    """Say what a signal leaves: nothing, or finished work and the line that goes on with it."""
    _say("interrupted" if _kept(error) else signals.STOPPED)
    _say_what_is_kept(error)


def _say_what_is_kept(error: BaseException) -> None:
    kept = _kept(error)
    for note in kept:
        _say(note)
    if kept:
        again = [word for word in sys.argv[1:] if word != "--restart"]
        _say(f"to go on: {shlex.join(['coec', *again])}")


def _kept(error: BaseException | None) -> list[str]:
    """Notes that the journal put on an error, or on one that another took the place of."""
    passed: list[BaseException] = []
    while error is not None and error not in passed:
        if hasattr(error, "__notes__"):
            return list(error.__notes__)
        passed.append(error)
        error = error.__cause__ or error.__context__
    return []


def _say(message: str) -> None:
    """Print one line on stderr; control characters of a file's name do not reach the terminal."""
    # One line, whatever the message holds.
    line = " ".join(message.split())
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    print(f"coec: {safe}", file=sys.stderr)


def _leave(status: int) -> None:
    """Exit with nothing more on stdout: what cannot be written would be tried again at exit."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
