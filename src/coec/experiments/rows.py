"""results.jsonl: rows as values, with one reader and one writer, for the sweep and its report."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from coec.errors import ResultsError
from coec.experiments.records import (
    COUNT,
    FLAG,
    NUMBER,
    PERPLEXITY,
    SHARE,
    TEXT,
    Count,
    Flag,
    Kind,
    Named,
    Number,
    Part,
    Plain,
    Share,
    Text,
    plain,
    reader,
)
from coec.settings import OPTIONS, RECIPE

RESULTS = "results.jsonl"
NO_REASON = "no reason recorded"
"""Of a cell that failed without one."""

Status = Literal["done", "failed"]
Metric = Literal["perplexity", "zero_shot", "kl", "agreement", "seconds", "memory"]


SETTING_NAMES = tuple(setting.name for setting in (*RECIPE, *OPTIONS))


def _kinds(table: Any) -> dict[str, Kind]:
    """What the settings of a table are; the one place that asks `coec.settings`."""
    by_type: dict[Any, Kind] = {float: NUMBER, int: COUNT, bool: FLAG}
    known = [setting for setting in table if setting.kind is not None]
    return {setting.name: by_type.get(setting.kind, TEXT) for setting in known}


RECIPE_KINDS = _kinds(RECIPE) | {"sparsity": SHARE}
OPTION_KINDS = _kinds(OPTIONS)


@dataclass(frozen=True)
class Settings:
    """What was asked for, defaults included; null is a value here, and tells from another.

    Attributes:
        values: by name, in the order in which the recipe records them; the dense model's own row
            has sparsity 0 and compensation `dense`.
        options: of the compensation.
    """

    values: Annotated[
        Mapping[str, Plain | None],
        Named(RECIPE_KINDS, required=("sparsity", "compensation")),
    ] = field(metadata={"others": True})
    options: Annotated[Mapping[str, Plain | None], Named(OPTION_KINDS)] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Perplexity(Part):
    """How well the text was predicted, how near to the dense model, and which text, cut how."""

    perplexity: Annotated[float, PERPLEXITY] | None = None
    text: Text | None = None
    text_sha256: Text | None = None
    windows: Count | None = None
    seq_len: Count | None = None
    kl: Number | None = None
    agreement: Share | None = None


@dataclass(frozen=True)
class Task(Part):
    """One zero-shot task: the accuracy, its standard error, and what guessing scores."""

    value: Number | None = None
    stderr: Number | None = None
    chance: Number | None = None
    items: Count | None = None
    metric: Text | None = None


@dataclass(frozen=True)
class ZeroShot(Part):
    """Zero-shot accuracy: the mean over tasks, and every task by its name."""

    mean: Number | None = None
    mean_stderr: Number | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)
    at_chance: tuple[Text, ...] = ()


@dataclass(frozen=True)
class Parameters(Part):
    """How many the model had, and has."""

    before: Count | None = None
    after: Count | None = None


@dataclass(frozen=True)
class Cost(Part):
    """What the weights take, and the most that evaluating the model took."""

    weight_bytes: Count | None = None
    peak_memory_bytes: Count | None = None


@dataclass(frozen=True)
class Geometry(Part):
    """Mean principal angles between read frames in degrees, and the frames' discrepancy.

    O is the original on the kept units, P the pruned weight, C the repaired one.
    """

    angle_op: Number | None = None
    angle_oc: Number | None = None
    angle_pc: Number | None = None
    discrepancy: Number | None = None


@dataclass(frozen=True)
class SiteReconstruction(Part):
    """Errors of a part's hidden states before and after it was fitted, on both kinds of windows."""

    error_before: Number | None = None
    error_after: Number | None = None
    holdout_before: Number | None = None
    holdout_after: Number | None = None


@dataclass(frozen=True)
class Candidate(Part):
    """One of several models that were made: how well it predicts the windows that chose."""

    perplexity: Number | None = None
    kl: Number | None = None
    dense: Number | None = None
    windows: Text | None = None


@dataclass(frozen=True)
class ModelReconstruction(Part):
    """Which model was chosen, by its KV groups, and among which."""

    kv_groups: Text | None = None
    candidates: Mapping[str, Candidate] = field(default_factory=dict)


@dataclass(frozen=True)
class Site(Part):
    """One module that was repaired: its errors, rounds and what happened on the way."""

    site: Text
    block: Count
    module: Text | None = None
    error_before: Number | None = None
    error_after: Number | None = None
    holdout_before: Number | None = None
    holdout_after: Number | None = None
    chosen: Text | None = None
    candidates: Mapping[str, Number] = field(default_factory=dict)
    reconstruction: SiteReconstruction = SiteReconstruction()
    errors_per_round: tuple[Number, ...] = ()
    objectives_per_round: tuple[Number, ...] = ()
    gcv_lambda: Number | None = None
    rounds: Count | None = None
    reason: Text | None = None
    events: tuple[Text, ...] = ()
    seconds: Number | None = None
    geometry: Geometry = Geometry()


@dataclass(frozen=True)
class Overlap(Part):
    """Evaluation windows that repeat n-grams of the calibration text."""

    n: Count | None = None
    windows: Count | None = None
    shared: Count | None = None
    share: Share | None = None
    flagged: Flag | None = None


@dataclass(frozen=True)
class Calibration(Part):
    """The text that was read, and the windows drawn from it."""

    source: Text | None = None
    text_sha256: Text | None = None
    windows_sha256: Text | None = None
    windows: Count | None = None
    seq_len: Count | None = None


@dataclass(frozen=True)
class Row:
    """One cell of a sweep: the settings, and what was measured under them.

    Attributes:
        cell: digest of the settings.
        model: a label that no other model has.
        status: `failed` comes with an error of one line and without measurements.
        grids: the grids that the cell belongs to.
        labels: what a grid calls the cell, where it names its rows.
        path: where the dense model lay.
        seconds: by phase.
        identity: digests of the contents of model and texts.
        record: the object that was read, with what no field above names.
    """

    cell: Text
    status: Status
    model: Text
    settings: Settings
    grids: tuple[Text, ...]
    labels: Mapping[str, Text]
    path: Text | None = None
    error: Text | None = None
    perplexity: Perplexity = Perplexity()
    zero_shot: ZeroShot = ZeroShot()
    parameters: Parameters = Parameters()
    cost: Cost = Cost()
    sites: tuple[Site, ...] = ()
    reconstruction: ModelReconstruction = ModelReconstruction()
    overlap: Overlap = Overlap()
    calibration: Calibration = Calibration()
    seconds: Mapping[str, Number] = field(default_factory=dict)
    peak_memory_bytes: Count | None = None
    environment: Mapping[str, Text] = field(default_factory=dict)
    identity: Mapping[str, Text | None] = field(default_factory=dict)
    record: Mapping[str, Any] = field(
        default_factory=dict, compare=False, repr=False, metadata={"own": False}
    )

    @property
    def dense(self) -> bool:
        """Whether this is the dense model itself."""
        return self.settings.values["compensation"] == "dense"

    @property
    def sparsity(self) -> float:
        """Fraction of units removed."""
        return float(self.settings.values["sparsity"] or 0)

    def setting(self, name: str) -> Any:
        """A setting or an option of the compensation by name; None where the row has neither."""
        if name in self.settings.values:
            return self.settings.values[name]
        return self.settings.options.get(name)

    def measured(self, metric: str) -> float | None:
        """A metric, shares in % and memory in GiB; None where it was not measured.

        Seconds are those of pruning, the dense pass that cells share included.
        """
        p, parts = self.perplexity, [self.seconds.get(n) for n in ("collecting", "pruning")]
        taken = sum(part for part in parts if part is not None) if any(parts) else None
        value, unit = {
            "perplexity": (p.perplexity, 1), "zero_shot": (self.zero_shot.mean, 100),
            "kl": (p.kl, 1), "agreement": (p.agreement, 100), "seconds": (taken, 1),
            "memory": (self.peak_memory_bytes, 1 / 2**30),
        }[metric]  # fmt: skip
        return None if value is None else unit * value


def read(record: Any) -> Row:
    """A row from what its line says; a field that is null is one that is not there.

    Raises:
        ResultsError: a field is not what it must be; names it.
    """
    row: Row = reader(Row)(record, "")
    return replace(row, record=record)


def write(row: Row) -> str:
    """The row as a line; a field that is as it was read stays so, with what nobody reads of it."""
    before, now = plain(read(row.record)) if row.record else {}, plain(row)
    kept = {name: value for name, value in row.record.items() if before.get(name) == now.get(name)}
    changed = {name: value for name, value in now.items() if name not in kept}
    return json.dumps(kept | changed, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Lines:
    """The content of a results.jsonl.

    Attributes:
        rows: in the file's order.
        whole: how many bytes are whole lines.
        torn: whether part of a line follows them.
        unended: whether the last of them lacks its newline.
    """

    rows: list[Row]
    whole: int
    torn: bool
    unended: bool


def read_lines(path: Path) -> Lines:
    """The rows of a results.jsonl; none where there is no such file.

    A last line without its newline is torn unless it is JSON: no part of an object is.

    Raises:
        ResultsError: the file cannot be read, or a line is no row; names the line and the field.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise ResultsError(
            f"'{path}' cannot be read ({error.strerror or error}): make it readable"
        ) from None
    lines = content.split(b"\n")
    torn = lines[-1] != b"" and not _is_json(lines[-1])
    kept = lines[:-1] if torn else lines
    return Lines(
        rows=[_line(line, f"{path}, line {n}") for n, line in enumerate(kept, 1) if line.strip()],
        whole=len(content) - (len(lines[-1]) if torn else 0),
        torn=torn,
        unended=not torn and lines[-1] != b"",
    )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _line(line: bytes, where: str) -> Row:
    try:
        return read(json.loads(line.decode()))
    except (ValueError, RecursionError) as error:
        why = f" is not JSON ({error})"
    except ResultsError as error:
        why = f": {error}"
    raise ResultsError(f"{where}{why}: mend the line, or remove it and run the sweep again")
