"""The recipe: everything that determines a pruned model, besides the dense one."""

import dataclasses
import difflib
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coec import compensation as compensations
from coec import selection as selections
from coec.calibration.ids import token_ids
from coec.errors import OptionError
from coec.selection.budget import check_sparsity
from coec.settings import DTYPE_NAMES, SOLVE_DTYPE_NAMES, check_seed, check_whole, plain
from coec.types import Compensation, Gram, KeptSet

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
SOLVE_DTYPES = SOLVE_DTYPE_NAMES
APART = ("options", "trust_remote_code")
"""Fields that no recipe file or grid may hold: the one has its keys at the top level, and whether a
model's code may run is said by whoever runs it."""
TOML_BYTES = 10_000_000
"""The largest recipe or grid that is read."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Validated when made: no model is touched before every option is known to be good.

    Attributes:
        sparsity: the fraction of units removed from every block, strictly between 0 and 1.
        selection: a name in `SELECTIONS` or a function `(weight, gram) -> scores`.
        compensation: a name in `COMPENSATIONS` or a function
            `(weight, gram, kept, *, options) -> Compensation`.
        options: of the compensation, by name.
        calibration: `wikitext2`, `c4`, `hub:OWNER/NAME[:CONFIG]`, `self`, a path, or a tensor or
            array of token ids (n, or windows × length).
        samples: calibration windows.
        seq_len: tokens per window; None for 2048, or the model's maximum if that is less.
        seed: draws the windows, and the scores of `random`.
        holdout: the fraction of the windows whose statistics are kept apart, at least 0 and below
            1; they are not fitted on, and the report has every module's error on them.
        text_column: of a jsonl or parquet file, or of a data set named by `hub:`.
        device: `auto` (CUDA where there is one), or a torch device.
        dtype: of the written weights; None keeps the dense model's.
        forward_dtype: of the dense forward pass; None for the weights' own on CUDA, float32 on
            the CPU (float64 where the weights are).
        solve_dtype: of the compensation, float64 or float32.
        trust_remote_code: lets the model's tokenizer run Python code that comes with the model.
            It is not recorded: it changes who may run code, and not what is computed.

    Numbers may be numpy's or torch's, also in arrays without dimensions.
    """

    sparsity: float = 0.3
    selection: str | Callable[..., Tensor] = "rcpu"
    compensation: str | Callable[..., Compensation] = "coec"
    options: dict[str, Any] = field(default_factory=dict)
    calibration: str | Path | Tensor | np.ndarray = "wikitext2"
    samples: int = 128
    seq_len: int | None = None
    seed: int = 0
    holdout: float = 0.0
    text_column: str = "text"
    device: str = "auto"
    dtype: str | None = None
    forward_dtype: str | None = None
    solve_dtype: str = "float64"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self._make_plain()
        if not isinstance(self.sparsity, int | float) or isinstance(self.sparsity, bool):
            raise OptionError(f"sparsity must be a number, got {self.sparsity!r}")
        check_sparsity(self.sparsity)
        check_whole("samples", self.samples)
        if self.seq_len is not None:
            check_whole("seq_len", self.seq_len)
        if self.seq_len == 1:
            raise OptionError("seq_len must be at least 2")
        check_seed(self.seed)
        number = isinstance(self.holdout, int | float) and not isinstance(self.holdout, bool)
        if not (number and 0 <= self.holdout < 1):
            raise OptionError(
                f"holdout is a fraction of the windows, at least 0 and below 1, "
                f"got {self.holdout!r}"
            )
        for name in ("dtype", "forward_dtype"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or value not in DTYPES):
                raise OptionError(f"{name} must be one of {', '.join(DTYPES)}, got {value!r}")
        if self.solve_dtype not in SOLVE_DTYPES:
            raise OptionError(
                f"solve_dtype must be one of {', '.join(SOLVE_DTYPES)}, got {self.solve_dtype!r}"
            )
        for name in ("selection", "compensation", "calibration", "device", "text_column"):
            value = getattr(self, name)
            if isinstance(value, int | float | list | bool | None):
                raise OptionError(f"{name} must be text, got {value!r:.80}")
            if isinstance(value, str) and (not value or "\0" in value):
                raise OptionError(f"{name} must be text without NUL characters, got {value!r:.80}")
        if not isinstance(self.trust_remote_code, bool):
            raise OptionError(f"trust_remote_code is True or False, got {self.trust_remote_code!r}")
        if isinstance(self.selection, str):
            selections.resolve(self.selection)
        compensations.check_options(self.compensation, self.options)
        _rehearse(self)

    def _make_plain(self) -> None:
        """Numbers of numpy and torch become Python's, and an array of token ids a tensor."""
        for one in dataclasses.fields(self):
            object.__setattr__(self, one.name, plain(getattr(self, one.name)))
        options = {name: plain(value) for name, value in self.options.items()}
        object.__setattr__(self, "options", options)
        if isinstance(self.calibration, np.ndarray | Tensor):
            object.__setattr__(self, "calibration", token_ids(self.calibration))

    @classmethod
    def of(cls, **settings: Any) -> "Recipe":
        """A recipe from flat settings: its own fields, and options of the compensation.

        Raises:
            OptionError: an unknown setting or a bad value.
        """
        settings = {name: plain(value) for name, value in settings.items()}
        known = {f.name for f in dataclasses.fields(cls)}
        own = {name: value for name, value in settings.items() if name in known}
        for name in settings:
            if name not in known | compensations.OPTIONS and not callable(own.get("compensation")):
                close = difflib.get_close_matches(name, known | compensations.OPTIONS, 1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise OptionError(f"unknown setting '{name}'{hint}")
        options = {name: value for name, value in settings.items() if name not in known}
        return cls(**{**own, "options": {**own.get("options", {}), **options}})

    @classmethod
    def or_of(cls, recipe: "Recipe | None", settings: dict[str, Any]) -> "Recipe":
        """The recipe given, or one of settings; both at once would leave one unheard.

        Raises:
            OptionError: both are given, or a setting is unknown or bad.
        """
        if recipe is None:
            return cls.of(**settings)
        if settings:
            first = next(iter(settings))
            raise OptionError(f"give a recipe or settings, not both; got '{first}' too")
        return recipe

    @property
    def method(self) -> Callable[..., Compensation]:
        """The compensation as a function."""
        if isinstance(self.compensation, str):
            return compensations.resolve(self.compensation)
        return self.compensation

    @property
    def score(self) -> Callable[..., Tensor]:
        """The selection as a function."""
        if isinstance(self.selection, str):
            return selections.resolve(self.selection)
        return self.selection

    def record(self) -> dict[str, Any]:
        """The resolved recipe for the report, defaults of the compensation included."""
        defaults = {
            name: parameter.default
            for name, parameter in compensations.options_of(self.method).items()
        }
        return {
            "sparsity": self.sparsity,
            "selection": _name(self.selection),
            "compensation": _name(self.compensation),
            "options": {**defaults, **self.options},
            "calibration": "tensor"
            if isinstance(self.calibration, Tensor)
            else str(self.calibration),
            "text_column": self.text_column,
            "samples": self.samples,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "holdout": self.holdout,
            "dtype": self.dtype,
            "forward_dtype": self.forward_dtype,
            "solve_dtype": self.solve_dtype,
        }


def read_settings(path: Path) -> dict[str, Any]:
    """Flat settings from a TOML file, keys as in `Recipe.of` (dashes and underscores alike).

    Raises:
        OptionError: the file is missing, not TOML, or holds a table or a key that is apart.
    """
    content = read_toml(path, f"'{path}'", f"no configuration file '{path}'")
    for name in APART:
        if name in {key.replace("-", "_") for key in content}:
            raise OptionError(f"'{path}' holds '{name}', which no file can set")
    for key, value in content.items():
        if isinstance(value, dict):
            raise OptionError(f"'{path}' has a table [{key}]; write its keys at the top level")
    return {key.replace("-", "_"): value for key, value in content.items()}


def read_toml(path: Path, name: str, missing: str) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        path: of the file.
        name: what messages call it.
        missing: the message when it is not there.

    Raises:
        OptionError: it is missing, cannot be read, is too large, or is not TOML.
    """
    try:
        if path.stat().st_size > TOML_BYTES:
            raise OptionError(
                f"{name} is larger than {TOML_BYTES:,} bytes: it is no recipe or grid"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OptionError(missing) from error
    except OSError as error:
        raise OptionError(f"{name} cannot be read: {error.strerror}") from error
    # Besides its own errors: numbers of too many digits, NUL in a path, brackets without end.
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is not valid TOML: {error}") from error


def _name(choice: str | Callable[..., Any]) -> str:
    return choice if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))


def _rehearse(recipe: Recipe) -> None:
    """Tries score and compensation on a 6×8 problem: a bad option fails here, not after hours.

    Of the compensations of this package the numbers are checked with nothing removed, where they
    return at once; the whole of them runs once for every choice of methods, as grids have
    thousands of recipes.
    """
    words = tuple(sorted((k, v) for k, v in recipe.options.items() if isinstance(v, str)))
    try:
        if isinstance(recipe.compensation, str) and isinstance(recipe.selection, str):
            W, gram, everything = _problem(range(8))
            aligned = "value_weight" in inspect.signature(recipe.method).parameters
            value: dict[str, Any] = {"value_weight": W.T[:, :4]} if aligned else {}
            recipe.method(W, gram, everything, **value, **recipe.options)
            _rehearsed(recipe.selection, recipe.compensation, words)
        else:
            _run(recipe.score, recipe.compensation, recipe.options)
    except TypeError as error:
        raise OptionError(f"an option has the wrong type: {error}") from error


@functools.cache
def _rehearsed(selection: str, compensation: str, words: tuple[tuple[str, str], ...]) -> None:
    _run(selections.resolve(selection), compensation, dict(words))


def _run(
    score: Callable[..., Tensor],
    compensation: str | Callable[..., Compensation],
    options: dict[str, Any],
) -> None:
    W, gram, kept = _problem([0, 2, 3, 5, 6])
    scores = score(W, gram)
    compensations.compensate(W, gram, kept, method=compensation, value_weight=W[:5, :4], **options)
    if scores.shape != (8,):
        raise OptionError(
            f"a selection returns one score per column: expected shape (8,), got "
            f"{tuple(scores.shape)}"
        )


def _problem(kept: Iterable[int]) -> tuple[Tensor, Gram, KeptSet]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(8, 32, generator=generator, dtype=torch.float64)
    W = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    return W, Gram(X @ X.T, X.sum(dim=1), X.shape[1]), KeptSet(torch.tensor(list(kept)), 8)
