"""Errors that a user can mend.

Every message states the requirement, the value found, and the change to make, on one line: the
command prints it unchanged, without a traceback, and exits with status 1. The change is named as a
keyword argument, `seq_len=64`, which the command spells as a flag (`coec.cli.common`).
"""

import importlib
from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 200
"""Characters quoted from another library's error."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error; its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:_LONGEST]


def last_line(error: BaseException) -> str:
    """The last line of another library's error; its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint at the nearest of the names, if one is near."""
    close = get_close_matches(name, list(names), 1)
    return f"; did you mean '{close[0]}'?" if close else ""


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


class UnfinishedError(OutputError):
    """An unfinished run into the output folder was asked for something else."""


class NumericalError(CoecError):
    """Numbers that must be finite are not, and no safeguard could help."""


def check_installed(
    purpose: str, install: str, *packages: str, kind: type[CoecError] = OptionError
) -> None:
    """Raise an error unless packages can be imported; `install` is what pip gets them by."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            missing = (error.name or package).partition(".")[0]
            raise kind(f"{purpose} needs {missing}: pip install {install}") from error
        except ImportError as error:
            raise kind(f"{purpose} needs {package}: {first_line(error)}") from error
