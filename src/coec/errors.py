"""The errors a user can mend.

Every message says what must hold, what was found, and what to change, on one line: the command
prints it as it is, without a traceback, and exits with status 1. What to change is named as a
keyword argument, `seq_len=64`, of which the command makes a flag (`coec.cli.spelling`).
"""

LONGEST = 200
"""Characters that are told of somebody else's error."""


def first_line(error: BaseException) -> str:
    """What another library's error says, on one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:LONGEST]


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


class ResultsError(CoecError):
    """The results of a sweep cannot be read."""
