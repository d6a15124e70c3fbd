"""The errors a user can mend.

Every message says what must hold, what was found, and what to change, on one line: the command
prints it as it is, without a traceback, and exits with status 1. What to change is named as a
keyword argument, `seq_len=64`, of which the command makes a flag (`coec.cli.spelling`).
"""

from typing import Any


class CoecError(Exception):
    """Base of all errors raised on purpose by this package."""


class OptionError(CoecError):
    """An option is unknown, out of range, or contradicts another."""


class ModelError(CoecError):
    """The model folder is missing, damaged, or of a kind that cannot be pruned."""


class CalibrationError(CoecError):
    """The calibration or evaluation text cannot be used."""


class OutputError(CoecError):
    """The output folder cannot be written as asked."""


class NumericalError(CoecError):
    """Numbers that must be finite are not, and no safeguard could help."""


class ResultsError(CoecError):
    """The results of a sweep cannot be read."""


SEEDS = 2**64
"""Generators of random numbers take seeds below this."""


def check_seed(seed: Any) -> None:
    """Raises OptionError unless the seed is one that a generator takes."""
    check_whole("seed", seed, least=0)
    if seed >= SEEDS:
        raise OptionError(f"seed must be below 2**64, got a number of {seed.bit_length()} bits")


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises OptionError unless the value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r:.80}")
