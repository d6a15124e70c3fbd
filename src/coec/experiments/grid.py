"""Grids: TOML files that name many prunings (docs/lab/EXPERIMENTS.md).

A list is an axis; the cells are the product of all axes, once for every entry of `variants`.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from coec.compensation import Method
from coec.errors import OptionError, ResultsError, did_you_mean
from coec.experiments import READY_GRIDS
from coec.experiments.rows import (
    RECOVER,
    Count,
    Plain,
    Record,
    Text,
    plain,
    read_as,
)
from coec.planning.recipe import Recipe, by_name, read_toml
from coec.settings import NAMES, OPTIONS, Pruning
from coec.settings.presets import with_preset
from coec.settings.recovery import check_can_train, token_count

_MOST_CELLS = 100_000
"""Cells of one grid: more would take years."""
NEWER = {
    "multiple_of": "1", "allocation": "uniform", "attention_sparsity": None,
    "budget_parameters": None, "expert_sparsity": 0.0, "guard": True, "kept": None,
    "bos": "off", "mlp_sparsity": None, "non_uniform": False, "target": "hf",
    "attention_units": "groups", "budget_memory": None, "context": 8192, "tensor_parallel": 1,
    "drop_blocks": 0,
}  # fmt: skip
"""Settings that came after rows were published, at the value with which they change nothing;
`guard` where tokens are plenty, as they are in those rows."""
SettingTable = Mapping[str, Any]
"""Settings by name, as a file or flags give them."""


class Evaluation(Record):
    """Evaluation of every cell of a model, by arguments of `coec.perplexity` and `coec.zero_shot`.

    `distance` and `geometry` compare predictions and frames with the dense model's. No grid can set
    `trust_remote_code`, a caller can.
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
        recipe: settings of the pruning; None measures the dense model itself.
        recover: tokens that the pruned model is trained on before it is measured; None for none.
        labels: its row's name by grid, where it has one.
    """

    subject: Subject
    recipe: Recipe | None
    grids: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)
    recover: int | None = None

    @property
    def runs_model(self) -> bool:
        """Tell a cell that needs no statistics: it runs the models over the text, or is dense."""
        return self.recipe is None or self.recipe.needs_text is not None

    @property
    def id(self) -> str:
        """Digest of all settings: two cells of one id are the same computation.

        The model goes by its label, which is unique in a grid: its path does not matter, and its
        content is in the row (`identity`), which a sweep compares. A setting counts where it does
        something, if it is newer than published rows or one of the reconstruction's, so that those
        rows still stand.
        """
        recipe: dict[str, Any] | None = None
        if self.recipe is not None:
            # Settings that change nothing are left out, so that rows which lack them still stand.
            recipe = self.recipe.record() | {"final_norm": False}  # which rows had once, off
            idle = {name for name, value in NEWER.items() if recipe.get(name) == value}
            idle |= set(self.recipe.reconstruction.idle())
            recipe = {name: value for name, value in recipe.items() if name not in idle}
            if recipe["solve_dtype"] == "auto":
                recipe["solve_dtype"] = "float64"  # as on a CPU, and once by default
        evaluation = self.subject.evaluation.model_dump()
        evaluation["trust_remote_code"] = False  # as in the recipe
        content: list[Any] = [self.subject.label, evaluation, recipe]
        if self.recover is not None:
            content.append(self.recover)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _settable(value: Any) -> Any:
    if value == [] or not isinstance(value, list):
        return plain(value)
    return [plain(element) for element in value]


class _Table(Record):
    """Table of settings, with dashes or underscores in their names; a list is an axis."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_settable)]] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            raise ValueError("must be a table of settings")
        names = by_name(table, "a table")
        for name, key in names.items():
            if name not in NAMES | cls.model_fields.keys() | {RECOVER}:
                hint = did_you_mean(name, [*NAMES, *cls.model_fields])
                raise OptionError(f"unknown key '{key}'{hint}")
        return {name: table[key] for name, key in names.items()}

    @property
    def settings(self) -> SettingTable:
        """Settings of the table, axes among them."""
        return self.model_extra or {}


class VariantTable(_Table):
    """Linked settings, and a label for their row: an entry of `[[variants]]`."""

    label: Text | None = None


class ModelTable(_Table):
    """Dense model, its settings and its evaluation: an entry of `[[models]]`."""

    __pydantic_extra__: dict[str, Plain] = Field(init=False)

    path: Text
    label: Text | None = None
    evaluate: dict[str, Any] = Field(default={})


class GridTable(_Table):
    """Content of a grid file: settings for all cells, axes, variants and models."""

    grids: list[Text] = Field(default=[])
    models: list[ModelTable] = Field(default=[])
    evaluate: dict[str, Any] = Field(default={})
    variants: list[VariantTable] = Field(default=[])


@dataclass(frozen=True)
class Grid:
    """A grid file: its name, its content, and the settings that hold for all its cells."""

    name: str
    table: GridTable
    fixed: SettingTable

    @classmethod
    def read(
        cls, source: str, within: tuple[str, ...] = (), fixed: SettingTable | None = None
    ) -> list["Grid"]:
        """Read a ready grid by name, or a TOML file; grids that it includes come before it.

        Args:
            within: the grids that include this one, outermost first.
            fixed: their settings, over which this grid's win.

        Raises:
            OptionError: no such grid, an unknown or misplaced key, or a value of another type.
        """
        place = f"grid '{source}'"
        if source in within:
            raise OptionError(f"{place} includes itself")
        # File → table → settings for all cells; axes stay in the table
        path = READY_GRIDS.get(source, Path(source))
        missing = f"no {place}: give a TOML file, or one of {', '.join(READY_GRIDS)}"
        content = read_toml(path, place, missing)
        try:
            table = read_as(GridTable, content)
        except (OptionError, ResultsError) as error:
            raise OptionError(f"{place}: {error}") from None
        for key in {"models", "evaluate"} & table.model_fields_set if within else ():
            raise OptionError(
                f"{place}, included by '{within[-1]}': write its [{key}] in the file that is run"
            )
        single = {k: v for k, v in table.settings.items() if not isinstance(v, list)}
        grid = cls(path.stem, table, {**(fixed or {}), **single})
        included = (cls.read(name, (*within, source), grid.fixed) for name in table.grids)
        return [*itertools.chain.from_iterable(included), grid]

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Settings that vary, in the file's order."""
        return {k: v for k, v in self.table.settings.items() if isinstance(v, list)}

    def cells(self, subject: Subject, defaults: SettingTable) -> Iterator[Cell]:
        """Yield every cell of one model; none for a file that only includes others.

        Args:
            defaults: the model's settings, which win over `fixed` and lose to axes and variants.

        Raises:
            OptionError: a setting is bad, or unknown to a cell's compensation.
        """
        if not self.axes and not self.table.variants and self.table.grids:
            return
        for variant in self.table.variants or [VariantTable()]:
            # What a variant links beats axes; its own lists are further axes.
            labels = {} if variant.label is None else {self.name: variant.label}
            linked = {k: v for k, v in variant.settings.items() if not isinstance(v, list)}
            lists = {k: v for k, v in variant.settings.items() if isinstance(v, list)}
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
                    tokens = settings.pop(RECOVER, 0)
                    recover = None if tokens in (0, "0") else token_count(tokens)
                    if recover is not None:
                        check_can_train()
                    recipe = Recipe(**_without_idle(settings, linked))
                except OptionError as error:
                    raise OptionError(f"grid '{self.name}': {error}") from error
                yield Cell(subject, recipe, (self.name,), labels, recover=recover)


def _without_idle(settings: SettingTable, linked: SettingTable) -> SettingTable:
    """Leave out what a grid says for all its cells and has no effect in this one.

    `lambda_a = [0.0, 50.0]` with `r_p = 8` is such a grid. What a variant says itself (`linked`) is
    kept, and refused by the recipe if it has no effect.
    """
    names = {option.name for option in OPTIONS}
    options = {name: value for name, value in settings.items() if name in names}
    compensation = with_preset(settings).get("compensation", Pruning.compensation)
    idle = Method.of(compensation).idle(options)
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
    grids = Grid.read(source)
    grid = grids[-1]
    tables = [*grid.table.models, *(ModelTable(path=path) for path in models or [])]
    if not tables:
        raise OptionError(f"grid '{source}' names no model: add [[models]], or pass model=PATH")
    # Models → the dense cell of each, and its cells of every grid, each once
    dense: dict[str, Cell] = {}
    pruned: dict[str, Cell] = {}
    for table in tables:
        subject = _subject(table, grid.table.evaluate, evaluate or {}, source)
        if subject.label in dense:
            raise OptionError(f"two models are called '{subject.label}': give one a label")
        for earlier in (cell.subject for cell in dense.values()):
            if (earlier.path, earlier.evaluation) == (subject.path, subject.evaluation):
                raise OptionError(
                    f"'{earlier.label}' and '{subject.label}' are one model measured in one way: "
                    "name it once, and make what differs an axis"
                )
        defaults = {**table.settings, **(settings or {})}
        cells = [cell for grid in grids for cell in grid.cells(subject, defaults)]
        names = tuple(dict.fromkeys(name for cell in cells for name in cell.grids))
        dense[subject.label] = Cell(subject, None, names)
        for cell in cells:
            digest = cell.id
            first = pruned.get(digest, cell)
            names = tuple(dict.fromkeys((*first.grids, *cell.grids)))
            pruned[digest] = replace(first, grids=names, labels=first.labels | cell.labels)
    return [*dense.values(), *pruned.values()]


def _subject(table: ModelTable, grid: SettingTable, flags: SettingTable, source: str) -> Subject:
    place = f"grid '{source}', model '{table.path}' [evaluate]"
    if "trust_remote_code" in {**grid, **table.evaluate}:
        raise OptionError(f"{place}: no grid can set trust_remote_code")
    try:
        evaluation = read_as(Evaluation, {**grid, **table.evaluate, **flags})
    except ResultsError as error:
        raise OptionError(f"{place}: {error}") from None
    return Subject(table.path, table.label or Path(table.path).name, evaluation)
