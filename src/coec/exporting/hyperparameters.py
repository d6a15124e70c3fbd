"""What a GGUF file says of a model besides its weights and its tokenizer."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coec.errors import ModelError, OptionError
from coec.exporting.rotary import Rotary, rotary_of
from coec.models.block_patterns import ATTENTION, MLP
from coec.models.dense import Dense

WINDOWED = ("mistral", "qwen2", "qwen3")
"""Model types whose attention may reach back over a window alone."""


@dataclass(frozen=True)
class Hyperparameters:
    """The sizes and constants of a model.

    Attributes:
        model_type: of its configuration.
        name: for people.
        hidden, head_dim, vocabulary: the same in all blocks.
        heads, kv_heads, ffn: of every block.
        context: the most tokens that it is said to take.
        epsilon: of its norms.
        rotary: its positions.
        multipliers: Granite's, where they are not neutral: by their keys in the configuration.
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
        """Whether all blocks are of one width."""
        return all(len(set(sizes)) == 1 for sizes in (self.heads, self.kv_heads, self.ffn))

    @classmethod
    def of(cls, model: Dense, context: int | None) -> "Hyperparameters":
        """Those of an opened model.

        Args:
            context: tokens that the file says the model takes; None for what its configuration
                says.

        Raises:
            ModelError: it computes what no GGUF file can say.
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
    """The file must not say that the model takes more tokens than both programs agree on.

    llama.cpp attends to all tokens: up to the window's length that is the same.
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
    """The length of the sliding window, where any block has one."""
    if model.architecture.model_type not in WINDOWED:
        return None
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return config.sliding_window if slides else None


def _multipliers(config: Any, head_dim: int) -> dict[str, float]:
    """Granite's four numbers; nothing where they change nothing, or for another model type."""
    neutral = {
        "attention_multiplier": head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
    if config.model_type != "granite":
        return {}
    found = {key: float(getattr(config, key)) for key in neutral}
    same = all(math.isclose(found[key], neutral[key], rel_tol=1e-6) for key in neutral)
    return {} if same else found
