"""Grids: TOML files that name many prunings (docs/EXPERIMENTS.md).

A list is an axis; the cells are the product of all axes, once for every entry of `variants`.
"""

import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from coec.compensation import Method
from coec.errors import OptionError, ResultsError
from coec.experiments.declarations import READY_GRIDS, Declared, items
from coec.experiments.rows import Count, Record, Text, read_as
from coec.planning.recipe import APART, Recipe, by_name, read_toml
from coec.settings import NAMES, OPTIONS, Pruning
from coec.settings.fields import RENAMED

_MOST_CELLS = 100_000
"""Cells of one grid: more would take years."""
NEWER = {
    "multiple_of": "1", "allocation": "uniform", "attention_sparsity": None,
    "budget_parameters": None, "guard": True, "kept": None, "mlp_sparsity": None,
    "non_uniform": False, "target": "hf",
}  # fmt: skip
"""Settings that came after rows were published, at the value with which they change nothing;
`guard` where tokens are plenty, as they are in those rows."""
_TABLES = {"grids": list, "models": list, "evaluate": dict, "variants": list}
_TABLE_NAMES = {list: "list", dict: "table"}
_SPECIAL_KEYS = (*_TABLES, "report")
SettingTable = Mapping[str, Any]
"""Settings by name, as a file or flags give them."""


class Evaluation(Record):
    """Evaluation of every cell of a model.

    Attributes:
        text, text_column, seq_len, max_windows: of perplexity, as in `coec.perplexity`.
        tasks, tasks_data, limit: of the zero-shot tasks; none without `tasks`.
        distance: compare predictions with the dense model's: KL divergence, and the share of tokens
            with the same most probable next one.
        geometry: compare read and write frames with the dense model's.
        trust_remote_code: as in `coec.perplexity`; no grid can set it, a caller can.
    """

    model_config = ConfigDict(extra="forbid")

    text: Text = "wikitext2"
    text_column: Text = "text"
    seq_len: Count | None = None
    max_windows: Count | None = None
    tasks: Text | None = None
    tasks_data: Text | None = None
    limit: Count | None = None
    distance: bool = False
    geometry: bool = False
    trust_remote_code: bool = False

    @classmethod
    def of(cls, settings: SettingTable, place: str) -> "Evaluation":
        """Make an evaluation; OptionError for an unknown key or a value of another type."""
        try:
            return read_as(cls, dict(settings))
        except ResultsError as error:
            raise OptionError(f"{place} [evaluate]: {error}") from None


@dataclass(frozen=True)
class Subject:
    """Dense model of a grid: its path, a short name unique in the grid, and its evaluation."""

    path: str
    label: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Cell:
    """A pruning and its measurement.

    Attributes:
        subject: the dense model.
        recipe: settings of the pruning; None measures the dense model itself.
        grids: the grids that it belongs to.
        labels: its row's name in a grid, where it has one.
        declared: declarations of the whole file's grids.
        explicit: names of the settings that were given; None for those that differ from their
            defaults.
    """

    subject: Subject
    recipe: Recipe | None
    grids: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)
    declared: Declared = field(default_factory=Declared, compare=False, repr=False)
    explicit: frozenset[str] | None = field(default=None, compare=False, repr=False)

    @property
    def runs_model(self) -> bool:
        """Tell a cell that needs no statistics: it runs the models over the text, or is dense."""
        return self.recipe is None or self.recipe.needs_text is not None

    @property
    def id(self) -> str:
        """Digest of all settings: two cells of one id are the same computation.

        The model goes by its label, which is unique in a grid: its path does not matter, and its
        content is in the row (`identity`), which a sweep compares. A setting that is newer than
        published rows counts where it does something, and a renamed one under its former name, so
        that those rows still stand.
        """
        recipe = None if self.recipe is None else self.recipe.record()
        if recipe is not None:
            newer = [name for name, idle in NEWER.items() if recipe.get(name) == idle]
            before = {name: old for old, name in RENAMED.items()}
            recipe = {before.get(n, n): value for n, value in recipe.items() if n not in newer}
            if recipe["solve_dtype"] == "auto":
                recipe["solve_dtype"] = "float64"  # as on a CPU, and once by default
        evaluation = self.subject.evaluation.model_dump()
        evaluation["trust_remote_code"] = False  # as in the recipe
        content = [self.subject.label, evaluation, recipe]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Grid:
    """A grid file, its included ones resolved.

    Attributes:
        name: the file's stem.
        fixed: settings that hold for all cells.
        axes: settings that vary, in the file's order.
        variants: linked settings, each with an optional label.
        includes: other grids, whose own settings win over `fixed`.
        models, evaluate, report: the tables as written.
    """

    name: str
    fixed: SettingTable
    axes: Mapping[str, list[Any]]
    variants: Sequence[SettingTable]
    includes: list["Grid"]
    models: Sequence[SettingTable]
    evaluate: SettingTable
    report: Sequence[SettingTable]

    @classmethod
    def read(cls, source: str, within: tuple[str, ...] = ()) -> "Grid":
        """Read a ready grid by name, or a TOML file.

        Args:
            within: the grids that include this one, outermost first.

        Raises:
            OptionError: no such grid, or an unknown or misplaced key.
        """
        place = f"grid '{source}'"
        if source in within:
            raise OptionError(f"{place} includes itself")
        path = READY_GRIDS.get(source, Path(source))
        missing = f"no {place}: give a TOML file, or one of {', '.join(READY_GRIDS)}"
        content = read_toml(path, place, missing)
        for key in ("models", "evaluate"):
            if within and key in content:
                raise OptionError(
                    f"{place}, included by '{within[-1]}': write its [{key}] in the file that is "
                    "run"
                )
        for key, cls_of_key in _TABLES.items():
            if not isinstance(content.get(key, cls_of_key()), cls_of_key):
                raise OptionError(f"{place}: {key} must be a {_TABLE_NAMES[cls_of_key]}")
        settings = _settings({k: v for k, v in content.items() if k not in _SPECIAL_KEYS}, place)
        variants = [_settings(table, place, label=True) for table in content.get("variants", [])]
        for key, value in (entry for table in (settings, *variants) for entry in table.items()):
            if value == []:
                raise OptionError(f"{place}: the list {key} is empty")
        report = content.get("report", [])
        items(report, place)
        return cls(
            path.stem,
            {k: v for k, v in settings.items() if not isinstance(v, list)},
            {k: v for k, v in settings.items() if isinstance(v, list)},
            variants,
            [cls.read(str(inner), (*within, source)) for inner in content.get("grids", [])],
            content.get("models", []),
            content.get("evaluate", {}),
            report,
        )

    @property
    def declared(self) -> Declared:
        """Declarations of this grid and those that it includes."""
        grids: dict[str, object] = {}
        for inner in self.includes:
            grids |= inner.declared.grids
        return Declared(grids={**grids, self.name: self.report} if self.report else grids)

    def cells(self, subject: Subject, defaults: SettingTable) -> Iterator[Cell]:
        """Yield every cell of one model: first those of included grids, then its own.

        Args:
            defaults: the model's settings, which win over `fixed` and lose to axes and variants.

        Raises:
            OptionError: a setting is bad, or unknown to a cell's compensation.
        """
        for inner in self.includes:
            fixed = {**self.fixed, **inner.fixed}
            yield from replace(inner, fixed=fixed).cells(subject, defaults)
        if not self.axes and not self.variants and self.includes:
            return
        for variant in self.variants or [{}]:
            labels = {self.name: variant["label"]} if "label" in variant else {}
            linked = {k: v for k, v in variant.items() if k != "label" and not isinstance(v, list)}
            lists = {k: v for k, v in variant.items() if isinstance(v, list)}
            axes = {k: v for k, v in {**self.axes, **lists}.items() if k not in linked}
            if (count := math.prod(map(len, axes.values()))) > _MOST_CELLS:
                raise OptionError(
                    f"grid '{self.name}': {count:.3g} cells are more than {_MOST_CELLS:,}; vary "
                    "less"
                )
            for values in itertools.product(*axes.values()):
                place = dict(zip(axes, values, strict=True))
                settings = {**self.fixed, **defaults, **place, **linked}
                try:
                    recipe = Recipe(**_without_idle(settings, linked))
                except OptionError as error:
                    raise OptionError(f"grid '{self.name}': {error}") from error
                yield Cell(subject, recipe, (self.name,), labels, explicit=frozenset(settings))


def _without_idle(settings: SettingTable, linked: SettingTable) -> SettingTable:
    """Leave out what a grid says for all its cells and has no effect in this one.

    `lambda_a = [0.0, 50.0]` with `r_p = 8` is such a grid. What a variant says itself (`linked`) is
    kept, and refused by the recipe if it has no effect.
    """
    names = {option.name for option in OPTIONS}
    options = {name: value for name, value in settings.items() if name in names}
    idle = Method.of(settings.get("compensation", Pruning.compensation)).idle(options)
    return {k: v for k, v in settings.items() if k not in idle or k in linked}


def expand(
    source: str,
    *,
    models: list[str] | None = None,
    settings: SettingTable | None = None,
    evaluate: SettingTable | None = None,
) -> list[Cell]:
    """Return all cells of a grid, each once, dense models first; a cell of two grids knows both.

    Args:
        source: a ready grid's name or a TOML file.
        models: dense models besides those that the file names.
        settings: win over the file's, but for what a grid varies.
        evaluate: likewise, of the evaluation.

    Raises:
        OptionError: an unknown key, a bad value, no model, or two models of one name.
    """
    grid = Grid.read(source)
    tables = [*grid.models, *({"path": path} for path in models or [])]
    if not tables:
        raise OptionError(f"grid '{source}' names no model: add [[models]], or pass model=PATH")
    declared = grid.declared
    dense: dict[str, Cell] = {}
    pruned: dict[str, Cell] = {}
    for table in tables:
        subject, defaults = _subject(table, grid.evaluate, evaluate or {}, source)
        if subject.label in dense:
            raise OptionError(f"two models are called '{subject.label}': give one a label")
        for earlier in (cell.subject for cell in dense.values()):
            if (earlier.path, earlier.evaluation) == (subject.path, subject.evaluation):
                raise OptionError(
                    f"'{earlier.label}' and '{subject.label}' are one model measured in one way: "
                    "name it once, and make what differs an axis"
                )
        cells = list(grid.cells(subject, {**defaults, **(settings or {})}))
        names = tuple(dict.fromkeys(name for cell in cells for name in cell.grids))
        dense[subject.label] = Cell(subject, None, names, declared=declared)
        for cell in cells:
            digest = cell.id
            first = pruned.get(digest, replace(cell, declared=declared))
            grids = tuple(dict.fromkeys((*first.grids, *cell.grids)))
            pruned[digest] = replace(first, grids=grids, labels=first.labels | cell.labels)
    return [*dense.values(), *pruned.values()]


def _subject(
    table: Any, grid: SettingTable, flags: SettingTable, source: str
) -> tuple[Subject, SettingTable]:
    """Return a model, and the settings that its table brings."""
    if not isinstance(table, dict) or not isinstance(table.get("path"), str):
        raise OptionError(f"grid '{source}': every one of [[models]] needs a path")
    place = f"grid '{source}', model '{table['path']}'"
    plain = {k: v for k, v in table.items() if k not in ("path", "evaluate")}
    settings = _settings(plain, place, label=True)
    label = settings.pop("label", Path(table["path"]).name)
    if lists := [name for name, value in settings.items() if isinstance(value, list)]:
        raise OptionError(f"{place}: {lists[0]} cannot be a list here; axes belong to the grid")
    evaluate = table.get("evaluate", {})
    if not isinstance(evaluate, dict):
        raise OptionError(f"{place}: [evaluate] must be a table, got {evaluate!r}")
    for name in APART:
        if name in {**grid, **evaluate}:
            raise OptionError(f"{place} [evaluate]: no grid can set {name}")
    evaluation = Evaluation.of({**grid, **evaluate, **flags}, place)
    return Subject(table["path"], label, evaluation), settings


def _settings(table: Any, place: str, label: bool = False) -> dict[str, Any]:
    """Check a table of settings, and a label where one may be there; dashes are underscores."""
    if not isinstance(table, dict):
        raise OptionError(f"{place}: expected a table of settings, got {table!r}")
    settings = {}
    for name, key in by_name(table, place).items():
        _check_key(name, NAMES | ({"label"} if label else set()), place, written=key)
        if isinstance(table[key], dict):
            raise OptionError(f"{place}: {key} must be a value or a list, got {table[key]!r}")
        settings[name] = table[key]
    if not isinstance(settings.get("label", ""), str):
        raise OptionError(f"{place}: label must be text, got {settings['label']!r}")
    return settings


def _check_key(name: str, names: set[str] | frozenset[str], place: str, written: str = "") -> None:
    if name not in names:
        close = difflib.get_close_matches(name, [*names, *_SPECIAL_KEYS], 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise OptionError(f"{place}: unknown key '{written or name}'{hint}")
