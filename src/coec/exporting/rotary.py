"""Rotary positions, as a GGUF file describes them."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from coec.errors import ModelError
from coec.models.description import Description, compute_buffers

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


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a model.

    Attributes:
        base: of the plain frequencies, `base^(−2i/d)`.
        scaling: of the frequencies.
        factor: of linear and yarn.
        original: the context length before scaling.
        factors: divisors of all plain frequencies, for `FACTORS`.
    """

    base: float
    scaling: str = PLAIN
    factor: float = 1.0
    original: int = 0
    factors: tuple[float, ...] = ()


def rotary_of(model: Description) -> Rotary:
    """Read a model's rotary positions as transformers does; raises ModelError for unknown ones."""
    network: Any = model.skeleton()
    compute_buffers(network, torch.device("cpu"))
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
    if scaling in (LINEAR, YARN):
        if settings.get("factor") is None:
            raise ModelError(
                f"rope_type '{rope_type}' in config.json has no factor: write it there"
            )
        factor = float(settings["factor"])
        if scaling == YARN:
            _check_yarn(float(network.base_model.rotary_emb.attention_scaling), factor)
        original = settings.get("original_max_position_embeddings") or model.positions
        return Rotary(base, scaling, factor, original)
    if scaling == PLAIN:
        return Rotary(base)
    return Rotary(base, scaling, factors=_factors(network.base_model.rotary_emb.inv_freq, base))


def _check_stored(settings: dict[str, Any], stored: set[str], rope_type: str) -> None:
    """Raises ModelError for a setting that would be lost, and changes what is computed."""
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
    """Divide plain frequencies by those of transformers: exactly 1 where they are equal."""
    steps = torch.arange(0, 2 * len(frequencies), 2, dtype=torch.int64).float()
    plain = 1.0 / base ** (steps / (2 * len(frequencies)))
    return tuple((plain / frequencies.float()).tolist())
