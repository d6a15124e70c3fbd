"""What a grid declares of its report: the `[[report]]` tables of its file (docs/EXPERIMENTS.md).

A sweep writes the declarations of its grids beside the rows, so that the report needs nothing else.
"""

import json
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from coec.errors import OptionError, ResultsError
from coec.experiments.records import Flag, Number, Plain, Text, plain, reader
from coec.experiments.rows import SETTING_NAMES, Metric

DECLARED = "grids.json"
READY = {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}
"""The grids that come with the package, by name."""

PUBLISHED = {
    path.stem: path
    for path in sorted((Path(__file__).parent / "grids" / "published").glob("*.toml"))
}
"""Numbers that others have printed, by name."""

Drawing = Literal[
    "pivot", "pairs", "spreads", "varied", "best", "tasks", "cost", "geometry", "failures", "overlaps",
    "cells", "settings", "texts", "events", "beside", "costs beside", "alone", "lines", "bars",
    "blocks", "rounds",
]  # fmt: skip
Quantity = Literal[
    "perplexity", "zero_shot", "capped", "error_before", "error_after", "holdout_before",
    "holdout_after", "angle_op", "angle_oc", "angle_pc",
]  # fmt: skip
Extra = Literal["mean", "median", "spread", "reference", "gap", "gcv_lambda"]
Where = Mapping[str, tuple[Plain, ...]]
AXES = frozenset(
    ("model", "cell", "label", "part", "method", "repair", "others", "site", "value", "parameters")
) | frozenset(SETTING_NAMES)


@dataclass(frozen=True)
class Series:
    """A line of a figure that is named; without a label it is one for every repair.

    Attributes:
        where: settings of its rows, as in `Declaration`.
        value: of which quantity of the modules, in a figure by block.
        role: whose colour it has: a compensation's, or `ink`, `muted`, `mean`, `other`.
        level: whether it is one value for all places.
    """

    label: Text = ""
    where: Where = field(default_factory=dict)
    value: Quantity | None = None
    role: Text = "ink"
    line: Literal["-", "--", ":", "-."] = "-"
    marker: Literal["", "o", "s", "D", "^"] = "o"
    level: Flag = False


@dataclass(frozen=True)
class Declaration:
    """One `[[report]]`: a table, a figure, or a section that is about this grid's cells alone.

    Attributes:
        section: the heading that it stands under.
        table, figure: the title; `{model}` and other names of `each` are filled in, and `{metric}`.
        draw: how, where it is not what `table` (`pivot`) or `figure` (`lines`) says.
        each: a table, or a panel, for every value of these.
        rows, columns: what the lines and the columns of a table stand for.
        head: of a column; default: its values.
        values: a table for each of these quantities; or, with `value` among the columns, in one.
        where, reference: values of settings of the rows that are shown, and of those compared with.
        prefer: likewise, as far as there are any such rows.
        having: only rows that have this quantity.
        varies: left out unless this setting takes two values; of a figure its `x`.
        sort: the order of rows.
        best: where the best is bold: of a line (`row`) or of a `column`.
        dense: whether the dense model has the first line, or a point.
        single: at most the seed may differ between cells of one entry; else all are listed.
        parts: names of labels that belong together, by the axis `part`; an empty list: the others.
        extra: columns at the end, by their heads.
        ours, native: the compensation that every selection's `native` one is compared with.
        x, x_label, y_log, lines, series: of a figure; `lines` has a line for every one of them.
        text: stands above, where anything is drawn.
        notes: sentences below.
        published, part: numbers to set beside, of a file, where the report is asked for them.
    """

    section: Text
    table: Text = ""
    figure: Text = ""
    draw: Drawing | None = None
    each: tuple[Text, ...] = ()
    rows: tuple[Text, ...] = ()
    columns: tuple[Text, ...] = ()
    head: Text = ""
    values: tuple[Quantity, ...] = ("perplexity", "zero_shot")
    where: Where = field(default_factory=dict)
    reference: Where = field(default_factory=dict)
    prefer: Where = field(default_factory=dict)
    having: Quantity | None = None
    varies: Text = ""
    sort: tuple[Text, ...] = ("sparsity", "selection", "compensation")
    best: Literal["row", "column"] | None = None
    dense: Flag = False
    single: Flag = False
    parts: Mapping[str, tuple[Text, ...]] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)
    ours: Text = ""
    native: Mapping[str, Text] = field(default_factory=dict)
    x: Text = ""
    x_label: Text = ""
    y_log: Flag = False
    lines: Text = "repair"
    series: tuple[Series, ...] = ()
    text: Text = ""
    notes: tuple[Text, ...] = ()
    published: Text = ""
    part: Text = ""

    @property
    def drawing(self) -> Drawing | None:
        """How it is drawn; None of a mere section."""
        return self.draw or ("pivot" if self.table else "lines" if self.figure else None)

    @property
    def claims(self) -> bool:
        """Whether it only says that a section of every report is about this grid's cells alone."""
        return self.drawing is None


@dataclass(frozen=True)
class Column:
    """Publication numbers by the first label of a table's lines, for one metric or any."""

    head: Text
    values: Mapping[str, Number]
    metric: Metric | None = None


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

    metric: Metric
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


@dataclass(frozen=True)
class Declared:
    """Of all grids of a sweep, by their names; and the published numbers that they name."""

    grids: Mapping[str, tuple[Declaration, ...]] = field(default_factory=dict)
    published: Mapping[str, Publication] = field(default_factory=dict)


NOTHING = Declared()


def items(content: Any, where: str) -> tuple[Declaration, ...]:
    """The `[[report]]` list of a grid.

    Raises:
        OptionError: an unknown key, a value of another kind, or a name that nothing has.
    """
    if not isinstance(content, list):
        raise OptionError(f"{where}: report must be a list of tables: write [[report]]")
    found = []
    for number, table in enumerate(content, 1):
        place = f"{where}, [[report]] {number}"
        try:
            found.append(_item(table))
        except ResultsError as error:
            raise OptionError(f"{place}: {error}") from None
    return tuple(found)


def _item(table: Any) -> Declaration:
    _check_keys(table, Declaration)
    for one in _tables(table, "series"):
        _check_keys(one, Series)
    item: Declaration = reader(Declaration)(table, "")
    if item.table and item.figure:
        raise ResultsError("it is a table or a figure: give one of the two titles")
    if item.draw and not (item.table or item.figure):
        raise ResultsError("draw needs a title: add table or figure")
    names = [*item.each, *item.rows, *item.columns, *item.sort, *item.where, *item.reference]
    names += [item.lines, *(one for one in (item.x, item.varies) if one)]
    names += [name for one in item.series for name in one.where]
    for name in names:
        _check_name(name, AXES, "no setting and no other axis is called")
    _check_template(item.table or item.figure, (*item.each, "metric", "count", "published"))
    _check_template(item.head, item.columns)
    if item.drawing == "pivot" and not (item.rows and item.columns):
        raise ResultsError("a table needs rows and columns: name what they stand for")
    if item.drawing == "lines" and not item.x:
        raise ResultsError("a figure needs x: name the setting along it")
    if item.published and item.drawing == "pivot" and not item.part:
        raise ResultsError("published needs part: name the columns of that file")
    return item


def _tables(table: Any, name: str) -> list[Any]:
    inner = table.get(name) if isinstance(table, dict) else None
    return inner if isinstance(inner, list) else []


def _check_keys(table: Any, kind: Any) -> None:
    known = {one.name for one in fields(kind)}
    for name in table if isinstance(table, dict) else ():
        _check_name(name, known, "unknown key")


def _check_name(name: str, known: Iterable[str], why: str) -> None:
    if name not in known:
        close = get_close_matches(name, list(known), 1)
        raise ResultsError(f"{why} '{name}'" + (f"; did you mean '{close[0]}'?" if close else ""))


def _check_template(text: str, known: Iterable[str]) -> None:
    try:
        names = [name for _, name, *_ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ResultsError(f"'{text}': {error}") from None
    for name in names:
        _check_name(name, known, f"'{text}' names what is not there:")


def published(content: Any, where: str) -> Publication:
    """A file of published numbers; raises OptionError, which names the field."""
    try:
        found: Publication = reader(Publication)(content, "")
        for index, block in enumerate(found.comparison):
            for values in (v for by in block.values.values() for v in by.values()):
                if len(values) != len(block.models):
                    raise ResultsError(
                        f"comparison[{index}] must have a number per model ({len(block.models)}), "
                        f"got {len(values)}"
                    )
    except ResultsError as error:
        raise OptionError(f"{where}: {error}") from None
    return found


def ready_published(name: str) -> Publication:
    """Those that come with the package; raises OptionError for another name."""
    if name not in PUBLISHED:
        raise OptionError(f"no published numbers '{name}': there is {', '.join(PUBLISHED)}")
    text = PUBLISHED[name].read_text(encoding="utf-8")
    return published(tomllib.loads(text), f"published numbers '{name}'")


def ready(name: str) -> tuple[Declaration, ...]:
    """What a ready grid declares; nothing where none is called so."""
    if name not in READY:
        return ()
    content = tomllib.loads(READY[name].read_text(encoding="utf-8"))
    return items(content.get("report", []), f"grid '{name}'")


def read_declarations(folder: Path) -> Declared:
    """What a sweep has written beside its rows; nothing where it has not.

    Raises:
        ResultsError: the file is there and is none.
    """
    path = folder / DECLARED
    if not path.is_file():
        return NOTHING
    try:
        found: Declared = reader(Declared)(json.loads(path.read_bytes().decode()), "")
        for name, declared in found.grids.items():
            items([plain(item) for item in declared], f"grid '{name}'")
    except (OSError, ValueError, RecursionError, ResultsError, OptionError) as error:
        why = " ".join(str(error).split())
        raise ResultsError(
            f"{path} does not say what the grids declare ({why}): remove it and run the sweep "
            "again, which writes it"
        ) from None
    return found


def write_declarations(folder: Path, new: Declared) -> None:
    """Adds declarations to those that the folder has; a grid's new one wins. By one rename."""
    old = read_declarations(folder)
    both = Declared({**old.grids, **new.grids}, {**old.published, **new.published})
    if both == old:
        return
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{DECLARED}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(plain(both), file, ensure_ascii=False, allow_nan=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, folder / DECLARED)
