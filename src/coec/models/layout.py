"""Sizes, blocks and sites of a model, as values: comparable, picklable (METHODS §1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor

from coec.errors import ModelError
from coec.models.files import JsonDict
from coec.types import KeptSet

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Configuration keys with the number of experts in a block; a configuration may have both."""
_EXPERT_GROUPS = "n_group"
"""Configuration key of the number of groups of experts."""
LIMITS = {
    "num_hidden_layers": 512,
    "hidden_size": 2**20,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 2**22),
    **dict.fromkeys((*EXPERT_COUNTS, _EXPERT_GROUPS), 2**14),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**14),
    "vocab_size": 2**26,
    "max_position_embeddings": 2**40,
}
"""Sizes beyond which a configuration is damaged; building such a skeleton would never end."""


def read_size(config: JsonDict, key: str, default: int | None = None) -> int:
    """Read a size within `LIMITS`, or raise ModelError; `default` if it is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ModelError(f"config.json lacks '{key}'")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} in config.json is no whole number: {str(value)[:40]!r}")
    if not 1 <= value <= LIMITS[key]:
        # Python refuses to print whole numbers of thousands of digits.
        text = value if abs(value) < 10**20 else "absurd"
        raise ModelError(
            f"{key} in config.json is {text}: it must be at least 1 and at most {LIMITS[key]:,}"
        )
    return value


def _block_widths(tables: Any, layers: int) -> list[JsonDict]:
    if not isinstance(tables, list) or not all(isinstance(widths, dict) for widths in tables):
        raise ModelError(f"{BLOCK_WIDTHS} in config.json is no list of tables: {tables!r:.40}")
    if len(tables) != layers:
        raise ModelError(f"{BLOCK_WIDTHS} in config.json is of {len(tables)} blocks of {layers}")
    if unknown := {str(key) for widths in tables for key in widths}.difference(_WIDTHS):
        raise ModelError(
            f"{BLOCK_WIDTHS} in config.json holds {min(unknown)!r:.80}; known are "
            + ", ".join(_WIDTHS)
        )
    return tables


_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Configuration keys that pruning changes."""
_BY_BLOCK = ("kv_heads", "group", "ffn")
"""Fields of `Shape` that may differ by block."""
BLOCK_WIDTHS = "block_widths"
"""Configuration key of the widths that differ by block: one table of keys for each block."""
_MOST_GPUS = 16
"""GPUs of a server, at most, for tensor parallelism."""
QUANTISED_COLUMNS = 128
"""Columns of a group in the usual 4-bit formats (GPTQ, AWQ)."""


@dataclass(frozen=True)
class Shape:
    """The sizes that pruning reads and changes.

    Attributes:
        layers, hidden, head_dim: unchanged by pruning.
        kv_heads: KV groups of every block, or of the widest block if they differ.
        group: query heads per KV group, of every block or of the widest.
        ffn: intermediate channels, of every block or of the widest.
        expert_ffn: intermediate channels of every expert, if experts have a separate size; else 0.
        by_block: fields of this class with their values for each block, if widths differ by block;
            empty if all blocks are alike.
        shared_ffn: intermediate channels of shared experts, if they have a separate size; else 0.
        experts: number of experts in a block, if there are any; else 0.
        expert_groups: number of equal groups of experts among which a router chooses first.
    """

    layers: int
    hidden: int
    head_dim: int
    kv_heads: int
    group: int
    ffn: int
    expert_ffn: int = 0
    by_block: tuple[tuple[tuple[str, int], ...], ...] = ()
    experts: int = 0
    expert_groups: int = 1
    shared_ffn: int = 0

    @classmethod
    def of(cls, config: JsonDict) -> "Shape":
        """Read a raw configuration; raises ModelError naming a missing or inconsistent key."""
        if config.get(BLOCK_WIDTHS) is None:
            return cls._uniform(config)
        # The common sizes, then every block as if the model had its widths alone
        common = {key: value for key, value in config.items() if key != BLOCK_WIDTHS}
        dense = cls._uniform(common)
        tables = _block_widths(config[BLOCK_WIDTHS], dense.layers)
        blocks = [cls._uniform(common | widths) for widths in tables]
        for block in blocks:
            if block.head_dim != dense.head_dim:
                raise ModelError(
                    f"{BLOCK_WIDTHS} in config.json has heads of size {block.head_dim}, and others "
                    f"of {dense.head_dim}"
                )
        return dense.with_blocks([{name: getattr(b, name) for name in _BY_BLOCK} for b in blocks])

    @classmethod
    def _uniform(cls, config: JsonDict) -> "Shape":
        heads, hidden = read_size(config, "num_attention_heads"), read_size(config, "hidden_size")
        kv_heads = read_size(config, "num_key_value_heads", heads)
        # Old configurations imply the size of heads, and a KV head for each of them.
        head_dim = read_size(config, "head_dim", hidden // heads)
        layers, ffn = read_size(config, "num_hidden_layers"), read_size(config, "intermediate_size")
        if head_dim < 1:
            raise ModelError(f"a hidden size of {hidden} does not hold {heads} heads")
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads do not divide into {kv_heads} KV groups")
        expert_ffn = read_size(config, "moe_intermediate_size", 0)
        counts = [read_size(config, key) for key in EXPERT_COUNTS if config.get(key) is not None]
        group, experts = heads // kv_heads, counts[0] if counts else 0
        groups = read_size(config, _EXPERT_GROUPS, 1)
        if experts % groups:
            raise ModelError(f"{experts} experts do not divide into {_EXPERT_GROUPS} = {groups}")
        return cls(
            layers, hidden, head_dim, kv_heads, group, ffn, expert_ffn, experts=experts,
            expert_groups=groups,
        )  # fmt: skip

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def uniform(self) -> bool:
        """True if all blocks are alike."""
        return not self.by_block

    def gpus(self, *, columns: int = 1) -> list[int]:
        """Return the numbers of GPUs, up to 16, over which servers can split every layer.

        Query heads, channels and channels of experts are divided evenly; KV groups are also divided
        evenly, or evenly repeated. Tensor parallelism of vLLM and SGLang requires this.

        Args:
            columns: every part of a consumer has a multiple of so many, such as QUANTISED_COLUMNS.
        """
        blocks = [self.at(block) for block in range(len(self.by_block) or 1)]
        return [n for n in range(1, _MOST_GPUS + 1) if all(b._splits(n, columns) for b in blocks)]

    def _splits(self, gpus: int, columns: int) -> bool:
        inputs = self.heads * self.head_dim, self.ffn, self.expert_ffn, self.shared_ffn
        return (
            self.heads % gpus == 0
            and (self.kv_heads % gpus == 0 or gpus % self.kv_heads == 0)
            and all(size % (gpus * columns) == 0 for size in inputs)
        )

    def at(self, block: int) -> "Shape":
        """The sizes of one block, as if all blocks had its widths."""
        return replace(self, **dict(self.by_block[block]), by_block=()) if self.by_block else self

    def with_blocks(self, units: Sequence[Mapping[str, int]]) -> "Shape":
        """Replace the numbers of units: one table per block, by the field that counts them."""
        units = [{**{name: getattr(self, name) for name in _BY_BLOCK}, **block} for block in units]
        widest = {name: max(block[name] for block in units) for name in units[0]}
        by_block = tuple(tuple(sorted(block.items())) for block in units)
        alike = len(set(by_block)) == 1
        return replace(self, **widest, by_block=() if alike else by_block)

    def listed(self) -> "Shape":
        """List the widths by block even if all blocks are alike."""
        widths = tuple(sorted((name, getattr(self, name)) for name in _BY_BLOCK))
        return replace(self, by_block=self.by_block or (widths,) * self.layers)

    def keys(self) -> dict[str, int]:
        """The sizes that pruning changes, as configuration keys; of the widest block."""
        return self.heads_keys() | {"intermediate_size": self.ffn}

    def heads_keys(self) -> dict[str, int]:
        """The sizes of attention that pruning changes, as configuration keys."""
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}


def in_words(width: int | Sequence[int]) -> str:
    """Return units per block in words: a number, or least and most if blocks differ."""
    return f"{width:,}" if isinstance(width, int) else f"{min(width):,} to {max(width):,}"


def split_over(sizes: Mapping[str, Sequence[int]]) -> str:
    """Return in words over how many GPUs servers can split a model, as `Plan.record` has them."""
    plain, narrow = (", ".join(map(str, sizes[key])) for key in ("gpus", "gpus_int4"))
    gpus = "on one GPU alone" if plain == "1" else f"over {plain} GPUs"
    return f"{gpus}; 4-bit, in groups of {QUANTISED_COLUMNS}: {narrow or 'not at all'}"


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor that a site's units own, in runs of equal length and in order.

    A projection that shares a tensor with others is a range of its rows. Tensors of a router may
    have another dimension than the first for its experts: `dim`.
    """

    tensor: str
    start: int
    stop: int
    dim: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def of(self, units: KeptSet) -> Int[Tensor, " rows"]:
        """Indices of the rows that the kept units own."""
        return self.start + units.columns(self.count // units.size).indices.cpu()


@dataclass(frozen=True)
class Site:
    """A place where units are removed: rows of its producers, columns of its consumer.

    Attributes:
        name: name within the block, such as `mlp`; that of an expert has a number, `expert.3`.
        unit: a unit, in words; `units` is their number.
        columns_per_unit: consecutive columns of the consumer that one unit owns.
        producers: the rows that are removed with the units.
        consumer: full name of the module whose columns are removed, and which is compensated.
        value: the rows of the value projection, if the consumer follows attention; a unit has them
            once for all its query heads.
        groups: number of KV groups if units are query heads, the same number of which is kept in
            every group; otherwise 0.
    """

    block: int
    name: str
    unit: str
    units: int
    columns_per_unit: int
    producers: tuple[Rows, ...]
    consumer: str
    value: Rows | None = None
    groups: int = 0

    @property
    def ranges(self) -> int:
        """Number of equal groups of units; the same number of units is kept in each."""
        return self.groups or 1

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head; 1 outside of attention."""
        return 1 if self.value is None else self.columns // self.value.count

    @property
    def kind(self) -> str:
        """Name without an expert's number: the same in all blocks."""
        return self.name.partition(".")[0]

    @property
    def routed(self) -> bool:
        """True for a site of an expert, which may get no token at all."""
        return self.kind != self.name

    @property
    def as_experts(self) -> bool:
        """True for a site of one expert or of shared experts: all keep the same number of units."""
        return self.kind in ("expert", "shared")

    @property
    def expert(self) -> int | None:
        """Number of the expert; None for a site that every token passes."""
        return int(self.name.partition(".")[2]) if self.routed else None

    @property
    def columns(self) -> int:
        """Number of the consumer's columns, d."""
        return self.units * self.columns_per_unit

    @property
    def weight(self) -> str:
        """Name of the consumer's weight."""
        return f"{self.consumer}.weight"

    @property
    def bias(self) -> str:
        """Full name of the consumer's bias, which the model may lack."""
        return f"{self.consumer}.bias"

    @property
    def key(self) -> str:
        """Name of the kept units in files."""
        return f"layers.{self.block}.{self.name}"

    @property
    def tensors(self) -> frozenset[str]:
        """Full names of all tensors of the site; the model may lack some."""
        return frozenset({*(rows.tensor for rows in self.producers), self.weight, self.bias})

    def kept_columns(self, units: KeptSet) -> KeptSet:
        """The consumer's columns that the kept units own."""
        return units.columns(self.columns_per_unit)


@dataclass(frozen=True)
class BlockLayout:
    """A block of a model: its place, the prefix of its tensors' names, and its sites.

    If it has experts, every tensor of `router` has a row for each of them: the first its weight,
    the others corrections of its scores.
    """

    index: int
    prefix: str
    sites: tuple[Site, ...]
    router: tuple[Rows, ...] = ()

    @property
    def experts_key(self) -> str:
        """Name of the kept experts in files."""
        return f"layers.{self.index}.experts"

    def remaining(self, experts: KeptSet | None) -> tuple[Site, ...]:
        """The sites that stay where experts go whole; None for no expert."""
        numbers = None if experts is None else {None, *experts.indices.tolist()}
        return tuple(site for site in self.sites if numbers is None or site.expert in numbers)


@dataclass(frozen=True)
class Layout:
    """The blocks of a model in order, and the names of the tensors around them.

    The norm is that after the last block; a tied model has no head.
    """

    blocks: tuple[BlockLayout, ...]
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all blocks, in order."""
        return tuple(site for block in self.blocks for site in block.sites)

    @property
    def experts(self) -> int:
        """Number of experts in every block that has any; 0 where none has."""
        return next((block.router[0].stop for block in self.blocks if block.router), 0)

    @property
    def attention_units(self) -> Literal["groups", "heads"]:
        """Units that attention loses."""
        return "heads" if any(site.groups for site in self.sites) else "groups"

    @property
    def kinds(self) -> tuple[Site, ...]:
        """The first site of every kind."""
        first: dict[str, Site] = {}
        for site in self.sites:
            first.setdefault(site.kind, site)
        return tuple(first.values())
