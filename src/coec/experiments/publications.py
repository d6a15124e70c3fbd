"""Published numbers as data: `grids/published/NAME.toml`, or a user's own file."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from coec.errors import OptionError, ResultsError
from coec.experiments.records import reader

PUBLISHED = {
    path.stem: path
    for path in sorted((Path(__file__).parent / "grids" / "published").glob("*.toml"))
}
"""Files of published numbers that come with the package, by name."""
PrintedMetric = Literal["perplexity", "zero_shot"]


@dataclass(frozen=True)
class PublishedColumn:
    """Published numbers by the first label of a table's lines, for one metric or any."""

    head: str
    values: Mapping[str, float]
    metric: PrintedMetric | None = None


@dataclass(frozen=True)
class PublishedColumns:
    """Columns that stand beside those of a table.

    Attributes:
        note: below the table; may name `{which}` (`the same` or `other` models) and `{count}`.
        models: that the numbers are a mean over.
        title, alone: title and note of the columns in a table by themselves.
    """

    columns: tuple[PublishedColumn, ...]
    note: str
    models: tuple[str, ...] = ()
    title: str = ""
    alone: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """Numbers by selection and compensation, one for every model."""

    metric: PrintedMetric
    sparsity: float
    models: tuple[str, ...]
    values: Mapping[str, Mapping[str, tuple[float, ...]]]


@dataclass(frozen=True)
class PublishedCost:
    """Billions of parameters, GB of memory and GFLOPs per token; each before and after pruning."""

    parameters: tuple[float, ...]
    memory: tuple[float, ...]
    gflops: tuple[float, ...]


@dataclass(frozen=True)
class PublishedCosts:
    """Cost before and after pruning to one sparsity, by model."""

    sparsity: float
    models: Mapping[str, PublishedCost]


@dataclass(frozen=True)
class Publication:
    """Numbers of one publication.

    Attributes:
        name, short: its names in sentences (`the paper`) and in heads.
        protocol: the conditions of its numbers, sentence by sentence.
        prefixes, suffixes: parts of hub names of models that it does not print.
    """

    name: str
    short: str
    protocol: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    comparison: tuple[PublishedTable, ...] = ()
    efficiency: PublishedCosts | None = None
    columns: Mapping[str, PublishedColumns] = field(default_factory=dict)


def publication(content: Any, place: str) -> Publication:
    """Read the content of a file of published numbers.

    Raises:
        OptionError: it is something else, or lacks a number for a model; names the field.
    """
    try:
        numbers: Publication = reader(Publication)(content, "")
        for field_place, values, count in _lists(numbers):
            if len(values) != count:
                raise ResultsError(f"{field_place} must be {count} numbers, got {len(values)}")
        words = ("which", "count", "models", *numbers.protocol)
        for name, columns in numbers.columns.items():
            for text in (columns.note, columns.alone, *(c.head for c in columns.columns)):
                check_template(text, words, f"columns.{name}")
    except ResultsError as error:
        raise OptionError(f"{place}: {error}") from None
    return numbers


def _lists(numbers: Publication) -> Iterator[tuple[str, tuple[float, ...], int]]:
    """Yield the place of every list of numbers, the list, and its required length."""
    for index, table in enumerate(numbers.comparison):
        for selection, by_compensation in table.values.items():
            for compensation, values in by_compensation.items():
                place = f"comparison[{index}].values.{selection}.{compensation}"
                yield place, values, len(table.models)
    for model, cost in (numbers.efficiency.models if numbers.efficiency else {}).items():
        for name, values in vars(cost).items():
            yield f"efficiency.models.{model}.{name}", values, 2


def check_template(text: str, names: Sequence[str], place: str) -> None:
    """Raise ResultsError unless the text has only these names in braces, without formats."""
    try:
        fields = [field for field in Formatter().parse(text) if field[1] is not None]
    except ValueError as error:
        raise ResultsError(f"{place}: '{text}' is no template ({error})") from None
    for _, name, specification, conversion in fields:
        if (name or "") not in names or specification or conversion:
            braces = ", ".join(f"{{{name}}}" for name in names) or "nothing"
            raise ResultsError(f"{place}: '{text}' may have {braces} in braces")


def ready_published(name: str) -> Publication:
    """Read published numbers that come with the package."""
    text = PUBLISHED[name].read_text(encoding="utf-8")
    return publication(tomllib.loads(text), f"published numbers '{name}'")
