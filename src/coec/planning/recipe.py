"""The recipe: every setting that determines a pruned model, besides the dense one."""

import json
import stat
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from coec.allocation.by_importance import ALLOCATIONS, Rule
from coec.allocation.kept import KeptUnits, named
from coec.calibration.tokens import source_of
from coec.compensation import Method, compensate
from coec.compensation.methods import called
from coec.errors import OptionError, did_you_mean
from coec.models.files import JsonDict
from coec.selection import SELECTIONS, column_scores
from coec.settings import (
    NAMES,
    OPTIONS,
    PARTS,
    Calibration,
    Pruning,
    Reconstruction,
    Runtime,
)
from coec.settings.fields import plain, without_effect
from coec.settings.presets import with_preset
from coec.settings.typed import PruningSettings
from coec.types import Gram, KeptSet

APART = ("options", "trust_remote_code")
"""Settings that no recipe file or grid may hold: options stand at the top level there, and whoever
runs a model decides whether its code may run."""
_ARGUMENTS = (
    "model", "dense", "pruned", "out", "recipe", "config", "statistics", "force", "restart",
    "progress", "dry_run", "json",
)  # fmt: skip
"""Arguments of commands and functions besides settings."""
_PARTS = {part.__name__.lower(): part for part in PARTS}
"""The parts of a recipe, by the names of its attributes."""
_RECONSTRUCTION = Reconstruction().record()
"""Defaults of the reconstruction."""
_TOML_BYTES = 10_000_000
"""Size of the largest recipe or grid that is read."""


@dataclass(frozen=True, init=False)
class Recipe:
    """Settings of a pruning, checked when it is made: before any model is touched.

    A preset is where defaults come from, so `Recipe(preset="best", sparsity=0.5, ridge=0.02)` is
    `best` with two other settings. Numbers may be numpy's or torch's, also in arrays without
    dimensions; token ids a tensor or an array.

    Args:
        settings: by name, options of the compensation among them; or all the parts, as they are.

    Attributes:
        calibration: all that statistics depend on.
        pruning: what is removed, and how that is compensated.
        reconstruction: how the pruned model is brought nearer to the dense one besides.
        runtime: where it is done, by which results differ as rounding does.
        given: names of the settings that the user gave: a preset's default may yield to a model or
            a text (`coec.planning.resolve`), a setting that was given never does.

    Raises:
        OptionError: an unknown setting, a bad value, or settings that do not go together.
    """

    calibration: Calibration
    pruning: Pruning
    reconstruction: Reconstruction
    runtime: Runtime
    given: frozenset[str] = field(compare=False)

    def __init__(
        self, *, given: frozenset[str] | None = None, **settings: Unpack[PruningSettings]
    ) -> None:
        values: dict[str, Any] = dict(settings)
        parts = {n: values[n] for n, part in _PARTS.items() if isinstance(values.get(n), part)}
        if parts and (len(parts) < len(_PARTS) or len(values) > len(parts)):
            raise OptionError(
                'give the settings of a Recipe by name (preset="best", sparsity=0.5), or all of '
                "its parts and nothing besides"
            )
        # Settings by name → a preset's defaults beside them → options apart → the parts
        if not parts:
            flat = {name: plain(value) for name, value in values.items()}
            given = frozenset(flat) if given is None else given
            flat = _with_options(with_preset(flat))
            parts = {name: part.of(flat) for name, part in _PARTS.items()}
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "given", given or frozenset())
        self._check()

    def _check(self) -> None:
        calibration = self.calibration
        # Arrays become tensors of token ids; lists and generators become documents, read once.
        source = source_of(calibration.source, calibration.text_column)
        if source is not calibration.source:
            object.__setattr__(self, "calibration", replace(calibration, source=source))
        self.method.chosen(self.pruning.options)
        self._check_reconstruction()
        if self.own_functions:
            _rehearse(self)

    def _check_reconstruction(self) -> None:
        """Raise OptionError where its settings have no effect, or need validation windows."""
        settings = self.reconstruction.record()
        for name, why in self.reconstruction.idle().items():
            if settings[name] != _RECONSTRUCTION[name]:
                raise without_effect(name, why)
        if settings["kv_groups"] == "held-out" and not self.calibration.holdout:
            raise OptionError(
                "kv_groups = held-out needs validation windows: set holdout, say to 0.125"
            )

    @property
    def own_functions(self) -> list[str]:
        """Names of the settings that are functions of the user's own."""
        pruning = self.pruning
        chosen = {"selection": pruning.selection, "compensation": pruning.compensation}
        return [name for name, choice in chosen.items() if not isinstance(choice, str)]

    @property
    def needs_text(self) -> str | None:
        """Name of the setting that runs pruned models over the text; None where sums will do."""
        allocation = f"allocation = {self.pruning.allocation}"
        runs_models = self.allocation.runs_models
        return self.reconstruction.sequential or (allocation if runs_models else None)

    @property
    def fits_validation(self) -> bool:
        """True where compensations are fitted on their validation windows too, in the end.

        False where the user sets them aside, and where they validate the reconstruction too.
        """
        return bool(self.calibration.guard_share) and not self.reconstruction.sequential

    @classmethod
    def or_of(cls, recipe: "Recipe | None", settings: PruningSettings) -> "Recipe":
        """Return the recipe given, or one of settings; both at once are refused."""
        if recipe is None:
            return cls(**settings)
        if settings:
            first = next(iter(settings))
            raise OptionError(f"give a recipe or settings, not both; got '{first}' too")
        if not isinstance(recipe, cls):
            raise OptionError(
                f"what follows the folder is a Recipe, got {recipe!r:.80}: name a setting "
                "(sparsity=0.3)"
            )
        return recipe

    @property
    def method(self) -> Method:
        """The compensation, with the needs that it declares."""
        return Method.of(self.pruning.compensation)

    @property
    def allocation(self) -> Rule:
        """The rule that shares the kept units among blocks."""
        return ALLOCATIONS[self.pruning.allocation]

    @property
    def score(self) -> Callable[..., Tensor]:
        """The selection as a function."""
        selection = self.pruning.selection
        return SELECTIONS[selection] if isinstance(selection, str) else selection

    def opened(self) -> "Recipe":
        """Return the recipe with its kept units read: a file that changes later changes nothing."""
        if self.pruning.kept is None:
            return self
        return replace(self, pruning=replace(self.pruning, kept=KeptUnits.read(self.pruning.kept)))

    @property
    def kept(self) -> KeptUnits | None:
        """Kept units that were named, of an opened recipe."""
        kept = self.pruning.kept
        assert kept is None or isinstance(kept, KeptUnits)  # `opened` read them
        return kept

    def record(self) -> JsonDict:
        """Return the resolved recipe for the report, defaults of the compensation included."""
        source = self.calibration.source
        return {
            **self.pruning.record(),
            **self.reconstruction.record(),
            **self.calibration.record(),
            "selection": _name(self.pruning.selection),
            "kept": named(self.pruning.kept),
            "compensation": self.method.name,
            "options": {**self.method.defaults, **self.pruning.options},
            "calibration": "tensor" if isinstance(source, Tensor) else str(source),
        }


def read_settings(path: Path) -> JsonDict:
    """Return flat settings from a TOML file; dashes and underscores in keys are alike.

    Raises OptionError where the file is missing, not TOML, or holds a table, a key that is no
    setting or apart, or a setting twice.
    """
    content = read_toml(path, f"'{path}'", f"no configuration file '{path}'")
    # Every key must be a setting that a file may hold.
    keys = by_name(content, f"'{path}'")
    for name, key in keys.items():
        if name in APART:
            raise OptionError(f"'{path}' holds '{name}', which no file can set")
        if isinstance(content[key], dict):
            raise OptionError(f"'{path}' has a table [{key}]; write its keys at the top level")
        if isinstance(content[key], list):
            raise OptionError(f"'{path}' gives '{key}' a list, which no setting of a file is")
        if name not in NAMES:
            near = did_you_mean(name, NAMES.union(APART))
            hint = ": give it to the command" if name in _ARGUMENTS else near
            raise OptionError(f"'{path}' holds '{key}', which is no setting{hint}")
    return {name: content[key] for name, key in keys.items()}


def by_name(keys: Iterable[str], name_of_file: str) -> dict[str, str]:
    """Return the keys of a file by the names of their settings; OptionError where two are one."""
    names: dict[str, str] = {}
    for key in keys:
        name = key.replace("-", "_")
        if name in names:
            raise OptionError(f"{name_of_file} sets {name} twice, as '{names[name]}' and '{key}'")
        names[name] = key
    return names


def read_toml(path: Path, name: str, missing: str) -> JsonDict:
    """Return the content of a TOML file, which messages call `name`.

    Raises OptionError where it cannot be read or is too large, `missing` where it is not there.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise OptionError(f"{name} is a pipe or a device: give a regular file")
        if status.st_size > _TOML_BYTES:
            raise OptionError(
                f"{name} is larger than {_TOML_BYTES:,} bytes: it is no recipe or grid"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OptionError(missing) from error
    except OSError as error:
        raise OptionError(f"{name} cannot be read: {error.strerror}") from error
    # Besides its own errors: numbers of too many digits, NUL in a path, brackets without end.
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is not valid TOML: {error}") from error


def _with_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the options of the compensation under `options`.

    Raises OptionError for an unknown setting, unless it may be an option of a user's function.
    """
    known_names = NAMES.union(APART)
    options = {option.name for option in OPTIONS}
    settings_of_parts = {k: v for k, v in settings.items() if k in known_names and k not in options}
    for name in settings:
        if name not in known_names and not callable(settings_of_parts.get("compensation")):
            raise OptionError(f"unknown setting '{name}'{did_you_mean(name, known_names)}")
    chosen = {name: value for name, value in settings.items() if name not in settings_of_parts}
    return settings_of_parts | {"options": {**settings_of_parts.get("options", {}), **chosen}}


def _name(choice: str | Callable[..., Any]) -> str:
    return choice if isinstance(choice, str) else called(choice)


def _rehearse(recipe: Recipe) -> None:
    """Try the functions of a user on a 6×8 problem: what is wrong fails here, not after hours."""
    # The selection first, then the compensation on units that are given
    W, gram, kept = _problem([0, 2, 3, 5, 6])
    _rehearse_selection(f"selection '{_name(recipe.pruning.selection)}'", recipe.score, W, gram)
    name, options = f"compensation '{recipe.method.name}'", recipe.pruning.options
    try:
        result = compensate(W, gram, kept, method=recipe.method, value_weight=W[:5, :4], **options)
    except TypeError as error:
        raise OptionError(f"{name} fails on a small problem with these options: {error}") from error
    try:
        json.dumps([options, result.diagnostics], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{name} has options or diagnostics that no report holds: {error}"
        ) from error


def _rehearse_selection(name: str, score: Callable[..., Any], W: Tensor, gram: Gram) -> None:
    try:
        scores = column_scores(score, W, gram, units=4, keep=3, seed=0)
    except TypeError as error:
        raise OptionError(
            f"{name} fails on a small problem; it is called with (weight, gram), and with units, "
            f"keep and seed by keyword where it declares them: {error}"
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != (8,):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise OptionError(
            f"{name} must return one score per column, a tensor of shape (8,), got {got}"
        )


def _problem(kept: Iterable[int]) -> tuple[Tensor, Gram, KeptSet]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(8, 32, generator=generator, dtype=torch.float64)
    W = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    return W, Gram(X @ X.T, X.sum(dim=1), X.shape[1]), KeptSet(torch.tensor(list(kept)), 8)
