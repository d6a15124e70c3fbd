"""Rows of results.jsonl as values, checked when they are read."""

import re
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from coec.errors import ResultsError, did_you_mean
from coec.settings import OPTIONS, RECIPE

NO_REASON = "no reason recorded"
"""Reason of a cell that failed without one."""
CONTROL = re.compile("[\x00-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that UTF-8, the drawings of a page or a line cannot hold."""
RECOVER = "recover"
"""Key of the tokens that a cell's pruned model is trained on before it is measured."""
SETTING_NAMES = (*(setting.name for setting in (*RECIPE, *OPTIONS)), RECOVER)
_Value = TypeVar("_Value")


def plain(value: Any) -> Any:
    """Return a number, text or truth value that JSON and a page can hold; else ValueError."""
    if isinstance(value, str) and CONTROL.search(value):
        raise ValueError("must be text without control characters")
    if isinstance(value, int | float) and not abs(value) <= 1e300:
        raise ValueError("must be a finite number")  # sums of larger ones overflow
    if not isinstance(value, str | int | float):
        raise ValueError("must be a number, text, true or false")
    return value


Text = Annotated[str, AfterValidator(plain)]
Number = Annotated[float, AfterValidator(plain)]
Count = Annotated[int, Field(ge=0, lt=2**64)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Plain = Annotated[Any, AfterValidator(plain)]
Absent = BeforeValidator(lambda value: _without_nulls(value))
"""Of an object with free names: a null member counts as absent."""


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if item is not None}
    return value


class Record(BaseModel):
    """JSON object whose values are not converted; a null field counts as absent."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _present(cls, value: Any) -> Any:
        return _without_nulls(value)


def read_as(cls: type[_Value], value: Any) -> _Value:
    """Read a model or dataclass of pydantic from JSON or TOML.

    Raises:
        ResultsError: names the first field that is wrong, what it must be and what it is.
    """
    model: Any = cls
    try:
        return model.__pydantic_validator__.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    # Place as `sites[1].rounds`; pydantic says `sites.1.rounds` and words of its own.
    names = (str(p).encode("unicode_escape").decode() for p in first["loc"])
    path = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(names))
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(path, model.__pydantic_fields__)
        raise ResultsError(f"unknown key '{path}'{hint}")
    reason = first["msg"].replace("Input should", "must").replace("Value error, ", "")
    content = first["input"]
    if first["type"] == "missing":
        reason, content = "is missing", list(content)
    raise ResultsError(f"{path or model.__name__} {reason}, got {shortened(content)}")


class RowSettings(BaseModel):
    """Settings of a cell, defaults included, also those of other versions; null is a value here.

    The dense model's own row has sparsity 0 and compensation `dense`.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")
    __pydantic_extra__: dict[Text, Plain | None] = Field(init=False)

    sparsity: Fraction
    compensation: Text
    options: dict[Text, Plain | None] | None = None


class PerplexityOfRow(Record):
    """Perplexity, the distance from the dense model's predictions, and the text."""

    perplexity: Annotated[Number, Field(gt=0.999)] | None = None
    """The exponential of a cross-entropy, of which 0 may be rounded to a little less."""
    text: Text | None = None
    text_sha256: Text | None = None
    windows: Count | None = None
    seq_len: Count | None = None
    kl: Number | None = None
    agreement: Fraction | None = None


class TaskOfRow(Record):
    """Accuracy on one zero-shot task, and its standard error."""

    value: Number | None = None
    stderr: Number | None = None


class ZeroShotOfRow(Record):
    """Zero-shot accuracy: the mean over tasks, and every task."""

    mean: Number | None = None
    tasks: Annotated[dict[Text, TaskOfRow], Absent] = {}


class ParametersOfRow(Record):
    """Numbers of parameters."""

    before: Count | None = None
    after: Count | None = None


class CostOfRow(Record):
    """Size of the weights, and the peak memory of evaluating the model."""

    weight_bytes: Count | None = None
    peak_memory_bytes: Count | None = None


class AnglesOfRow(Record):
    """Mean principal angles between read frames in degrees.

    O is the original on the kept units, P the pruned weight, C the compensated one.
    """

    angle_op: Number | None = None
    angle_oc: Number | None = None
    angle_pc: Number | None = None


class Module(Record):
    """Errors and rounds of one compensated module, and the safeguards that fired."""

    error_after: Number | None = None
    holdout_after: Number | None = None
    gcv_lambda: Number | None = None
    rounds: Count | None = None
    events: list[Text] = []
    geometry: AnglesOfRow = AnglesOfRow()


class CalibrationOfRow(Record):
    """Calibration text, and the windows drawn from it."""

    text_sha256: Text | None = None
    windows_sha256: Text | None = None
    windows: Count | None = None


class Row(Record):
    """Cell of a sweep: its settings, and what was measured under them.

    Attributes:
        cell: digest of the settings.
        model: a label that no other model has.
        status: `failed` comes with an error of one line and without measurements.
        grids: the grids that the cell belongs to.
        labels: the cell's name by grid, where a grid names its rows.
        seconds: by phase.
        identity: digests of the contents of model and texts.
    """

    cell: Text
    status: Literal["done", "failed"]
    model: Text
    settings: RowSettings
    grids: list[Text]
    labels: Annotated[dict[Text, Text], Absent]
    error: Text | None = None
    perplexity: PerplexityOfRow = PerplexityOfRow()
    zero_shot: ZeroShotOfRow = ZeroShotOfRow()
    parameters: ParametersOfRow = ParametersOfRow()
    cost: CostOfRow = CostOfRow()
    sites: list[Module] = []
    calibration: CalibrationOfRow = CalibrationOfRow()
    seconds: Annotated[dict[Text, Number], Absent] = {}
    peak_memory_bytes: Count | None = None
    environment: Annotated[dict[Text, Text], Absent] = {}
    identity: dict[Text, Text | None] = {}
    _record: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """The object that was read, with fields that no attribute names."""
        return self._record

    def changed(self, **members: object) -> "Row":
        """Return the row with other fields, checked as if they had been read."""
        return read({**self._record, **members})

    @property
    def dense(self) -> bool:
        """Tell the dense model itself from a pruned one."""
        return bool(self.settings.compensation == "dense")

    @property
    def values(self) -> dict[str, Any]:
        """Settings and options by name."""
        settings: dict[str, Any] = self.settings.model_dump(exclude_unset=True)
        return settings | (settings.pop("options", None) or {})


def read(record: Any) -> Row:
    """Read a row from the object of its line.

    Raises:
        ResultsError: a field is not what it must be; names it.
    """
    row = read_as(Row, record)
    row._record = record
    return row
