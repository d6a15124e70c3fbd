"""The command: flags to settings, results to text or JSON. Nothing is computed here.

Results go to stdout, everything else to stderr. Exit status 0; 1 for an error the user can mend;
2 for wrong usage; 130 after Ctrl-C. Commands import their modules only when they run, so
that help appears at once. This module imports nothing beyond the standard library, so that an
interrupt during any other import is caught here.
"""

import io
import os
import shlex
import sys

from coec.cli import signals

_ENDED = tuple(128 + number for number in signals.END_SIGNALS)
"""Exit statuses after the other signals that end a run."""


def main() -> None:
    """Run the command line; errors a user can mend become one line and exit status 1."""
    signals.begin()
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for terminals of ASCII alone
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
        signals.end()


def _run() -> None:
    if "" in sys.argv[1:]:
        _say("an argument is empty: leave it out, or give it a value")
        sys.exit(2)
    from coec.cli.commands import app
    from coec.errors import CalibrationError, CoecError

    try:
        app(prog_name="coec")
    except BaseException as error:
        _end_by_signal(error)
        message = _out_of_memory(error)
        if isinstance(error, CoecError):
            from coec.cli.flags import spelled

            message = spelled(str(error))
        if message is not None:
            _say(message)
            _say_what_is_kept(error, repeatable=not isinstance(error, CalibrationError))
            sys.exit(1)
        sys.stdout.flush()  # while a failure can still be told
        raise


def _end_by_signal(error: BaseException) -> None:
    """Raise the exit of a received signal, if there is one, instead of any other error."""
    asked = error.code if isinstance(error, SystemExit) else signals.status()
    if not asked:  # a command that finished in spite of a signal has not failed
        return
    status = signals.status() or asked
    if status == signals.INTERRUPTED:
        raise KeyboardInterrupt from error
    if status in _ENDED:
        _say_ended(error)
        sys.stdout.flush()
        raise SystemExit(status) from error


def _out_of_memory(error: BaseException) -> str | None:
    """Return what to lower if memory was the problem; None for any other error.

    torch is not imported to recognise its errors.
    """
    lower = "out of memory: lower --samples or --seq-len"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        first = "".join(f"({line})" for line in str(error).strip().splitlines()[:1])
        return f"{lower}, or use --device cpu {first}"
    # torch raises a plain RuntimeError for the CPU's memory.
    return lower if "DefaultCPUAllocator" in str(error) else None


def _say_ended(error: BaseException) -> None:
    """Print what a signal left: nothing, or finished work and the line that resumes it."""
    _say("interrupted" if _kept(error) else signals.STOPPED)
    _say_what_is_kept(error)


def _say_what_is_kept(error: BaseException, *, repeatable: bool = True) -> None:
    """Print what is kept of the run, and the command that resumes it or, if it would only fail
    again, the option that begins anew.
    """
    kept = _kept(error)
    for note in kept:
        _say(note)
    if kept and repeatable:
        again = [word for word in sys.argv[1:] if word != "--restart"]
        _say(f"to go on: {shlex.join(['coec', *again])}")
    elif kept:
        _say("a changed command begins anew with --restart")


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
