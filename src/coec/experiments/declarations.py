"""Declarations of a grid's report: the `[[report]]` tables of its file (docs/EXPERIMENTS.md).

A sweep writes the declarations of its grids beside the rows, so that the report needs nothing else.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, ConfigDict, model_validator

from coec.errors import OptionError, ResultsError
from coec.experiments.files import write_whole
from coec.experiments.rows import SETTING_NAMES, Plain, Record, Text, did_you_mean, read_as

DECLARATIONS = "grids.json"
READY_GRIDS = {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}
"""Grids that come with the package, by name."""


class Quantity(NamedTuple):
    """Name of a quantity, its decimals, which direction is better, and whose it is."""

    title: str
    digits: int
    better: Literal["lower", "higher", ""] = ""
    of: Literal["cells", "modules", "rounds", "published"] = "cells"


QUANTITIES: Mapping[str, Quantity] = {
    "perplexity": Quantity("Perplexity", 2, "lower"),
    "zero_shot": Quantity("Zero-shot accuracy, %", 1, "higher"),
    "kl": Quantity("KL from the dense model, nats", 3, "lower"),
    "agreement": Quantity("Same top token as the dense model, %", 1, "higher"),
    "seconds": Quantity("Seconds to prune", 0, "lower"),
    "memory": Quantity("Peak memory, GiB", 2, "lower"),
    "error_before": Quantity("Slice", 4, "", "modules"),
    "error_after": Quantity("Fit", 4, "", "modules"),
    "holdout_before": Quantity("Slice, held out", 4, "", "modules"),
    "holdout_after": Quantity("Held out", 4, "lower", "modules"),
    "angle_op": Quantity("O–P, degrees", 1, "", "modules"),
    "angle_oc": Quantity("O–C, degrees", 1, "", "modules"),
    "angle_pc": Quantity("P–C, degrees", 1, "", "modules"),
    "gcv_lambda": Quantity("λ of cross-validation", 2, "", "modules"),
    "capped": Quantity("Modules at the cap, %", 0, "", "modules"),
    "published_perplexity": Quantity("Perplexity, published", 2, "", "published"),
    "published_zero_shot": Quantity("Zero-shot, published, %", 1, "", "published"),
    "error": Quantity("Error / slice's", 4, "lower", "rounds"),
}
"""Quantities of cells, and of modules and their rounds, whose mean a table shows."""


def _one_of(names: Mapping[str, Any] | frozenset[str], meaning: str) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be {meaning}{did_you_mean(name, names)}")
        return name

    return AfterValidator(check)


_AXES = frozenset({*SETTING_NAMES, "model", "label", "site", "value"})
Axis = Annotated[str, _one_of(_AXES, "a setting, model, label, site or value")]
Along = Annotated[str, _one_of(_AXES | {"parameters", "block", "round"}, "a setting, parameters, "
                               "block or round")]  # fmt: skip
Filter = dict[Annotated[str, _one_of(_AXES, "a setting, model or label")], list[Plain]]
"""Values by axis; a cell passes if it has one of the values of each."""


class Declaration(Record):
    """A table or a figure of cells: one `[[report]]`. docs/EXPERIMENTS.md explains the keys."""

    model_config = ConfigDict(extra="forbid")

    section: Text
    table: Text = ""
    figure: Text = ""
    where: Filter = {}
    each: list[Axis] = []
    rows: list[Axis] = []
    columns: list[Axis] = []
    x: Along = "sparsity"
    y_log: bool = False
    values: list[Annotated[str, _one_of(QUANTITIES, f"one of {', '.join(QUANTITIES)}")]] = [
        "perplexity",
        "zero_shot",
    ]
    best: Text = ""
    extra: dict[Text, Literal["mean", "median", "spread", "wins"]] = {}
    reference: Filter = {}
    dense: bool = False
    text: Text = ""
    notes: list[Text] = []

    @property
    def title(self) -> str:
        """Title of the table or figure, with the names of `each` in braces."""
        return self.table or self.figure

    @model_validator(mode="after")
    def _fits(self) -> Self:
        axes = [*self.each, *self.rows, *self.columns]
        conditions = {
            "must have one title: table or figure": bool(self.table) != bool(self.figure),
            "must have rows and columns": bool(self.figure or (self.rows and self.columns)),
            "must have x, the setting along it": bool(self.table) or "x" in self.model_fields_set,
            "must have values": bool(self.values),
            "must name an axis once": len({*axes}) == len(axes),
            f"must have best = 'row', 'column' or one of {self.rows}":
                self.best in ("", "row", "column", *self.rows),
        }  # fmt: skip
        for words, holds in conditions.items():
            if not holds:
                raise ValueError(words)
        names = [*self.each, *(["metric"] if self.table and "value" not in self.columns else [])]
        try:
            self.title.format_map(dict.fromkeys(names, ""))
        except (KeyError, ValueError, IndexError, AttributeError):
            braces = ", ".join(f"{{{name}}}" for name in names) or "nothing"
            raise ValueError(f"must have {braces} in the braces of '{self.title}'") from None
        return self


class Declared(Record):
    """Declarations of grids by name, as tables were written."""

    grids: dict[Text, Any] = {}

    def items(self, grid: str) -> tuple[Declaration, ...]:
        """Read the declarations of one grid, here or of a ready one; OptionError as `items`."""
        if grid not in self.grids and grid in READY_GRIDS:
            content = tomllib.loads(READY_GRIDS[grid].read_text(encoding="utf-8"))
            return items(content.get("report", []), f"grid '{grid}'")
        return items(self.grids.get(grid, []), f"grid '{grid}'")


def items(content: Any, place: str) -> tuple[Declaration, ...]:
    """Read the `[[report]]` list of a grid.

    Raises:
        OptionError: an unknown key, a value of another kind, or a name that nothing has.
    """
    if not isinstance(content, list):
        raise OptionError(f"{place}: report must be a list of tables: write [[report]]")
    declarations = []
    for index, table in enumerate(content, 1):
        try:
            declarations.append(read_as(Declaration, table))
        except ResultsError as error:
            raise OptionError(f"{place}, [[report]] {index}: {error}") from None
    return tuple(declarations)


def read_declarations(folder: Path) -> Declared:
    """Read what a sweep declared beside its rows; nothing where it did not.

    Raises:
        ResultsError: the file says something else.
    """
    path = folder / DECLARATIONS
    if not path.is_file():
        return Declared()
    try:
        declared = read_as(Declared, json.loads(path.read_bytes().decode()))
        for name in declared.grids:
            declared.items(name)
    except (OSError, ValueError, RecursionError, ResultsError, OptionError) as error:
        reason = " ".join(str(error).split())
        raise ResultsError(
            f"{path} does not say what the grids declare ({reason}): remove it and run the sweep "
            "again, which writes it"
        ) from None
    return declared


def write_declarations(folder: Path, new: Declared) -> None:
    """Add declarations to those that the folder has; a grid's new one wins. By one rename."""
    old = read_declarations(folder)
    merged = Declared(grids={**old.grids, **new.grids})
    if merged != old:
        text = json.dumps(merged.grids, ensure_ascii=False, allow_nan=False, indent=1)
        write_whole(folder / DECLARATIONS, f'{{"grids": {text}}}'.encode())
