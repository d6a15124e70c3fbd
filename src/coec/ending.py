"""The signal that ends the program, noted when it comes.

What its handler raises may arrive as something else: Ray raises a SystemExit of its own in its
place, and code in C any error (safetensors, when it reads a tensor, a ValueError). So whoever goes
on after errors of any kind asks here first.
"""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells and typer have it."""
_statuses: list[int] = []


def forget() -> None:
    """Forget a signal that came before."""
    _statuses.clear()


def end_with(status: int) -> None:
    """Note a signal by the exit status that it asks for, and raise what ends the program."""
    _statuses.append(status)
    check()


def status() -> int | None:
    """Exit status of the first signal that came; None where none has come."""
    return next(iter(_statuses), None)


def check() -> None:
    """Raise what ends the program if a signal has come.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another signal, with its status.
    """
    asked = status()
    if asked == INTERRUPTED:
        raise KeyboardInterrupt
    if asked is not None:
        raise SystemExit(asked)
