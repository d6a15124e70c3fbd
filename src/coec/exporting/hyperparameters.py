"""Sizes and constants of a model as a GGUF file describes them, and llama.cpp's architectures.

Every cell of the table of architectures was decided by running llama.cpp on a random model and
comparing logits (docs/FORMATS.md); a model that no architecture computes is refused.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coec.errors import ModelError, OptionError
from coec.models.calls import compute_buffers, decoder_of
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict

PLAIN, LINEAR, YARN, FACTORS = "none", "linear", "yarn", "factors"
"""Kinds of scaling. The first three are llama.cpp's words; the last is a tensor of factors."""
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Constants of yarn in llama.cpp; in transformers too, where a configuration has none."""
_SCALINGS = {
    "default": (PLAIN, set()),
    "linear": (LINEAR, {"factor"}),
    "yarn": (YARN, {"factor", "original_max_position_embeddings", "attention_factor"}),
    "llama3": (FACTORS, {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    }),
}  # fmt: skip
"""Kind of scaling by rope_type, and its settings that a GGUF file can hold."""
_WINDOWED = ("mistral", "qwen2", "qwen3")
"""Model types whose attention may reach back over a limited window."""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a model.

    Attributes:
        base: of the plain frequencies, `base^(−2i/d)`.
        factor: of linear and yarn scaling.
        original: the context length before scaling.
        factors: divisors of all plain frequencies, for `FACTORS`.
    """

    base: float
    scaling: str = PLAIN
    factor: float = 1.0
    original: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Hyperparameters:
    """Sizes and constants of a model that its `Shape` lacks.

    Attributes:
        name: for people.
        heads, kv_heads, ffn: of every block.
        context: largest number of tokens that the file states.
        epsilon: of its norms.
        multipliers: Granite's, where they are not neutral, by their keys in the configuration.
    """

    name: str
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn: tuple[int, ...]
    context: int
    epsilon: float
    rotary: Rotary
    multipliers: dict[str, float]

    @classmethod
    def of(cls, model: Dense, context: int | None) -> "Hyperparameters":
        """Read them from an opened model; its context is that of the configuration if None.

        Raises:
            ModelError: it computes something that no GGUF file can describe.
            OptionError: the context is longer than the model's own.
        """
        if model.architecture.model_type not in TARGETS:
            raise ModelError(
                f"coec export does not write model type '{model.architecture.model_type}'; it "
                f"writes {', '.join(TARGETS)}"
            )
        config: Any = model.skeleton().config
        if config.hidden_act not in ("silu", "swish"):
            raise ModelError(f"hidden_act is '{config.hidden_act}': llama.cpp computes silu here")
        _check_context(model, config, context)
        blocks = [model.shape.at(index) for index in range(model.shape.layers)]
        return cls(
            name=Path(model.name).resolve().name,
            heads=tuple(block.heads for block in blocks),
            kv_heads=tuple(block.kv_heads for block in blocks),
            ffn=tuple(block.ffn for block in blocks),
            context=model.positions if context is None else context,
            epsilon=float(config.rms_norm_eps),
            rotary=rotary_of(model),
            multipliers=_multipliers(config, model.shape.head_dim),
        )


def _check_context(model: Dense, config: Any, context: int | None) -> None:
    """Raises OptionError or ModelError where the programs would differ within the stated context.

    llama.cpp attends to all tokens, which is the same up to the length of a sliding window.
    """
    if context is not None and not 1 <= context <= model.positions:
        raise OptionError(
            f"context must be between 1 and the model's max_position_embeddings, "
            f"{model.positions}, got {context}"
        )
    # A window counts where some layer has one, as its class reads the configuration.
    window = None
    if model.architecture.model_type in _WINDOWED:
        layer_types = getattr(config, "layer_types", None)
        slides = layer_types is None or "sliding_attention" in layer_types
        window = config.sliding_window if slides else None
    if window is not None and (context or model.positions) > window:
        raise ModelError(
            f"attention reaches back over a sliding window of {window} tokens, which llama.cpp "
            f"ignores here: beyond them it computes another model; pass context={window} for a "
            "file that says it takes no more"
        )


def _multipliers(config: Any, head_dim: int) -> dict[str, float]:
    """Granite's four multipliers; empty where they change nothing, or for another model type."""
    if config.model_type != "granite":
        return {}
    ones = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    # Multipliers under which the model is a Llama need no place in the file.
    neutral = {"attention_multiplier": head_dim**-0.5} | dict.fromkeys(ones, 1.0)
    values = {key: float(getattr(config, key)) for key in neutral}
    idle = all(math.isclose(values[key], neutral[key], rel_tol=1e-6) for key in neutral)
    return {} if idle else values


def rotary_of(model: Description) -> Rotary:
    """Read a model's rotary positions as transformers does; raises ModelError for unknown ones."""
    # transformers computes the frequencies, with its defaults for keys that a configuration lacks.
    network: Any = model.skeleton()
    compute_buffers(decoder_of(network)[1], torch.device("cpu"))
    config = network.config
    # One dictionary in transformers 5; in 4.57 the base is apart.
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    settings = dict(settings or {})
    base = float(settings.pop("rope_theta", None) or config.rope_theta)
    rope_type = settings.pop("rope_type", None) or settings.get("type") or "default"
    settings.pop("type", None)
    if rope_type not in _SCALINGS:
        raise ModelError(
            f"rope_type '{rope_type}' in config.json is none that llama.cpp computes in the same "
            f"way; supported: {', '.join(_SCALINGS)}"
        )
    scaling, stored = _SCALINGS[rope_type]
    _check_stored(settings, stored, rope_type)
    if scaling == PLAIN:
        return Rotary(base)
    embedding = network.base_model.rotary_emb
    # llama.cpp computes linear and yarn scaling from a factor; others need divisors in the file.
    if scaling == FACTORS:
        return Rotary(base, scaling, factors=_factors(embedding.inv_freq, base))
    if settings.get("factor") is None:
        raise ModelError(f"rope_type '{rope_type}' in config.json has no factor: write it there")
    factor = float(settings["factor"])
    if scaling == YARN:
        _check_yarn(float(embedding.attention_scaling), factor)
    original = settings.get("original_max_position_embeddings") or model.positions
    return Rotary(base, scaling, factor, original)


def _check_stored(settings: JsonDict, stored: set[str], rope_type: str) -> None:
    """Raises ModelError for a setting that would be lost, and that changes the computation."""
    for key, value in settings.items():
        neutral = {**_YARN_DEFAULTS, "partial_rotary_factor": 1.0}.get(key)
        if key not in stored and value is not None and value != neutral:
            raise ModelError(
                f"{key}={str(value)[:40]} of rope_type '{rope_type}' in config.json has no place "
                "in a file that llama.cpp computes in the same way"
            )


def _check_yarn(scaling: float, factor: float) -> None:
    """Raises ModelError unless cosines are scaled as llama.cpp does, by `1 + ln(factor) / 10`."""
    expected = 1.0 + 0.1 * math.log(factor)
    if not math.isclose(scaling, expected, rel_tol=1e-6):
        raise ModelError(
            f"yarn's attention factor is {scaling:.6g}: llama.cpp computes 1 + 0.1 ln(factor), "
            f"{expected:.6g} here"
        )


def _factors(frequencies: torch.Tensor, base: float) -> tuple[float, ...]:
    """Divide plain frequencies by the frequencies of transformers: exactly 1 if they are equal."""
    steps = torch.arange(0, 2 * len(frequencies), 2, dtype=torch.int64).float()
    # As transformers computes them, in float32: equal frequencies must give a factor of exactly 1.
    plain = 1.0 / base ** (steps / (2 * len(frequencies)))
    return tuple((plain / frequencies.float()).tolist())


@dataclass(frozen=True)
class ExportTarget:
    """An architecture of llama.cpp.

    Attributes:
        interleaved: True where it turns neighbouring rows of queries and keys, while transformers
            turns a row and the one half a head further on: the rows are then stored in its order.
        biases: projections that may have one.
        factors: True where it reads a factor for every rotary frequency.
        multipliers: True where it multiplies embeddings, attention, residuals and logits.
        by_block: True if widths may differ by block.
    """

    name: str
    interleaved: bool
    biases: frozenset[str]
    factors: bool = False
    multipliers: bool = False
    by_block: bool = False

    def refusal(self, model: Description, facts: Hyperparameters) -> str | None:
        """Reason why it does not compute a model; None where it does."""
        if not (model.shape.uniform or self.by_block):
            return "its blocks are all of one width"
        if facts.multipliers and not self.multipliers:
            return f"it has no {', '.join(facts.multipliers)}"
        if facts.rotary.scaling == FACTORS and not self.factors:
            return "it reads no factors of rotary frequencies (rope_type llama3)"
        for name in model.shapes:
            module, _, suffix = name.rpartition(".")
            if suffix == "bias" and module.rpartition(".")[2] not in self.biases:
                return f"it has no {name}"
        return None


_ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
_LLAMA = ExportTarget("llama", interleaved=True, biases=_ALL, factors=True)
_GRANITE = ExportTarget("granite", interleaved=True, biases=_ALL, factors=True, multipliers=True)
_DECI = ExportTarget("deci", interleaved=True, biases=_ALL, factors=True, by_block=True)
_QWEN3 = ExportTarget("qwen3", interleaved=False, biases=frozenset())

TARGETS: dict[str, tuple[ExportTarget, ...]] = {
    "llama": (_LLAMA, _DECI),
    "mistral": (_LLAMA, _DECI),
    "qwen2": (_LLAMA, _DECI),  # llama.cpp's own qwen2 takes heads for as wide as the hidden states
    "qwen3": (_QWEN3,),  # the only one with norms of queries and keys
    "granite": (_LLAMA, _GRANITE, _DECI),  # a pruned Llama with biases is stored as Granite
    "seed_oss": (_LLAMA, _DECI),  # llama.cpp's own has biases of q, k and v only
}
"""Architectures that may hold a model type; the first that does is taken."""


def choose_target(model: Description, facts: Hyperparameters) -> ExportTarget:
    """Return llama.cpp's first architecture that computes the model; ModelError if none does."""
    refusals: list[str] = []
    for target in TARGETS[model.architecture.model_type]:
        refusal = target.refusal(model, facts)
        if refusal is None:
            return target
        refusals.append(f"not {target.name}: {refusal}")
    raise ModelError(f"no architecture of llama.cpp computes this model ({'; '.join(refusals)})")
