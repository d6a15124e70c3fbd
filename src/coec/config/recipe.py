"""The recipe: every setting that determines a pruned model, with presets as sets of defaults."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, field_validator, model_validator

from coec.config import DtypeName, Settings, asks, called, own_parts, setting, without_effect
from coec.errors import OptionError

SelectionName = Literal["rcpu", "wanda-sp", "flap", "obs", "magnitude", "random"]
CompensationName = Literal["coec", "rcpu", "bias", "least-squares", "ridge-to-slice", "none"]
PresetName = Literal["paper", "fast", "balanced"]
TargetName = Literal["hf", "vllm", "llama.cpp"]
AttentionUnits = Literal["groups", "heads", "auto"]
StartRule = Literal["auto", "on", "off"]
DEFAULT_PRESET: PresetName = "balanced"
HOLDOUT = 0.125
"""Fraction of the windows that `balanced` sets aside for validation."""
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b", re.IGNORECASE)

_CLOSED_FORMS: dict[str, Any] = {
    "multiple_of": "auto", "selection": "obs", "compensation": "ridge-to-slice",
    "attention_sparsity": 0.0, "propagate": True, "bos": "auto",
}  # fmt: skip
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("COEC: the source's objective, solved by this project's solver.", {}),
    "fast": (
        "Closed forms only, on the inputs that the pruned model has.",
        _CLOSED_FORMS | {"ridge": "auto"},
    ),
    "balanced": (
        "Every block trained, briefly, towards the dense model's hidden states.",
        _CLOSED_FORMS | {"ridge": "energy", "reconstruct": 4, "holdout": HOLDOUT},
    ),
}
"""What every preset is for, and the defaults by which it differs from the settings' own."""
_DEFAULTS = {name: defaults for name, (_, defaults) in reversed(PRESETS.items())}
"""Defaults by preset, those of DEFAULT_PRESET first."""


class Recipe(Settings):
    """Settings of a pruning, checked when it is made: before any model is touched.

    A preset is where defaults come from: `Recipe(preset="fast", sparsity=0.5, ridge=0.02)` is
    `fast` with two other settings. Options of the compensation are given by name too.

    Raises:
        OptionError: an unknown setting, a bad value, or settings that do not go together.
    """

    presets = _DEFAULTS

    # What to remove
    sparsity: float = setting(0.3, ge=0, lt=1, heading="What to remove")
    """Fraction of the units that is removed: MLP channels, those of every expert, and in `paper`
    units of attention. 0.3 of the channels is 17 to 20 % of the parameters of most models; for a
    share of the parameters give a budget."""
    attention_sparsity: float | None = setting(
        None,
        ge=0,
        lt=1,
        otherwise="0; as sparsity in paper, by_block (but for target vllm) and if attention_units "
        "are given",
    )
    """Fraction of the units of attention that is removed; 0 keeps attention whole."""
    attention_units: AttentionUnits = "groups"
    """Units that attention loses: whole KV `groups`, or query `heads`, the same number in every
    group, which leaves the KV cache as it is. `auto` takes heads if no whole group would be removed
    or fewer groups could not be divided over the same numbers of GPUs."""
    expert_sparsity: float = setting(0.0, ge=0, lt=1)
    """Fraction of whole experts that is removed, the same number in every block: those that add
    least to the tokens routed to them."""
    drop_blocks: int = setting(0, ge=0)
    """Number of whole blocks that are removed too, each time the block without which predictions
    change least. The first and the last block are kept."""
    vocabulary: int | None = setting(None, ge=1, otherwise="all")
    """Number of tokens that are kept: special tokens, bytes, those of chat templates, and those
    that are most frequent in `vocabulary_text`. Words without a token are written in pieces. With
    sparsity 0 only the vocabulary is cut."""
    vocabulary_text: str | None = setting(None, otherwise="the calibration text")
    """Text in which tokens are counted, up to 16 million of them; a mixture counts by its shares.
    """
    pad_vocabulary: int | None = setting(None, ge=1, otherwise="none")
    """Number of rows of the embedding and the head: the vocabulary of the larger model whose draft
    this one will be. Rows without a token are the mean of all others, and so improbable."""
    budget: str | None = setting(None, otherwise="what sparsity leaves")
    """What the pruned model may take, instead of a sparsity: a share of the parameters (0.8), their
    number (5600000000), or the memory of a server (16GB, 14.5GiB) for the weights as written and
    the keys and values of `context` tokens. Attention is kept if the budget can be met so, except
    in paper and by_block."""
    budget_active: str | None = setting(None, otherwise="what sparsity leaves")
    """What the parameters that one token passes may be, those of its chosen experts among them,
    instead of a sparsity: a share of them (0.8) or their number."""
    context: int = setting(8192, ge=1)
    """Number of tokens, over all sequences, whose keys and values a budget of memory includes."""
    by_block: bool = False
    """Let widths differ by block: units are kept where a parameter lowers the error of the
    predictions most. Takes a second dense pass. A page of code is written with the weights, and
    loaders need trust_remote_code."""
    multiple_of: str = setting("1")
    """Kept MLP channels are rounded up to a multiple of this; `auto` takes the largest of 256, 128,
    64 and 32 that adds at most 3 % of them."""
    tensor_parallel: int = setting(1, ge=1, le=16)
    """Number of GPUs over which a server can divide every layer."""
    selection: SelectionName | Callable[..., Any] = "rcpu"
    """Score that selects the units."""
    kept: Any = setting(None, otherwise="none: all are selected")
    """Units that are kept, by site: a safetensors or JSON file, a folder that coec pruned, or a
    folder that another program pruned from MODEL."""
    target: TargetName = "hf"
    """Program that must load the result: transformers (`hf`), `vllm` or `llama.cpp`."""
    dtype: DtypeName | None = setting(None, otherwise="the model's")
    """Dtype of the written weights."""

    # How to compensate
    preset: PresetName = setting(DEFAULT_PRESET, heading="How to compensate")
    """Set of defaults: `paper` (COEC), `fast` (closed forms, block after block) or `balanced`
    (every block trained, briefly). Any other setting wins over it."""
    compensation: CompensationName | Callable[..., Any] = "coec"
    """Method that compensates for the removed units."""
    propagate: bool = False
    """Calibrate every block on the inputs that the pruned model has, and correct the error so
    far."""
    reconstruct: int = setting(0, ge=0)
    """Passes over the windows in which all weights of a block are trained towards the dense model's
    hidden states after it."""

    # Calibration
    text_column: str = setting("text", heading="Calibration")
    """Column of a jsonl or parquet file, or of a hub: data set."""
    calibration: Any = "wikitext2"
    """Text: wikitext2; c4; hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (their train splits); self (text
    that the model writes); self:PROMPTS.jsonl (its answers to prompts); a .txt, .jsonl, .parquet,
    .npy or .safetensors file; or several of these with shares of the windows: a.txt=2,b.jsonl=1."""
    answer_tokens: int | None = setting(None, ge=1, otherwise="as many as a window has")
    """Number of tokens of the longest answer to a prompt."""
    samples: int = setting(128, ge=1)
    """Number of calibration windows."""
    seq_len: int | None = setting(None, ge=2, otherwise="2048, or the model's maximum if less")
    """Tokens per window."""
    seed: int = setting(0, ge=0)
    """Random seed for drawing windows."""
    holdout: float = setting(0.0, ge=0, lt=1)
    """Fraction of the windows that validates the training of blocks and the pruned model."""
    bos: StartRule = "off"
    """Begin every window with the tokens that the tokenizer puts before a text: `on`, `off`, or
    `auto`, whichever lets the dense model predict a few windows better."""
    forward_dtype: DtypeName | None = setting(
        None, otherwise="the model's on a GPU; float32 on the CPU"
    )
    """Dtype of the forward passes."""
    device: str = setting("auto", heading="Where to run")
    """auto (a GPU if there is one), cpu, cuda, cuda:1, …"""

    options: dict[str, Any] = setting({})
    """Options of the compensation, by name."""
    trust_remote_code: bool = False
    """Whether the model's tokenizer may run Python code that comes with the model."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return _completed(settings, cls.model_fields)

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        _check_together(self)
        return self

    @field_validator("kept", "calibration", "vocabulary_text", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("multiple_of", "budget", "budget_active", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return str(int(value) if value >= 1 and value % 1 == 0 else value)

    @field_validator("multiple_of")
    @classmethod
    def _is_multiple(cls, multiple: str) -> str:
        if not re.fullmatch(r"auto|[1-9][0-9]{0,5}", multiple):
            raise ValueError("be auto or a whole number such as 64")
        return multiple

    @field_validator("budget")
    @classmethod
    def _is_budget(cls, budget: str | None) -> str | None:
        if budget is not None and not memory_size(budget) and not parameter_count(budget):
            raise ValueError("be a share such as 0.8, a number of parameters, or a size like 16GB")
        return budget

    @field_validator("budget_active")
    @classmethod
    def _is_count(cls, budget: str | None) -> str | None:
        if budget is not None and not parameter_count(budget):
            raise ValueError("be a share such as 0.8, or a number of parameters")
        return budget

    @property
    def limit(self) -> tuple[str, str] | None:
        """Name and value of the budget that is given; None if there is none."""
        limits = {"budget": self.budget, "budget_active": self.budget_active}
        return next(((name, value) for name, value in limits.items() if value is not None), None)

    @property
    def multiple(self) -> int | None:
        """Number of which kept MLP channels are a multiple; None if it is chosen."""
        return None if self.multiple_of == "auto" else int(self.multiple_of)

    @property
    def own(self) -> bool:
        """True if the dense model writes the text, or a part of it."""
        return bool(own_parts(self.calibration))

    @property
    def sequential(self) -> bool:
        """True if a block depends on the blocks before it."""
        return self.propagate or self.reconstruct > 0

    def record(self, *without: str) -> dict[str, Any]:
        """Return all settings but some by name, ready for JSON; a function by its own name."""
        chosen = {name: getattr(self, name) for name in self.own_functions}
        names = {n: getattr(value, "name", None) or called(value) for n, value in chosen.items()}
        if not isinstance(self.calibration, str):
            names["calibration"] = "tensor" if hasattr(self.calibration, "dtype") else "documents"
        if self.kept is not None and not isinstance(self.kept, str):
            names["kept"] = called(self.kept).lower()
        return super().record(*without, *names) | names

    @property
    def own_functions(self) -> list[str]:
        """Names of the settings that are functions of the user's own."""
        return [n for n in ("selection", "compensation") if not isinstance(getattr(self, n), str)]


def memory_size(size: str) -> int:
    """Return the bytes of a size such as 16GB (10⁹ each) or 14.5GiB (2³⁰); 0 if it is none."""
    match = _MEMORY.fullmatch(size.strip())
    if match is None:
        return 0
    power = "kmgt".index(match[2].lower()) + 1
    return int(float(match[1]) * (2**10 if match[3] else 10**3) ** power)


def parameter_count(budget: str) -> float:
    """Return a number of parameters, or a share of them below 1; 0 if the budget is neither."""
    try:
        count = float(budget.replace(",", "").replace("_", ""))
    except ValueError:
        return 0
    return count if 0 < count < 1 or (count >= 1 and count % 1 == 0) else 0


def _completed(settings: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the defaults of their preset, and options under `options`.

    A default that would have no effect with the settings given is left out.

    Raises:
        OptionError: an option of another compensation than the preset's, and none is named.
    """
    name = settings.get("preset", DEFAULT_PRESET)
    if not isinstance(name, str) or name not in PRESETS:
        return settings  # refused with the others
    defaults = {key: value for key, value in PRESETS[name][1].items() if key not in settings}
    ridge = defaults.pop("ridge", None)
    # Attention stays whole unless it is asked for, or shares a budget by block.
    if "attention_units" in settings or (
        settings.get("by_block") and settings.get("target") != "vllm"
    ):
        defaults.pop("attention_sparsity", None)
    if settings.get("reconstruct") == 0 and not settings.get("propagate", True):
        defaults.pop("holdout", None)
    if settings.get("samples") == 1:
        defaults.pop("holdout", None)
    completed = {"preset": name, "compensation": "coec"} | defaults | settings
    # Options by name, those of a function of the user's own included
    options = dict(settings.get("options", {}))
    chosen, own = completed["compensation"], callable(completed["compensation"])
    fields = {} if own else OPTIONS_OF[chosen].model_fields if chosen in OPTIONS_OF else {}
    for key in [key for key in settings if key not in known]:
        if key in fields or (own and not any(key in o.model_fields for o in OPTIONS_OF.values())):
            options[key] = completed.pop(key)
        elif methods := [m for m, o in OPTIONS_OF.items() if key in o.model_fields]:
            raise OptionError(
                f"{key} is an option of compensation {' and '.join(methods)}, and "
                f"{chosen if not own else 'a function'} compensates here: set "
                f"compensation={methods[-1]}" + (" or preset=paper" if methods == ["coec"] else "")
            )
    if ridge is not None and "ridge" in fields and "compensation" not in settings:
        options.setdefault("ridge", ridge)
    return completed | {"options": options}


def _check_together(recipe: Recipe) -> None:
    """Raise OptionError if settings do not go together."""
    given = recipe.model_fields_set
    if "context" in given and not memory_size(recipe.budget or ""):
        raise without_effect("context", "without budget of memory, such as 16GB")
    if recipe.budget is not None and recipe.budget_active is not None:
        raise OptionError("budget and budget_active are both a budget: give one of them")
    if recipe.limit is not None and "sparsity" in given:
        raise without_effect("sparsity", f"with {' = '.join(recipe.limit)}")
    if "holdout" in given and recipe.holdout and not recipe.sequential:
        raise without_effect("holdout", "with neither propagate nor reconstruct")
    if recipe.drop_blocks and not recipe.sequential:
        raise OptionError(
            "drop_blocks needs blocks that are solved on the states of the pruned model: set "
            "propagate or reconstruct (preset = balanced does)"
        )
    if recipe.compensation in OPTIONS_OF:
        options = OPTIONS_OF[str(recipe.compensation)](**recipe.options)
        for option, why in options.idle().items():
            if option in recipe.options:
                raise without_effect(option, f"with {why}")
    if recipe.vocabulary is None and recipe.vocabulary_text is not None:
        raise without_effect("vocabulary_text", "without vocabulary = N")
    if recipe.pad_vocabulary is not None and recipe.pad_vocabulary < (recipe.vocabulary or 1):
        raise OptionError(
            f"pad_vocabulary must be at least vocabulary = {recipe.vocabulary:,}, got "
            f"{recipe.pad_vocabulary:,}"
        )
    counted = recipe.calibration if recipe.vocabulary_text is None else recipe.vocabulary_text
    if recipe.answer_tokens is not None and not asks(recipe.calibration):
        raise without_effect("answer_tokens", "without calibration = self:PROMPTS.jsonl")
    if recipe.vocabulary is not None and own_parts(counted):
        raise OptionError(
            "vocabulary counts the tokens of a text, and self is none: set vocabulary_text"
        )
    units = recipe.attention_units if "attention_units" in given else "auto"
    if units != "auto" and recipe.attention_sparsity == 0:
        raise without_effect(f"attention_units = {units}", "with attention_sparsity = 0")


class Options(Settings):
    """Options of a method."""

    def idle(self) -> dict[str, str]:
        """Return options that have no effect with the others, and why."""
        return {}


class CoecOptions(Options):
    """Options of COEC (docs/METHODS.md §5)."""

    alpha: float = setting(0.9, ge=0, le=1)
    """Gram tempering exponent in [0, 1]; 1 is off, 0 returns the slice."""
    rotation: Literal["two-sided", "left", "right"] = "two-sided"
    """Factors that are rotated."""
    parameterization: Literal["stiefel", "full"] = "stiefel"
    """`stiefel` rotates the b×k frame, `full` all of O(k)."""
    rescale: Literal["gcv", "fixed"] = "gcv"
    """Ridge of the modes' scales: chosen by generalised cross-validation (`gcv`), or the median
    mode energy (`fixed`)."""
    kappa: float = setting(10.0, ge=1)
    """Largest factor, at least 1, between a mode's scale and the global one."""
    solver: Literal["joint", "gradient"] = "joint"
    """Solver of the right factor: `joint` (conjugate gradient, the left factor following) or
    `gradient` (as published)."""
    lambda_a: float = setting(50.0, ge=0)
    """Weight of the alignment penalty."""
    r_p: int = setting(16, ge=1)
    """Rank of the aligned subspaces, capped at the frame's."""

    def idle(self) -> dict[str, str]:
        """Return options that have no effect with the others, and why."""
        if self.alpha == 0:
            return dict.fromkeys(type(self).model_fields.keys() - {"alpha"}, "alpha = 0")
        idle = {"r_p": "lambda_a = 0"} if self.lambda_a == 0 else {}
        if self.rotation == "left":
            idle |= dict.fromkeys(("solver", "parameterization"), "rotation = left")
        return idle


class RidgeOptions(Options):
    """Options of the ridge regressions (docs/METHODS.md §4)."""

    ridge: NonNegativeFloat | Literal["auto", "energy"] = setting(
        1e-2, otherwise="auto in fast, energy in balanced, else 0.01"
    )
    """λ relative to the mean diagonal of Gxx, at least 0; `energy` penalises every channel by its
    own energy, `auto` by less of it the more tokens there are."""


OPTIONS_OF: dict[str, type[Options]] = {
    "coec": CoecOptions, "least-squares": RidgeOptions, "ridge-to-slice": RidgeOptions,
}  # fmt: skip
"""Options of every compensation that has some."""
