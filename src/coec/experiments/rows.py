"""results.jsonl: rows as values, with one reader and one writer, for the sweep and its report."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from coec.errors import ResultsError
from coec.experiments.records import (
    BY_TYPE,
    PLAIN,
    PLAIN_TEXT,
    Reader,
    check_object,
    checked,
    is_number,
    reader,
    values,
)
from coec.settings import OPTIONS, RECIPE
from coec.settings.fields import RENAMED, Setting

RESULTS = "results.jsonl"
NO_REASON = "no reason recorded"
"""Reason of a cell that failed without one."""
Metric = Literal["perplexity", "zero_shot", "kl", "agreement", "seconds", "memory"]

_SHARE = checked("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_PERPLEXITY = checked("a number of at least 1", lambda v: is_number(v) and v > 0.999)
"""A cross-entropy of 0 may be rounded to a little less."""
Fraction = Annotated[float, _SHARE]


def _readers(table: Iterable[Setting]) -> dict[str, Reader]:
    return {s.name: BY_TYPE.get(s.kind, PLAIN_TEXT) for s in table if s.kind is not None}


SETTING_NAMES = tuple(setting.name for setting in (*RECIPE, *OPTIONS))
RECIPE_READERS = _readers(RECIPE) | {"sparsity": _SHARE}
OPTION_READERS = _readers(OPTIONS)


@dataclass(frozen=True)
class RowSettings:
    """Settings of a cell, defaults included; null is a value here.

    Attributes:
        values: by name, in the order in which the recipe records them; the dense model's own row
            has sparsity 0 and compensation `dense`.
        options: of the compensation.
    """

    values: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def read(cls, content: Any, place: str) -> "RowSettings":
        """Read the settings of a row; raises ResultsError, which names the field."""
        check_object(content, ("sparsity", "compensation"), place)
        plain = {name: value for name, value in content.items() if name != "options"}
        options = {} if content.get("options") is None else content["options"]
        return cls(
            values(plain, place, RECIPE_READERS, PLAIN, nulls=True),
            values(options, f"{place}.options", OPTION_READERS, PLAIN, nulls=True),
        )


class Section:
    """Section of a row; false where nothing of it was measured."""

    def __bool__(self) -> bool:
        return self != type(self)()


@dataclass(frozen=True)
class PerplexityOfRow(Section):
    """Perplexity, the distance from the dense model's predictions, and the text."""

    perplexity: Annotated[float, _PERPLEXITY] | None = None
    text: str | None = None
    text_sha256: str | None = None
    windows: int | None = None
    seq_len: int | None = None
    kl: float | None = None
    agreement: Fraction | None = None


@dataclass(frozen=True)
class TaskOfRow:
    """Accuracy on one zero-shot task, its standard error, and what guessing scores."""

    value: float | None = None
    stderr: float | None = None
    chance: float | None = None
    items: int | None = None
    metric: str | None = None


@dataclass(frozen=True)
class ZeroShotOfRow(Section):
    """Zero-shot accuracy: the mean over tasks, and every task by its name."""

    mean: float | None = None
    mean_stderr: float | None = None
    tasks: Mapping[str, TaskOfRow] = field(default_factory=dict)
    at_chance: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParametersOfRow:
    """Numbers of parameters."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True)
class CostOfRow:
    """Size of the weights, and the peak memory of evaluating the model."""

    weight_bytes: int | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class AnglesOfRow(Section):
    """Mean principal angles between read frames in degrees, and the frames' discrepancy.

    O is the original on the kept units, P the pruned weight, C the repaired one.
    """

    angle_op: float | None = None
    angle_oc: float | None = None
    angle_pc: float | None = None
    discrepancy: float | None = None


@dataclass(frozen=True)
class Module:
    """Errors and rounds of one repaired module, and the safeguards that fired."""

    site: str
    block: int
    error_before: float | None = None
    error_after: float | None = None
    holdout_before: float | None = None
    holdout_after: float | None = None
    errors_per_round: tuple[float, ...] = ()
    objectives_per_round: tuple[float, ...] = ()
    gcv_lambda: float | None = None
    rounds: int | None = None
    events: tuple[str, ...] = ()
    geometry: AnglesOfRow = AnglesOfRow()


@dataclass(frozen=True)
class OverlapOfRow(Section):
    """Evaluation windows that repeat n-grams of the calibration text."""

    n: int | None = None
    windows: int | None = None
    shared: int | None = None
    share: Fraction | None = None
    flagged: bool | None = None


@dataclass(frozen=True)
class CalibrationOfRow(Section):
    """Calibration text, and the windows drawn from it."""

    source: str | None = None
    text_sha256: str | None = None
    windows_sha256: str | None = None
    windows: int | None = None
    seq_len: int | None = None


@dataclass(frozen=True)
class Row:
    """Cell of a sweep: its settings, and what was measured under them.

    Attributes:
        cell: digest of the settings.
        model: a label that no other model has.
        status: `failed` comes with an error of one line and without measurements.
        grids: the grids that the cell belongs to.
        labels: the cell's name by grid, where a grid names its rows.
        seconds: by phase.
        identity: digests of the contents of model and texts.
        record: the object that was read, with fields that no attribute above names.
    """

    cell: str
    status: Literal["done", "failed"]
    model: str
    settings: Annotated[RowSettings, RowSettings.read]
    grids: tuple[str, ...]
    labels: Mapping[str, str]
    error: str | None = None
    perplexity: PerplexityOfRow = PerplexityOfRow()
    zero_shot: ZeroShotOfRow = ZeroShotOfRow()
    parameters: ParametersOfRow = ParametersOfRow()
    cost: CostOfRow = CostOfRow()
    sites: tuple[Module, ...] = ()
    overlap: OverlapOfRow = OverlapOfRow()
    calibration: CalibrationOfRow = CalibrationOfRow()
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    identity: Mapping[str, str | None] = field(default_factory=dict)
    record: Mapping[str, Any] = field(
        default_factory=dict, compare=False, repr=False, metadata={"read": False}
    )

    def changed(self, **members: object) -> "Row":
        """Return the row with other fields, checked as if they had been read."""
        return read({**self.record, **members})

    @property
    def dense(self) -> bool:
        """Tell the dense model itself from a pruned one."""
        return self.settings.values["compensation"] == "dense"

    @property
    def sparsity(self) -> float:
        """Fraction of units removed."""
        return float(self.settings.values["sparsity"])

    def setting(self, name: str) -> Any:
        """Return a setting or an option by name; None where the row has neither."""
        if name in self.settings.values:
            return self.settings.values[name]
        return self.settings.options.get(name)

    def measured(self, metric: str) -> float | None:
        """Return a metric, shares in % and memory in GiB; None where it was not measured.

        Seconds are those of pruning, the dense pass that cells share included.
        """
        phases = [self.seconds.get(name) or 0.0 for name in ("collecting", "pruning")]
        value, unit = {
            "perplexity": (self.perplexity.perplexity, 1), "zero_shot": (self.zero_shot.mean, 100),
            "kl": (self.perplexity.kl, 1), "agreement": (self.perplexity.agreement, 100),
            "seconds": (sum(phases) or None, 1), "memory": (self.peak_memory_bytes, 1 / 2**30),
        }[metric]  # fmt: skip
        return None if value is None else unit * value


def read(record: Any) -> Row:
    """Read a row from the object of its line; a null field counts as absent.

    Raises:
        ResultsError: a field is not what it must be; names it.
    """
    record = _with_new_names(record)
    row: Row = reader(Row)(record, "")
    return replace(row, record=record)


def _with_new_names(record: Any) -> Any:
    """Return a row with the names of today, where it was written under those of before."""
    if not isinstance(record, dict):
        return record
    names = {"rebuilding": "reconstruction"}
    record = {names.get(name, name): value for name, value in record.items()}
    if isinstance(settings := record.get("settings"), dict):
        record["settings"] = {RENAMED.get(name, name): v for name, v in settings.items()}
    return record


def write(row: Row) -> str:
    """Return the row as a line, with the fields that no attribute names."""
    return json.dumps(row.record, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class RowFile:
    """Content of a results.jsonl.

    Attributes:
        rows: in the file's order.
        size: bytes of its whole lines.
        torn: part of a line follows them.
        unended: the last of them lacks its newline.
    """

    rows: list[Row]
    size: int
    torn: bool
    unended: bool


def read_lines(path: Path) -> RowFile:
    """Read the rows of a results.jsonl; none where there is no such file.

    A last line without its newline is torn unless it is JSON: a part of an object never is.

    Raises:
        ResultsError: the file cannot be read, or a line is no row; names the line and the field.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise ResultsError(
            f"'{path}' cannot be read ({error.strerror or error}): make it readable"
        ) from None
    *lines, last = content.split(b"\n")
    torn = last != b"" and not _is_json(last)
    lines += [] if torn else [last]
    return RowFile(
        rows=[_line(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()],
        size=len(content) - (len(last) if torn else 0),
        torn=torn,
        unended=not torn and last != b"",
    )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _line(line: bytes, place: str) -> Row:
    try:
        return read(json.loads(line.decode()))
    except (ValueError, RecursionError) as error:
        reason = f" is not JSON ({error})"
    except ResultsError as error:
        reason = f": {error}"
    raise ResultsError(f"{place}{reason}: mend the line, or remove it and run the sweep again")
