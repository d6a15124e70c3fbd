"""What a grid declares of its report: the `[[report]]` tables of its file (docs/EXPERIMENTS.md).

A sweep writes the declarations of its grids beside the rows, so that the report needs nothing else.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from coec.errors import OptionError, ResultsError
from coec.experiments.files import write_whole
from coec.experiments.publications import Publication, check_template, publication
from coec.experiments.records import Flag, Plain, Text, plain, reader
from coec.experiments.rows import SETTING_NAMES, Metric

DECLARED = "grids.json"
READY = {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}
"""The grids that come with the package, by name."""

Drawing = Literal[
    "pivot", "pairs", "spreads", "varied", "best", "tasks", "cost", "geometry", "failures",
    "overlaps", "cells", "settings", "texts", "events", "beside", "costs beside", "alone", "lines",
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
"""What is drawn in a colour of its own."""

Where = Mapping[str, tuple[Plain, ...]]
METRICS = frozenset(get_args(Metric))
_SETTINGS = frozenset(SETTING_NAMES)
_LABELS = _SETTINGS | {"model", "cell", "label", "method", "repair"}
ALLOWED: Mapping[str, frozenset[str]] = {
    "each": _LABELS | {"part", "site"}, "rows": _LABELS | {"others"}, "lines": _LABELS,
    "columns": _SETTINGS | {"model", "value"}, "sort": _SETTINGS | {"model", "label"},
    "where": _SETTINGS, "prefer": _SETTINGS, "reference": _SETTINGS, "varies": _SETTINGS,
    "x": _SETTINGS | {"parameters"},
}  # fmt: skip
"""The axes that a key may name. `method` and `pruning` are a compensation with what tells it from
another, after its selection; `pruning` leaves out a selection that is the only one. `others` are
columns for what tells lines apart."""


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
    role: Role = "ink"
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
    for name, allowed in ALLOWED.items():
        given = getattr(item, name)
        for one in [given] if isinstance(given, str) and given else given:
            _check_name(one, allowed, f"{name}: no axis is called")
    for name in (name for one in item.series for name in one.where):
        _check_name(name, ALLOWED["where"], "series: no setting is called")
    check_template(item.head, item.columns, "head")
    check_template(item.table or item.figure, _titled(item), "the title")
    for note in item.notes if item.draw == "blocks" else ():
        check_template(note, ("selection", "compensation", "sparsity"), "notes")
    for wrong, why in _rules(item):
        if wrong:
            raise ResultsError(why)
    return item


def _titled(item: Declaration) -> tuple[str, ...]:
    """What a title may name."""
    metrics = "value" not in item.columns and {*item.values} <= METRICS
    metric = ("metric",) if metrics else ()
    named: dict[str | None, tuple[str, ...]] = {
        "pivot": (*item.each, *metric), "spreads": ("count", *metric), "tasks": ("model",),
        "beside": ("published",), "alone": ("published",),
    }  # fmt: skip
    return named.get(item.drawing, ())


def _rules(item: Declaration) -> Iterable[tuple[bool, str]]:
    """What must not be, and what to say then."""
    what, metrics = item.drawing, {*item.values} <= METRICS and "value" not in item.columns
    modules = all(one.value and one.value not in METRICS for one in item.series)
    return (
        (bool(item.table and item.figure), "it is a table or a figure: give one of the two titles"),
        (what is not None and not (item.table or item.figure), "add a title: table or figure"),
        (what == "pivot" and not (item.rows and item.columns), "a table needs rows and columns"),
        (what == "lines" and not item.x, "a figure needs x: the setting along it"),
        (what == "spreads" and len(item.columns) != 1, "spreads needs one axis in columns"),
        (what == "pairs" and not item.ours, "pairs needs ours: the compensation that is compared"),
        (what == "blocks" and not (item.series and modules),
         "blocks needs series, each with a value of the modules"),
        (what == "pivot" and bool(item.ours) and item.rows != ("selection", "compensation"),
         "ours needs rows = ['selection', 'compensation']"),
        (not metrics and bool(item.extra or item.ours or item.dense),
         f"extra, ours and dense need values of {', '.join(get_args(Metric))}"),
        (what == "pivot" and item.dense and item.columns != ("model",),
         "dense needs columns = ['model']"),
        (what == "lines" and item.dense and (item.x != "parameters" or "model" not in item.each),
         "dense needs x = 'parameters' and 'model' in each"),
        ("part" in item.each and not item.parts, "part needs parts: names of labels"),
        (bool(item.published) and not item.part, "published needs part: columns of that file"),
        (not item.values, "values must not be empty"),
    )  # fmt: skip


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
        for name, numbers in found.published.items():
            publication(plain(numbers), f"published numbers '{name}'")
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
    text = json.dumps(plain(both), ensure_ascii=False, allow_nan=False, indent=1)
    write_whole(folder / DECLARED, text)
