"""Sizes and constants of a model, for a GGUF file."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coec.errors import ModelError, OptionError
from coec.exporting.rotary import Rotary, rotary_of
from coec.models.architectures import ATTENTION, MLP
from coec.models.dense import Dense

_WINDOWED = ("mistral", "qwen2", "qwen3")
"""Model types whose attention may reach back over a limited window."""


@dataclass(frozen=True)
class Hyperparameters:
    """Sizes and constants of a model.

    Attributes:
        model_type: in its configuration.
        name: for people.
        hidden, head_dim, vocabulary: the same in all blocks.
        heads, kv_heads, ffn: of every block.
        context: largest number of tokens that the file states.
        epsilon: of its norms.
        rotary: positions.
        multipliers: Granite's, where they are not neutral, by their keys in the configuration.
    """

    model_type: str
    name: str
    hidden: int
    head_dim: int
    vocabulary: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn: tuple[int, ...]
    context: int
    epsilon: float
    rotary: Rotary
    multipliers: dict[str, float]

    @property
    def uniform(self) -> bool:
        """True where all blocks have the same widths."""
        return all(len(set(sizes)) == 1 for sizes in (self.heads, self.kv_heads, self.ffn))

    @classmethod
    def of(cls, model: Dense, context: int | None) -> "Hyperparameters":
        """Read them from an opened model.

        Args:
            context: tokens that the file says the model takes; None for those of its
                configuration.

        Raises:
            ModelError: it computes something that no GGUF file can describe.
            OptionError: the context is longer than the model's own.
        """
        config: Any = model.skeleton().config
        if config.hidden_act not in ("silu", "swish"):
            raise ModelError(f"hidden_act is '{config.hidden_act}': llama.cpp computes silu here")
        _check_context(model, config, context)
        sites = {(site.block, site.name): site for site in model.layout.sites}
        blocks = range(len(model.layout.blocks))
        attention = [sites[block, ATTENTION.name] for block in blocks]
        return cls(
            model_type=model.architecture.model_type,
            name=Path(model.name).resolve().name,
            hidden=model.shape.hidden,
            head_dim=model.shape.head_dim,
            vocabulary=model.vocabulary,
            heads=tuple(site.columns // model.shape.head_dim for site in attention),
            kv_heads=tuple(site.units for site in attention),
            ffn=tuple(sites[block, MLP.name].columns for block in blocks),
            context=model.positions if context is None else context,
            epsilon=float(config.rms_norm_eps),
            rotary=rotary_of(model),
            multipliers=_multipliers(config, model.shape.head_dim),
        )


def _check_context(model: Dense, config: Any, context: int | None) -> None:
    """Raises OptionError or ModelError where the programs would differ within the stated context.

    llama.cpp attends to all tokens, which is the same up to the length of a sliding window.
    """
    if context is not None and context > model.positions:
        raise OptionError(
            f"context must be at most the model's max_position_embeddings, {model.positions}; "
            f"got {context}"
        )
    window = _window(model, config)
    if window is not None and (context or model.positions) > window:
        raise ModelError(
            f"attention reaches back over a sliding window of {window} tokens, which llama.cpp "
            f"ignores here: beyond them it computes another model; pass context={window} for a "
            "file that says it takes no more"
        )


def _window(model: Dense, config: Any) -> int | None:
    """Length of the sliding window; None where no block has one."""
    if model.architecture.model_type not in _WINDOWED:
        return None
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    return config.sliding_window if slides else None


def _multipliers(config: Any, head_dim: int) -> dict[str, float]:
    """Granite's four multipliers; empty where they change nothing, or for another model type."""
    neutral = {
        "attention_multiplier": head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
    if config.model_type != "granite":
        return {}
    values = {key: float(getattr(config, key)) for key in neutral}
    idle = all(math.isclose(values[key], neutral[key], rel_tol=1e-6) for key in neutral)
    return {} if idle else values
