"""Published numbers as data: `grids/published/NAME.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from coec.experiments.records import reader

PUBLISHED = {
    path.stem: path
    for path in sorted((Path(__file__).parent / "grids" / "published").glob("*.toml"))
}
"""Files of published numbers, by name."""
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


@cache
def publication(name: str) -> Publication:
    """Read published numbers by the name of their file."""
    content = tomllib.loads(PUBLISHED[name].read_text(encoding="utf-8"))
    numbers: Publication = reader(Publication)(content, name)
    return numbers
