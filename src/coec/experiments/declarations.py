"""Declarations of a grid's report: the `[[report]]` tables of its file (docs/EXPERIMENTS.md).

A sweep writes the declarations of its grids beside the rows, so that the report needs nothing else.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, get_args

from coec.errors import OptionError, ResultsError
from coec.experiments.files import write_whole
from coec.experiments.records import PLAIN, reader
from coec.experiments.rows import SETTING_NAMES, Metric

DECLARATIONS = "grids.json"
READY_GRIDS = {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}
"""Grids that come with the package, by name."""

Drawing = Literal[
    "pivot", "pairs", "spreads", "best", "cells", "failures", "overlaps", "varied", "settings",
    "texts", "events", "tasks", "cost", "geometry", "beside", "costs beside", "alone", "lines",
    "bars", "blocks", "rounds",
]  # fmt: skip
Quantity = Literal[
    "perplexity", "zero_shot", "kl", "agreement", "seconds", "memory", "capped", "error_before",
    "error_after", "holdout_before", "holdout_after", "angle_op", "angle_oc", "angle_pc",
]  # fmt: skip
Extra = Literal["mean", "median", "spread", "reference", "gap", "gcv_lambda"]
Role = Literal[
    "ink", "muted", "grid", "faint", "mean", "none", "bias", "least-squares", "rcpu", "coec",
    "other",
]  # fmt: skip
"""Curves and other elements of a figure that have a colour of their own."""

Plain = Annotated[Any, PLAIN]
Filter = Mapping[str, tuple[Plain, ...]]
"""Values of settings; a row passes if it has one of the values of each."""
METRICS = frozenset(get_args(Metric))
_SETTINGS = frozenset(SETTING_NAMES)
_LINES = _SETTINGS | {"model", "label", "method", "repair"}
AXES: Mapping[str, frozenset[str]] = {
    "each": _LINES | {"part", "site"}, "rows": _LINES | {"others"}, "lines": _LINES,
    "columns": _SETTINGS | {"model", "value"}, "sort": _SETTINGS | {"model", "label"},
    "where": _SETTINGS, "prefer": _SETTINGS, "reference": _SETTINGS, "varies": _SETTINGS,
    "x": _SETTINGS | {"parameters"},
}  # fmt: skip
"""Axes that a key may name. `repair` is a compensation with the settings that tell it from others,
after its selection where there are several; `method` always has the selection. `others` are columns
for the settings that tell lines apart."""


@dataclass(frozen=True)
class Series:
    """Named line of a figure; without a label it is a line for every repair."""

    label: str = ""
    only: Filter = field(default_factory=dict, metadata={"key": "where"})
    value: Quantity | None = None
    role: Role = "ink"
    line: Literal["-", "--", ":", "-."] = "-"
    marker: Literal["", "o", "s", "D", "^"] = "o"
    level: bool = False


@dataclass(frozen=True)
class Declaration:
    """A table, a figure, or a section that is about one grid's cells alone: one `[[report]]`.

    docs/EXPERIMENTS.md says what every key means; `only`, `groups` and `beside` are the keys
    `where`, `parts` and `part`.
    """

    section: str
    table: str = ""
    figure: str = ""
    draw: Drawing | None = None
    each: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    head: str = ""
    values: tuple[Quantity, ...] = ("perplexity", "zero_shot")
    only: Filter = field(default_factory=dict, metadata={"key": "where"})
    reference: Filter = field(default_factory=dict)
    prefer: Filter = field(default_factory=dict)
    having: Quantity | None = None
    varies: str = ""
    sort: tuple[str, ...] = ("sparsity", "selection", "compensation")
    best: Literal["row", "column"] | None = None
    dense: bool = False
    single: bool = False
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata={"key": "parts"})
    extra: Mapping[str, Extra] = field(default_factory=dict)
    ours: str = ""
    native: Mapping[str, str] = field(default_factory=dict)
    x: str = ""
    x_label: str = ""
    y_log: bool = False
    lines: str = "repair"
    series: tuple[Series, ...] = ()
    text: str = ""
    notes: tuple[str, ...] = ()
    published: str = ""
    beside: str = field(default="", metadata={"key": "part"})

    @property
    def drawing(self) -> Drawing | None:
        """Way of drawing; None for a mere section, which claims that section for its grid."""
        return self.draw or ("pivot" if self.table else "lines" if self.figure else None)


@dataclass(frozen=True)
class Declared:
    """Declarations of grids by name, as tables were written."""

    grids: Mapping[str, Any] = field(default_factory=dict)

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
            declarations.append(_item(table))
        except ResultsError as error:
            raise OptionError(f"{place}, [[report]] {index}: {error}") from None
    return tuple(declarations)


def _item(table: Any) -> Declaration:
    _check_keys(table, Declaration)
    series = table.get("series") if isinstance(table, dict) else None
    for line in series if isinstance(series, list) else ():
        _check_keys(line, Series)
    item: Declaration = reader(Declaration)(table, "")
    for key, axes in AXES.items():
        value = table.get(key) or ()
        for name in [value] if isinstance(value, str) else value:
            _check_name(name, axes, f"{key}: no axis is called")
    for name in (name for line in item.series for name in line.only):
        _check_name(name, _SETTINGS, "series: no setting is called")
    _check_template(item.head, item.columns, "head")
    _check_template(item.table or item.figure, _title_names(item), "the title")
    for note in item.notes if item.draw == "blocks" else ():
        _check_template(note, ("selection", "compensation", "sparsity"), "notes")
    for broken, reason in _rules(item):
        if broken:
            raise ResultsError(reason)
    return item


def _title_names(item: Declaration) -> tuple[str, ...]:
    """Return the names that a title may have in braces."""
    metric = ("metric",) if _of_metrics(item) else ()
    return {
        "pivot": (*item.each, *metric), "spreads": ("count", *metric), "tasks": ("model",),
        "beside": ("published",),
    }.get(item.drawing or "", ())  # fmt: skip


def _of_metrics(item: Declaration) -> bool:
    return "value" not in item.columns and {*item.values} <= METRICS


def _rules(item: Declaration) -> Iterable[tuple[bool, str]]:
    """Yield conditions that must not hold, each with its message."""
    drawing, pivot, lines = item.drawing, item.drawing == "pivot", item.drawing == "lines"
    of_modules = all(line.value and line.value not in METRICS for line in item.series)
    return (
        (bool(item.table and item.figure), "it is a table or a figure: give one of the two titles"),
        (drawing is not None and not (item.table or item.figure), "add a title: table or figure"),
        (pivot and not (item.rows and item.columns), "a table needs rows and columns"),
        (lines and not item.x, "a figure needs x: the setting along it"),
        (drawing == "spreads" and len(item.columns) != 1, "spreads needs one axis in columns"),
        (drawing == "pairs" and not item.ours,
         "pairs needs ours: the compensation that is compared"),
        (drawing == "blocks" and not (item.series and of_modules),
         "blocks needs series, each with a value of the modules"),
        (pivot and bool(item.ours) and item.rows != ("selection", "compensation"),
         "ours needs rows = ['selection', 'compensation']"),
        (bool(item.extra or item.ours or item.dense) and not _of_metrics(item),
         f"extra, ours and dense need values of {', '.join(get_args(Metric))}"),
        (pivot and item.dense and item.columns != ("model",), "dense needs columns = ['model']"),
        (lines and item.dense and (item.x != "parameters" or "model" not in item.each),
         "dense needs x = 'parameters' and 'model' in each"),
        ("part" in item.each and not item.groups, "part needs parts: names of labels"),
        (bool(item.published) and not item.beside, "published needs part: columns of that file"),
        (not item.values, "values must not be empty"),
    )  # fmt: skip


def _check_keys(table: Any, cls: Any) -> None:
    keys = {member.metadata.get("key", member.name) for member in fields(cls)}
    for name in table if isinstance(table, dict) else ():
        _check_name(name, keys, "unknown key")


def _check_name(name: str, names: Iterable[str], reason: str) -> None:
    if name not in names:
        close = get_close_matches(name, list(names), 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ResultsError(f"{reason} '{name}'{hint}")


def _check_template(text: str, names: Sequence[str], key: str) -> None:
    """Raise ResultsError unless the text has only these names in braces, without formats."""
    try:
        places = [place for place in Formatter().parse(text) if place[1] is not None]
    except ValueError as error:
        raise ResultsError(f"{key}: '{text}' is no template ({error})") from None
    for _, name, specification, conversion in places:
        if (name or "") not in names or specification or conversion:
            braces = ", ".join(f"{{{name}}}" for name in names) or "nothing"
            raise ResultsError(f"{key}: '{text}' may have {braces} in braces")


def read_declarations(folder: Path) -> Declared:
    """Read what a sweep declared beside its rows; nothing where it did not.

    Raises:
        ResultsError: the file says something else.
    """
    path = folder / DECLARATIONS
    if not path.is_file():
        return Declared()
    try:
        declared: Declared = reader(Declared)(json.loads(path.read_bytes().decode()), "")
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
    merged = Declared({**old.grids, **new.grids})
    if merged != old:
        text = json.dumps(vars(merged), ensure_ascii=False, allow_nan=False, indent=1)
        write_whole(folder / DECLARATIONS, text.encode())
