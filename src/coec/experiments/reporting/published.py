"""Published numbers beside ours: `grids/published/NAME.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coec.errors import OptionError
from coec.experiments.reporting.frame import PUBLISHED_METRICS, Results

PUBLISHED = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "grids" / "published").glob("*.toml"))
}
"""Files of published numbers, by name."""


def with_published(results: Results, name: str) -> Results:
    """Add numbers of the same model, sparsity, selection and compensation, and their protocol.

    Raises:
        OptionError: no numbers have that name.
    """
    if name not in PUBLISHED:
        raise OptionError(f"no published numbers '{name}': there is {', '.join(PUBLISHED)}")
    content = tomllib.loads(PUBLISHED[name].read_text(encoding="utf-8"))
    numbers = {
        (table["metric"], table["sparsity"], selection, compensation, _model(model, content)): value
        for table in content["comparison"]
        for selection, repairs in table["values"].items()
        for compensation, values in repairs.items()
        for model, value in zip(table["models"], values)
    }
    names = results.cells["model"].map(lambda model: _model(model, content))
    sparsities = results.cells["sparsity"].astype(float).round(4)
    selections, compensations = results.cells["selection"], results.cells["compensation"]
    places = list(zip(sparsities, selections, compensations, names))
    columns = {
        metric: [numbers.get((metric.removeprefix("published_"), *place)) for place in places]
        for metric in PUBLISHED_METRICS
    }
    cells = results.cells.assign(**columns).astype(dict.fromkeys(columns, float))
    protocol = " ".join(
        f"{use.replace('_', '-')}: {text}." for use, text in content["protocol"].items()
    )
    note = f"Numbers of {content['name']}: {protocol} Their sizes do not compare with ours."
    return replace(results, cells=cells, notes=(*results.notes, note))


def _model(name: str, content: Mapping[str, Any]) -> str:
    """Return a model's name without owner, case, and parts that the publication does not print."""
    name = name.rstrip("/").rpartition("/")[2].lower()
    for prefix in content["prefixes"]:
        name = name.removeprefix(prefix)
    for suffix in content["suffixes"]:
        name = name.removesuffix(suffix)
    return name
