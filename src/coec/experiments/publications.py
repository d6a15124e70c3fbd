"""Numbers that others have printed, as data: `grids/published/NAME.toml`, or a user's own file."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from coec.errors import OptionError, ResultsError
from coec.experiments.records import Number, Text, reader

PUBLISHED = {
    path.stem: path
    for path in sorted((Path(__file__).parent / "grids" / "published").glob("*.toml"))
}
"""Numbers that others have printed, by name."""


PrintedMetric = Literal["perplexity", "zero_shot"]
"""What they printed."""


@dataclass(frozen=True)
class Column:
    """Publication numbers by the first label of a table's lines, for one metric or any."""

    head: Text
    values: Mapping[str, Number]
    metric: PrintedMetric | None = None


@dataclass(frozen=True)
class Printed:
    """Columns that a table of ours may have beside its own.

    Attributes:
        note: below the table; may name `{which}` (`the same` or `other` models) and `{count}`.
        models: that the numbers are a mean over.
        title: of the columns by themselves.
    """

    columns: tuple[Column, ...]
    note: Text
    models: tuple[Text, ...] = ()
    title: Text = ""
    alone: Text = ""


@dataclass(frozen=True)
class Block:
    """One printed table: by selection and compensation, a number per model."""

    metric: PrintedMetric
    sparsity: Number
    models: tuple[Text, ...]
    values: Mapping[str, Mapping[str, tuple[Number, ...]]]


@dataclass(frozen=True)
class Size:
    """Billions of parameters, GB of memory and GFLOPs per token; each before and after pruning."""

    parameters: tuple[Number, ...]
    memory: tuple[Number, ...]
    gflops: tuple[Number, ...]


@dataclass(frozen=True)
class Sizes:
    """Cost before and after pruning to one sparsity, by model."""

    sparsity: Number
    models: Mapping[str, Size]


@dataclass(frozen=True)
class Publication:
    """What somebody has printed.

    Attributes:
        name: what it is called in sentences (`the paper`), and in heads.
        protocol: what its numbers were measured under, sentence by sentence.
        prefixes, suffixes: that hub names of models carry and it does not print.
    """

    name: Text
    short: Text
    protocol: Mapping[str, Text] = field(default_factory=dict)
    prefixes: tuple[Text, ...] = ()
    suffixes: tuple[Text, ...] = ()
    comparison: tuple[Block, ...] = ()
    efficiency: Sizes | None = None
    columns: Mapping[str, Printed] = field(default_factory=dict)


def publication(content: Any, where: str) -> Publication:
    """A file of published numbers.

    Raises:
        OptionError: it holds something else, or not a number for every model; names the field.
    """
    try:
        found: Publication = reader(Publication)(content, "")
        for place, values, count in _counted(found):
            if len(values) != count:
                raise ResultsError(f"{place} must be {count} numbers, got {len(values)}")
        for name, part in found.columns.items():
            words = ("which", "count", "models", *found.protocol)
            for text in (part.note, part.alone, *(column.head for column in part.columns)):
                check_template(text, words, f"columns.{name}")
    except ResultsError as error:
        raise OptionError(f"{where}: {error}") from None
    return found


def _counted(found: Publication) -> Iterator[tuple[str, tuple[float, ...], int]]:
    """Every list of numbers, where it stands, and how many it must be."""
    for index, block in enumerate(found.comparison):
        for selection, by_repair in block.values.items():
            for pruning, values in by_repair.items():
                place = f"comparison[{index}].values.{selection}.{pruning}"
                yield place, values, len(block.models)
    for model, size in (found.efficiency.models if found.efficiency else {}).items():
        for name, values in vars(size).items():
            yield f"efficiency.models.{model}.{name}", values, 2


def check_template(text: str, known: Sequence[str], place: str) -> None:
    """Raises ResultsError unless only these names stand between braces, as they are."""
    try:
        parts = [part for part in Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ResultsError(f"{place}: '{text}' is no template ({error})") from None
    for _, name, specification, conversion in parts:
        if (name or "") not in known or specification or conversion:
            braces = ", ".join(f"{{{one}}}" for one in known) or "nothing"
            raise ResultsError(f"{place}: '{text}' may have {braces} in braces")


def ready_published(name: str) -> Publication:
    """Those that come with the package."""
    text = PUBLISHED[name].read_text(encoding="utf-8")
    return publication(tomllib.loads(text), f"published numbers '{name}'")
