"""Names of modules in the blocks of architectures, from which layouts are made (METHODS §1)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from coec.errors import ModelError
from coec.models.layout import BlockLayout, Layout, Rows, Site
from coec.models.shape import Shape


@dataclass(frozen=True)
class SitePattern:
    """A site of an architecture's blocks, with names relative to the block.

    If the names of modules contain `{}`, there is one site for every expert's number. A block
    without the modules has no such site.

    Attributes:
        name, unit: as in `Site`; an expert's number follows the name.
        counted_by: the field of `Shape` with the number of units.
        producers: modules whose output rows belong to the units.
        consumer: the module whose input columns belong to the units.
        value: the producer whose rows reach the consumer through attention, if there is one.
        projections: number of projections in a producer, one below the other. In attention the
            first are the queries, with as many rows as the consumer has columns, and the last are
            the values; otherwise all have the same number of rows.
    """

    name: str
    unit: str
    counted_by: str
    producers: tuple[str, ...]
    consumer: str
    value: str | None = None
    projections: int = 1

    def sites(
        self, block: int, prefix: str, units: int, shapes: Mapping[str, torch.Size]
    ) -> Iterator[Site]:
        """Yield the sites of a block; raises ModelError if tensors do not divide into units."""
        for number in itertools.count():
            consumer = self.consumer.format(number)
            if f"{prefix}{consumer}.weight" not in shapes:
                return
            if not units:
                raise ModelError(f"config.json does not say how many {self.unit}s {consumer} has")
            producers = tuple(module.format(number) for module in self.producers)
            numbered = consumer != self.consumer
            name = f"{self.name}.{number}" if numbered else self.name
            pattern = replace(self, name=name, producers=producers, consumer=consumer)
            yield pattern._site(block, prefix, units, shapes)
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
        producers = [r for name in names for r in self._split(name, shapes[name][0], columns)]
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

    def _split(self, tensor: str, rows: int, columns: int) -> list[Rows]:
        """Split a producer's rows into projections, in order."""
        if self.projections == 1:
            return [Rows(tensor, 0, rows)]
        first = columns if self.value else rows // self.projections
        size = (rows - first) // (self.projections - 1)
        starts = [0, *(first + size * number for number in range(self.projections - 1))]
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
    """The names of experts in an architecture.

    Attributes:
        stored: the module that holds them in a checkpoint, relative to the block.
        module: the same module in the model that runs.
        gate, up, down: the projections of an expert in a checkpoint.
        count: the configuration key with their number that transformers 4.57 reads.
    """

    stored: str = "mlp"
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: str = "num_experts"

    def site(self, counted_by: str) -> SitePattern:
        """The site of every expert's channels; a field of `Shape` has their number."""
        expert = f"{self.stored}.experts.{{}}"
        return SitePattern(
            name="expert",
            unit=MLP.unit,
            counted_by=counted_by,
            producers=(f"{expert}.{self.gate}", f"{expert}.{self.up}"),
            consumer=f"{expert}.{self.down}",
        )


@dataclass(frozen=True)
class BlockPattern:
    """The names in an architecture's blocks.

    Attributes:
        prefix: prefix of a block's tensors, with `{}` for the block's index.
        sites: the places where units are removed.
        experts: names of experts, if there are any.
        embedding, norm, head: as in `Layout`.
    """

    prefix: str = "model.layers.{}."
    sites: tuple[SitePattern, ...] = (ATTENTION, MLP)
    experts: ExpertNames | None = None
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    def layout(self, shape: Shape, shapes: Mapping[str, torch.Size]) -> Layout:
        """Lay out a model.

        Args:
            shape: its sizes.
            shapes: shapes of its stored tensors, by name.
        """
        blocks = tuple(self._block(index, shape.at(index), shapes) for index in range(shape.layers))
        return Layout(blocks, self.embedding, self.norm, self.head)

    def _block(self, index: int, shape: Shape, shapes: Mapping[str, torch.Size]) -> BlockLayout:
        prefix = self.prefix.format(index)
        sites = (
            site
            for pattern in self.sites
            for site in pattern.sites(index, prefix, getattr(shape, pattern.counted_by), shapes)
        )
        return BlockLayout(index, prefix, tuple(sites))


LLAMA_BLOCKS = BlockPattern()
"""The names of Llama, which most families share."""
MLP_ONLY_BLOCKS = BlockPattern(sites=(MLP,))
"""The same for attention that cannot lose units without becoming another function."""
_QKV = "self_attn.qkv_proj"
FUSED_BLOCKS = BlockPattern(
    sites=(
        replace(ATTENTION, producers=(_QKV,), value=_QKV, projections=3),
        replace(MLP, producers=("mlp.gate_up_proj",), projections=2),
    )
)
"""Query, key and value in one matrix; gate and up in another."""
_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "mlp", "w1", "w3", "w2", "num_local_experts")
MIXTRAL_BLOCKS = BlockPattern(
    sites=(ATTENTION, _MIXTRAL_EXPERTS.site("ffn")), experts=_MIXTRAL_EXPERTS
)
"""Experts with `intermediate_size` channels."""
QWEN_MOE_BLOCKS = BlockPattern(
    sites=(ATTENTION, MLP, ExpertNames().site("expert_ffn")), experts=ExpertNames()
)
"""Experts with a size of their own in some blocks, an MLP in the others."""
