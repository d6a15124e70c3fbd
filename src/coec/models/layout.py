"""Where units are removed, as plain values: complete, compared by value, picklable (METHODS §1)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from coec.errors import ModelError
from coec.types import KeptSet


@dataclass(frozen=True)
class Rows:
    """Rows of one stored tensor that a site's units own, in equal runs and in their order.

    A projection that is stored with others in one tensor is a part of its rows.

    Attributes:
        tensor: its full name.
        start, stop: the first of the rows, and the one behind the last.
    """

    tensor: str
    start: int
    stop: int

    def of(self, units: KeptSet) -> Int[Tensor, " rows"]:
        """Indices of the rows that the kept units own."""
        return self.start + units.columns((self.stop - self.start) // units.size).indices.cpu()


@dataclass(frozen=True)
class Site:
    """A place where units are removed: rows of its producers, columns of its consumer.

    Attributes:
        block: the index of its block.
        name: what tells the sites of a block apart, such as `mlp`; experts have a number as well,
            `expert.3`.
        unit: what one unit is, in words.
        units: how many there are.
        columns_per_unit: consecutive columns of the consumer that one unit owns.
        producers: the rows that go with the units.
        consumer: the module, by its full name, whose columns go, and which is compensated.
        value: the rows whose products with attention the consumer reads, where it follows
            attention; every unit's rows stand there once for all its query heads.
    """

    block: int
    name: str
    unit: str
    units: int
    columns_per_unit: int
    producers: tuple[Rows, ...]
    consumer: str
    value: Rows | None = None

    @property
    def kind(self) -> str:
        """What it has in common with sites of other blocks, and with other experts of its own."""
        return self.name.partition(".")[0]

    @property
    def routed(self) -> bool:
        """Whether a router sends it some of the tokens, and maybe none."""
        return self.kind != self.name

    @property
    def columns(self) -> int:
        """d: how many columns the consumer has."""
        return self.units * self.columns_per_unit

    @property
    def weight(self) -> str:
        """The name of the consumer's weight."""
        return f"{self.consumer}.weight"

    @property
    def bias(self) -> str:
        """The name of the consumer's bias, which may not be there."""
        return f"{self.consumer}.bias"

    @property
    def key(self) -> str:
        """The name of its kept units in files."""
        return f"layers.{self.block}.{self.name}"

    @property
    def fitted(self) -> tuple[Rows, ...]:
        """The rows that reconstruction fits besides the consumer: of weights that it reads at once.

        Behind attention these are the values; queries and keys are held, as the map that they make
        is.
        """
        producers = (self.value,) if self.value else self.producers
        return tuple(rows for rows in producers if rows.tensor.endswith(".weight"))

    @property
    def tensors(self) -> frozenset[str]:
        """Every tensor of the site, by full names; some may not be there."""
        return frozenset({*(rows.tensor for rows in self.producers), self.weight, self.bias})

    def kept_columns(self, units: KeptSet) -> KeptSet:
        """The consumer's columns that the kept units own."""
        return units.columns(self.columns_per_unit)


@dataclass(frozen=True)
class BlockLayout:
    """One block of a model.

    Attributes:
        index: which one.
        prefix: what the names of its tensors begin with.
        sites: where units are removed.
    """

    index: int
    prefix: str
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Layout:
    """All blocks of a model, and the tensors of which more than the name must be known.

    Attributes:
        blocks: in their order.
        embedding: the tensor that turns token ids into hidden states.
        norm: the weight of the norm behind the last block.
        head: the tensor that turns hidden states into logits, where it is not the embedding.
    """

    blocks: tuple[BlockLayout, ...]
    embedding: str
    norm: str
    head: str

    @property
    def sites(self) -> tuple[Site, ...]:
        """Of all blocks, in their order."""
        return tuple(site for block in self.blocks for site in block.sites)

    @property
    def kinds(self) -> tuple[Site, ...]:
        """The first site of every kind: what kinds of sites the model has."""
        first: dict[str, Site] = {}
        for site in self.sites:
            first.setdefault(site.kind, site)
        return tuple(first.values())


@dataclass(frozen=True)
class SitePattern:
    """A site of any block of an architecture: names are relative to the block.

    With `{}` for a number in the names of modules there is one for every expert. A block that lacks
    the modules has no such site.

    Attributes:
        name, unit: as in `Site`; experts get a number behind it.
        counted_by: the field of `Shape` that says how many units there are.
        producers: modules whose output rows belong to the units.
        consumer: the module whose input columns do.
        value: the producer whose rows reach the consumer through attention, where one does.
        parts: how many projections a producer holds, one below the other. Behind attention the
            first of them are queries, of which there are as many rows as the consumer has columns,
            and the last are values; otherwise all have the same number of rows.
    """

    name: str
    unit: str
    counted_by: str
    producers: tuple[str, ...]
    consumer: str
    value: str | None = None
    parts: int = 1

    def sites(
        self, block: int, prefix: str, units: int, shapes: Mapping[str, torch.Size]
    ) -> Iterator[Site]:
        """Those of one block; raises ModelError where tensors do not divide among the units."""
        for number in itertools.count():
            consumer = self.consumer.format(number)
            if f"{prefix}{consumer}.weight" not in shapes:
                return
            if not units:
                raise ModelError(f"config.json does not say how many {self.unit}s {consumer} has")
            producers = tuple(module.format(number) for module in self.producers)
            numbered = consumer != self.consumer
            name = f"{self.name}.{number}" if numbered else self.name
            own = replace(self, name=name, producers=producers, consumer=consumer)
            yield own._site(block, prefix, units, shapes)
            if not numbered:
                return

    def _site(self, block: int, prefix: str, units: int, shapes: Mapping[str, torch.Size]) -> Site:
        names = [
            name
            for module in self.producers
            for name in (f"{prefix}{module}.weight", f"{prefix}{module}.bias")
            if name in shapes
        ]
        consumer = f"{prefix}{self.consumer}"
        columns = shapes[f"{consumer}.weight"][1]
        producers = [part for name in names for part in self._parts(name, shapes[name][0], columns)]
        counted = [(rows.tensor, rows.stop - rows.start) for rows in producers]
        for name, rows in [*counted, (consumer, columns)]:
            if rows % units or not rows:
                raise ModelError(f"{name} does not divide into {units} {self.unit}s: it is {rows}")
        value = f"{prefix}{self.value}.weight"
        return Site(
            block=block,
            name=self.name,
            unit=self.unit,
            units=units,
            columns_per_unit=columns // units,
            producers=tuple(producers),
            consumer=consumer,
            value=None if self.value is None else [r for r in producers if r.tensor == value][-1],
        )

    def _parts(self, tensor: str, rows: int, columns: int) -> list[Rows]:
        """The projections in a producer's rows, in their order."""
        if self.parts == 1:
            return [Rows(tensor, 0, rows)]
        first = columns if self.value else rows // self.parts
        rest = (rows - first) // (self.parts - 1)
        starts = [0, *(first + rest * part for part in range(self.parts - 1))]
        return [Rows(tensor, *ends) for ends in zip(starts, [*starts[1:], rows], strict=True)]


ATTENTION = SitePattern(
    name="attention",
    unit="KV group",
    counted_by="kv_heads",
    producers=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    consumer="self_attn.o_proj",
    value="self_attn.v_proj",
)
MLP = SitePattern(
    name="mlp",
    unit="intermediate channel",
    counted_by="ffn",
    producers=("mlp.gate_proj", "mlp.up_proj"),
    consumer="mlp.down_proj",
)


@dataclass(frozen=True)
class ExpertNames:
    """How an architecture names experts.

    Attributes:
        stored: the module that holds them, as checkpoints call it, relative to the block.
        module: the same as the model that runs calls it.
        gate, up, down: the projections of an expert in a checkpoint.
        count: the key of a configuration by which transformers 4.57 reads how many there are.
    """

    stored: str = "mlp"
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: str = "num_experts"

    def site(self, counted_by: str) -> SitePattern:
        """The channels of every expert, as many as a field of `Shape` says."""
        one = f"{self.stored}.experts.{{}}"
        return SitePattern(
            name="expert",
            unit=MLP.unit,
            counted_by=counted_by,
            producers=(f"{one}.{self.gate}", f"{one}.{self.up}"),
            consumer=f"{one}.{self.down}",
        )


@dataclass(frozen=True)
class BlockPattern:
    """How an architecture names what is in its blocks.

    Attributes:
        prefix: of a block's tensors, with `{}` for the block's index.
        sites: where units are removed.
        experts: how experts are named, where there are some.
        embedding, norm, head: as in `Layout`.
    """

    prefix: str = "model.layers.{}."
    sites: tuple[SitePattern, ...] = (ATTENTION, MLP)
    experts: ExpertNames | None = None
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    def layout(self, shape: Any, shapes: Mapping[str, torch.Size]) -> Layout:
        """Every site of a model.

        Args:
            shape: its sizes, a `Shape`.
            shapes: of its stored tensors, by name.
        """
        return Layout(
            tuple(
                BlockLayout(index, prefix, tuple(
                    site
                    for pattern in self.sites
                    for site in pattern.sites(
                        index, prefix, getattr(own, pattern.counted_by), shapes
                    )
                ))
                for index in range(shape.layers)
                for prefix, own in [(self.prefix.format(index), shape.at(index))]
            ),
            self.embedding,
            self.norm,
            self.head,
        )  # fmt: skip


LLAMA_BLOCKS = BlockPattern()
"""The names that Llama introduced, and most families took over."""
MLP_ONLY_BLOCKS = BlockPattern(sites=(MLP,))
"""The same, where attention cannot lose a unit without becoming another function."""
FUSED_BLOCKS = BlockPattern(
    sites=(
        replace(ATTENTION, producers=("self_attn.qkv_proj",), value="self_attn.qkv_proj", parts=3),
        replace(MLP, producers=("mlp.gate_up_proj",), parts=2),
    )
)
"""Query, key and value in one matrix, gate and up in another."""
MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "mlp", "w1", "w3", "w2", "num_local_experts")
MIXTRAL_BLOCKS = BlockPattern(
    sites=(ATTENTION, MIXTRAL_EXPERTS.site("ffn")), experts=MIXTRAL_EXPERTS
)
"""Experts of as many channels as `intermediate_size` says."""
QWEN_MOE_BLOCKS = BlockPattern(
    sites=(ATTENTION, MLP, ExpertNames().site("expert_ffn")), experts=ExpertNames()
)
"""Experts in some blocks, of a size of their own, and an MLP in the others."""
