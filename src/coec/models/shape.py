"""The sizes of a model, read from a raw configuration and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coec.errors import ModelError

LARGEST = {
    "num_hidden_layers": 512,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "vocab_size": 2**26,
    "max_position_embeddings": 2**40,
}
"""Sizes beyond which a configuration is damaged; a skeleton of such a model would never be done."""


def whole(config: dict[str, Any], key: str, otherwise: int | None = None) -> int:
    """A size of a raw configuration; `otherwise` where it is absent or null.

    Raises:
        ModelError: it is missing, no whole number, below 1, or beyond `LARGEST`.
    """
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if value is None:
        raise ModelError(f"config.json lacks '{key}'")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} in config.json is no whole number: {str(value)[:40]!r}")
    if not 1 <= value <= LARGEST[key]:
        # Python refuses to print whole numbers of thousands of digits.
        shown = value if abs(value) < 10**20 else "absurd"
        raise ModelError(
            f"{key} in config.json is {shown}: it must be at least 1 and at most {LARGEST[key]:,}"
        )
    return value


@dataclass(frozen=True)
class Shape:
    """The sizes that pruning reads and changes.

    Attributes:
        layers, hidden, head_dim: unchanged by pruning.
        kv_heads: KV groups of every block.
        group: query heads per KV group (unchanged).
        ffn: intermediate channels of every block.
        expert_ffn: those of every expert, where they have a size of their own; else 0.
    """

    layers: int
    hidden: int
    head_dim: int
    kv_heads: int
    group: int
    ffn: int
    expert_ffn: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """Reads a raw configuration; raises ModelError naming a missing or inconsistent key."""
        heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
        kv_heads = whole(config, "num_key_value_heads", heads)
        head_dim = whole(config, "head_dim", hidden // heads)
        layers, ffn = whole(config, "num_hidden_layers"), whole(config, "intermediate_size")
        if head_dim < 1:
            raise ModelError(f"a hidden size of {hidden} does not hold {heads} heads")
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads do not divide into {kv_heads} KV groups")
        own = config.get("moe_intermediate_size") is not None
        expert_ffn = whole(config, "moe_intermediate_size") if own else 0
        return cls(layers, hidden, head_dim, kv_heads, heads // kv_heads, ffn, expert_ffn)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def full_width(self) -> bool:
        """Whether the heads together are as wide as the hidden states."""
        return self.heads * self.head_dim == self.hidden

    def kept(self, units: Mapping[str, int]) -> "Shape":
        """The sizes with other numbers of units, by the field that counts them."""
        return replace(self, **units)
