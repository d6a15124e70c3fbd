"""Grids: TOML files that name many prunings (docs/EXPERIMENTS.md).

A list is an axis; the cells are the product of all axes, once for every entry of `variants`.
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from coec.compensation import Method
from coec.errors import OptionError
from coec.experiments.declarations import (
    READY_GRIDS,
    Declared,
    items,
)
from coec.experiments.publications import PUBLISHED, publication
from coec.planning.recipe import APART, Recipe, by_name, read_toml
from coec.settings import NAMES, OPTIONS, Pruning

MOST_CELLS = 100_000
"""Of one grid: more would take years."""
NEWER = {
    "multiple_of": "1", "allocation": "uniform", "attention_sparsity": None,
    "budget_parameters": None, "guard": True, "kept": None, "mlp_sparsity": None,
    "non_uniform": False, "target": "hf",
}  # fmt: skip
"""Settings that came after rows were published, at the value with which they change nothing;
`guard` where tokens are plenty, as they are in those rows."""
TABLES = ("grids", "models", "evaluate", "variants", "report")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How every cell of a model is measured.

    Attributes:
        text, text_column, seq_len, max_windows: of perplexity, as in `coec.perplexity`.
        tasks, tasks_data, limit: of the zero-shot tasks; none without `tasks`.
        distance: whether to compare predictions with the dense model's: KL divergence, and the
            share of tokens with the same most probable next one.
        geometry: whether to compare read and write frames with the dense model's.
        trust_remote_code: as in `coec.perplexity`; no grid can set it, a caller can.
    """

    text: str = "wikitext2"
    text_column: str = "text"
    seq_len: int | None = None
    max_windows: int | None = None
    tasks: str | None = None
    tasks_data: str | None = None
    limit: int | None = None
    distance: bool = False
    geometry: bool = False
    trust_remote_code: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any], where: str) -> "Evaluation":
        """Raises OptionError for an unknown key or a value of another kind than its default's."""
        kinds = get_type_hints(cls)
        for name, value in settings.items():
            _known(name, set(kinds), f"{where} [evaluate]")
            whole = kinds[name] == int | None
            if not isinstance(value, kinds[name]) or (whole and isinstance(value, bool)):
                kind = _KINDS["whole" if whole else "flag" if kinds[name] is bool else "text"]
                raise OptionError(f"{where} [evaluate]: {name} must be {kind}, got {value!r}")
        return cls(**settings)


_KINDS = {"text": "text", "flag": "true or false", "whole": "a whole number"}


@dataclass(frozen=True)
class Subject:
    """A dense model of a grid: its place, a short name unique in the grid, how it is measured."""

    path: str
    label: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Cell:
    """One pruning and its measurement.

    Attributes:
        subject: the dense model.
        recipe: how it is pruned; None measures the dense model itself.
        grids: which grids it belongs to.
        labels: its row's name in a grid, where it has one.
        declared: what the grids of the whole file declare of their report.
        given: the settings that somebody asked for; None for those that differ from their
            defaults.
    """

    subject: Subject
    recipe: Recipe | None
    grids: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)
    declared: Declared = field(default_factory=Declared, compare=False, repr=False)
    given: frozenset[str] | None = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> str:
        """Digest of everything asked for: two cells of one id are the same computation.

        The model goes by its label, which is unique in a grid: where it lies does not matter, and
        what it holds is in the row (`identity`), which a sweep compares. A setting that is newer
        than rows that are published counts where it does something, so that those rows still stand.
        """
        recipe = None if self.recipe is None else self.recipe.record()
        for name, nothing in NEWER.items():
            if recipe is not None and recipe.get(name) == nothing:
                del recipe[name]
        if recipe is not None and recipe["solve_dtype"] == "auto":
            recipe["solve_dtype"] = "float64"  # what it is on a CPU, and was by default
        evaluation = replace(self.subject.evaluation, trust_remote_code=False)  # as in the recipe's
        content = [self.subject.label, dataclasses.asdict(evaluation), recipe]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Grid:
    """One grid file, its included ones resolved.

    Attributes:
        name: the file's stem.
        fixed: settings that hold for all cells.
        axes: settings that vary, in the file's order.
        variants: linked settings, each with an optional label.
        includes: other grids, whose own settings win over `fixed`.
        models: the tables as written.
        evaluate: likewise.
        report: what it declares of its report.
    """

    name: str
    fixed: dict[str, Any]
    axes: dict[str, list[Any]]
    variants: list[dict[str, Any]]
    includes: list["Grid"]
    models: list[dict[str, Any]]
    evaluate: dict[str, Any]
    report: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, source: str, within: tuple[str, ...] = ()) -> "Grid":
        """A ready grid by name, or a TOML file.

        Raises:
            OptionError: no such grid, or an unknown or misplaced key.
        """
        if source in within:
            raise OptionError(f"grid '{source}' includes itself")
        content = _load(source)
        if within and (own := [key for key in ("models", "evaluate") if key in content]):
            raise OptionError(
                f"grid '{source}', included by '{within[-1]}': write its [{own[0]}] in the file "
                "that is run"
            )
        name = READY_GRIDS[source].stem if source in READY_GRIDS else Path(source).stem
        for key, kind in (
            ("grids", list),
            ("models", list),
            ("evaluate", dict),
            ("variants", list),
        ):
            if not isinstance(content.get(key, kind()), kind):
                raise OptionError(f"grid '{source}': {key} must be a {_TOML[kind]}")
        settings = _settings({k: v for k, v in content.items() if k not in TABLES}, source)
        variants = [_settings(v, source, extra={"label"}) for v in content.get("variants", [])]
        if empty := [k for s in [settings, *variants] for k, v in s.items() if v == []]:
            raise OptionError(f"grid '{source}': the list {empty[0]} is empty")
        for variant in variants:
            _check_label(variant, f"grid '{source}'")
        items(content.get("report", []), f"grid '{source}'")
        return cls(
            name,
            {k: v for k, v in settings.items() if not isinstance(v, list)},
            {k: v for k, v in settings.items() if isinstance(v, list)},
            variants,
            [cls.read(str(inner), (*within, source)) for inner in content.get("grids", [])],
            content.get("models", []),
            content.get("evaluate", {}),
            tuple(content.get("report", [])),
        )

    @property
    def declared(self) -> Declared:
        """What it and the grids that it includes declare, with published numbers of files.

        Raises:
            OptionError: there are no such numbers.
        """
        grids: dict[str, object] = {}
        published: dict[str, object] = {}
        for inner in self.includes:
            grids |= inner.declared.grids
            published |= inner.declared.published
        tables = []
        for table in self.report:
            source = table.get("published", "")
            if source and source not in PUBLISHED:
                name = f"published numbers '{source}' of grid '{self.name}'"
                missing = f"no {name}: give a TOML file, or one of {', '.join(PUBLISHED)}"
                content = read_toml(Path(source), name, missing)
                publication(content, name)
                published[Path(source).stem] = content
            tables.append({**table, "published": Path(source).stem} if source else table)
        return Declared({**grids, self.name: tables} if tables else grids, published)

    def cells(self, subject: Subject, defaults: dict[str, Any]) -> Iterator[Cell]:
        """Every cell of one model: first those of included grids, then its own.

        Args:
            defaults: the model's settings, which win over `fixed` and lose to axes and variants.

        Raises:
            OptionError: a setting is bad, or unknown to a cell's compensation.
        """
        for inner in self.includes:
            yield from replace(inner, fixed=self.fixed | inner.fixed).cells(subject, defaults)
        if not self.axes and not self.variants and self.includes:
            return
        for variant in self.variants or [{}]:
            own = {k: v for k, v in variant.items() if k != "label"}
            axes = self.axes | {k: v for k, v in own.items() if isinstance(v, list)}
            linked = {k: v for k, v in own.items() if not isinstance(v, list)}
            axes = {k: v for k, v in axes.items() if k not in linked}
            labels = {self.name: variant["label"]} if "label" in variant else {}
            if (count := math.prod(map(len, axes.values()))) > MOST_CELLS:
                raise OptionError(
                    f"grid '{self.name}': {count:.3g} cells are more than {MOST_CELLS:,}; vary less"
                )
            for values in itertools.product(*axes.values()):
                settings = self.fixed | defaults | dict(zip(axes, values, strict=True)) | linked
                try:
                    recipe = Recipe.of(**_heard(settings, linked))
                except OptionError as error:
                    raise OptionError(f"grid '{self.name}': {error}") from error
                yield Cell(subject, recipe, (self.name,), labels, given=frozenset(settings))


def _heard(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The settings without what a grid says for all its cells and has no effect in this one.

    `lambda_a = [0.0, 50.0]` with `r_p = 8` is such a grid. What a variant says itself (`own`) is
    kept, and refused by the recipe if nothing hears it.
    """
    names = {one.name for one in OPTIONS}
    options = {name: value for name, value in settings.items() if name in names}
    idle = Method.of(settings.get("compensation", Pruning.compensation)).idle(options)
    return {k: v for k, v in settings.items() if k not in idle or k in own}


_TOML = {list: "list", dict: "table"}


def expand(
    source: str,
    *,
    models: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    evaluate: dict[str, Any] | None = None,
) -> list[Cell]:
    """All cells of a grid, each once, dense models first; a cell of two grids knows both.

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
    found: dict[str, Cell] = {}
    dense: dict[str, Cell] = {}
    for table in tables:
        subject, own = _subject(table, grid.evaluate, evaluate or {}, source)
        if subject.label in dense:
            raise OptionError(f"two models are called '{subject.label}': give one a label")
        for other in (cell.subject for cell in dense.values()):
            if (other.path, other.evaluation) == (subject.path, subject.evaluation):
                raise OptionError(
                    f"'{other.label}' and '{subject.label}' are one model measured in one way: "
                    "name it once, and make what differs an axis"
                )
        cells = list(grid.cells(subject, own | (settings or {})))
        names = tuple(dict.fromkeys(name for cell in cells for name in cell.grids))
        dense[subject.label] = Cell(subject, None, names)
        for cell in cells:
            digest = cell.id
            first = found.get(digest, cell)
            grids = tuple(dict.fromkeys((*first.grids, *cell.grids)))
            found[digest] = replace(first, grids=grids, labels=first.labels | cell.labels)
    return [replace(cell, declared=declared) for cell in (*dense.values(), *found.values())]


def _subject(
    table: Any, grid: dict[str, Any], flags: dict[str, Any], source: str
) -> tuple[Subject, dict[str, Any]]:
    """A model, and the settings that its table brings."""
    if not isinstance(table, dict) or not isinstance(table.get("path"), str):
        raise OptionError(f"grid '{source}': every one of [[models]] needs a path")
    where = f"grid '{source}', model '{table['path']}'"
    label = table.get("label", Path(table["path"]).name)
    rest = {k: v for k, v in table.items() if k not in ("path", "label", "evaluate")}
    settings = _settings(rest, where)
    if lists := [k for k, v in settings.items() if isinstance(v, list)]:
        raise OptionError(f"{where}: {lists[0]} cannot be a list here; axes belong to the grid")
    own = table.get("evaluate", {})
    if not isinstance(own, dict):
        raise OptionError(f"{where}: [evaluate] must be a table, got {own!r}")
    _check_label(table, where)
    evaluation = Evaluation.of(grid | own | flags, where)
    for name in APART:
        if name in grid | own:
            raise OptionError(f"{where} [evaluate]: no grid can set {name}")
    return Subject(table["path"], label, evaluation), settings


def _check_label(table: dict[str, Any], where: str) -> None:
    if not isinstance(table.get("label", ""), str):
        raise OptionError(f"{where}: label must be text, got {table['label']!r}")


def _settings(table: Any, where: str, extra: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise OptionError(f"grid '{where}': expected a table of settings, got {table!r}")
    out = {}
    for key, name in by_name(table, f"grid '{where}'").items():
        value = table[name]
        _known(key, NAMES | (extra or set()), f"grid '{where}'", written=name)
        if isinstance(value, dict):
            raise OptionError(f"grid '{where}': {name} must be a value or a list, got {value!r}")
        out[key] = value
    return out


def _known(name: str, known: set[str] | frozenset[str], where: str, written: str = "") -> None:
    if name not in known:
        close = difflib.get_close_matches(name, [*known, *TABLES], 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise OptionError(f"{where}: unknown key '{written or name}'{hint}")


def _load(source: str) -> dict[str, Any]:
    return read_toml(
        READY_GRIDS.get(source, Path(source)),
        f"grid '{source}'",
        f"no grid '{source}': give a TOML file, or one of {', '.join(READY_GRIDS)}",
    )
