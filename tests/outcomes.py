"""How calls and commands end: errors that tests expect or raise, and what a command shows."""

import os
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(error: type[BaseException], match: str | None = None):
    """Expects an error whose message is one line."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def raising(error):
    """A function that raises the error, whatever it is given."""

    def raises(*arguments, **options):
        raise error

    return raises


def signalled(number):
    """A function that sends this process a signal; an error takes the place of what it raises.

    Code in C does that: of what is raised while it reads a tensor, safetensors makes a ValueError.
    """

    def signals(*arguments, **options):
        try:
            os.kill(os.getpid(), number)
        except BaseException:
            raise ValueError("could not determine the shape") from None

    return signals


WORK = AssertionError("work had begun")
"""Raised in place of what a refusal comes before."""


def check_refused(answer: tuple, said: str) -> None:
    """A command's status, stdout and stderr are those of a refusal: one line that says so."""
    status, out, err = answer
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("coec: ")
    assert said in err


def succeeded(answer: tuple) -> tuple[str, str]:
    """Stdout and stderr of a command, which ended with status 0."""
    status, out, err = answer
    assert status == 0, err
    return out, err
