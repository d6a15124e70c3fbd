"""Published numbers beside ours: `grids/published/NAME.toml`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from coec.errors import OptionError

_FILES = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "grids" / "published").glob("*.toml"))
}


def read_published(name: str) -> dict[str, Any]:
    """Return the numbers of a publication, the grid that they belong to, and their protocol.

    Raises:
        OptionError: no numbers have that name.
    """
    if name not in _FILES:
        raise OptionError(f"no published numbers '{name}': there is {', '.join(_FILES)}")
    return tomllib.loads(_FILES[name].read_text(encoding="utf-8"))


def with_published(cells: DataFrame, published: Mapping[str, Any]) -> DataFrame:
    """Add the numbers of the same model, sparsity, selection and compensation, where there are."""
    # Tables of the publication → numbers by place → a column beside ours
    numbers: dict[str, dict[tuple[Any, ...], float]] = {"perplexity": {}, "zero_shot": {}}
    for table in published["comparison"]:
        for selection, repairs in table["values"].items():
            for compensation, values in repairs.items():
                for model, value in zip(table["models"], values):
                    place = _model(model, published), table["sparsity"], selection, compensation
                    numbers[table["metric"]][place] = value
    places = [
        (_model(model, published), round(sparsity, 4), selection, compensation)
        for model, sparsity, selection, compensation in cells[
            ["model", "sparsity", "selection", "compensation"]
        ].itertuples(index=False)
    ]
    columns = {
        f"published_{metric}": Series([values.get(p) for p in places], cells.index, dtype=float)
        for metric, values in numbers.items()
    }
    return cells.assign(**columns)


def protocol(published: Mapping[str, Any]) -> str:
    """Say how the numbers were measured."""
    uses = (f"{use.replace('_', '-')}: {text}" for use, text in published["protocol"].items())
    return (
        f"Numbers of {published['name']}: {'; '.join(uses)}. Their sizes do not compare with ours."
    )


def _model(name: str, published: Mapping[str, Any]) -> str:
    """Return a model's name without owner, case, and parts that the publication does not print."""
    name = name.rstrip("/").rpartition("/")[2].lower()
    for prefix in published["prefixes"]:
        name = name.removeprefix(prefix)
    for suffix in published["suffixes"]:
        name = name.removesuffix(suffix)
    return name
