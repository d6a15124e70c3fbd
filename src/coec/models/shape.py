"""The sizes of a model, read from a raw configuration and checked."""

from collections.abc import Mapping, Sequence
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


COUNTED = {
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
}
"""Sizes of a configuration that pruning changes, and what they are called here."""
BLOCK_WIDTHS = "block_widths"
"""The key under which a configuration lists what differs by block: one table of keys for each."""


@dataclass(frozen=True)
class Shape:
    """The sizes that pruning reads and changes.

    Attributes:
        layers, hidden, head_dim: unchanged by pruning.
        kv_heads: KV groups of every block; of the widest, where they differ.
        group: query heads per KV group (unchanged).
        ffn: intermediate channels, likewise.
        expert_ffn: those of every expert, where they have a size of their own; else 0.
        by_block: where widths differ by block, those of each: fields of this class and their
            values. Empty where every block is alike.
    """

    layers: int
    hidden: int
    head_dim: int
    kv_heads: int
    group: int
    ffn: int
    expert_ffn: int = 0
    by_block: tuple[tuple[tuple[str, int], ...], ...] = ()

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """Reads a raw configuration; raises ModelError naming a missing or inconsistent key."""
        if config.get(BLOCK_WIDTHS) is None:
            return cls._of_sizes(config)
        common = {key: value for key, value in config.items() if key != BLOCK_WIDTHS}
        own, layers = config[BLOCK_WIDTHS], whole(config, "num_hidden_layers")
        if not isinstance(own, list) or not all(isinstance(widths, dict) for widths in own):
            raise ModelError(f"{BLOCK_WIDTHS} in config.json is no list of tables: {own!r:.40}")
        if len(own) != layers:
            raise ModelError(f"{BLOCK_WIDTHS} in config.json is of {len(own)} blocks of {layers}")
        if odd := {str(key) for widths in own for key in widths} - set(COUNTED):
            raise ModelError(
                f"{BLOCK_WIDTHS} in config.json holds {min(odd)!r:.80}; known are "
                + ", ".join(COUNTED)
            )
        dense, blocks = cls._of_sizes(common), [cls._of_sizes(common | widths) for widths in own]
        for block in blocks:
            if (block.group, block.head_dim) != (dense.group, dense.head_dim):
                raise ModelError(
                    f"{BLOCK_WIDTHS} in config.json has blocks of {block.group} query heads per KV "
                    f"group, and others of {dense.group}"
                )
        return dense.with_blocks([{"kv_heads": b.kv_heads, "ffn": b.ffn} for b in blocks])

    @classmethod
    def _of_sizes(cls, config: dict[str, Any]) -> "Shape":
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

    @property
    def uniform(self) -> bool:
        """Whether every block is alike."""
        return not self.by_block

    def at(self, block: int) -> "Shape":
        """The sizes with one block's widths everywhere."""
        if not self.by_block:
            return self
        own: dict[str, Any] = dict(self.by_block[block])
        return replace(self, **own, by_block=())

    def with_blocks(self, units: Sequence[Mapping[str, int]]) -> "Shape":
        """The sizes with other numbers of units, by block and by the field that counts them."""
        widest: dict[str, Any] = {n: max(one[n] for one in units) for n in units[0]}
        listed = tuple(tuple(sorted(one.items())) for one in units)
        alike = len(set(listed)) == 1
        return replace(self, **widest, by_block=() if alike else listed)

    def listed(self) -> "Shape":
        """The same, its widths listed by block even where every block is alike."""
        own = tuple(sorted((name, getattr(self, name)) for name in ("kv_heads", "ffn")))
        return replace(self, by_block=self.by_block or (own,) * self.layers)

    def keys(self) -> dict[str, int]:
        """The sizes that pruning changes, as configurations have them; of the widest block."""
        found = {key: getattr(self, name) for key, name in COUNTED.items()}
        return found | ({"moe_intermediate_size": self.expert_ffn} if self.expert_ffn else {})
