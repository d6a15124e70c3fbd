"""Sites where units are removed, as values: complete, comparable, picklable (METHODS §1)."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from coec.types import KeptSet


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor that a site's units own, in runs of equal length and in order.

    A projection that shares a tensor with others is a range of its rows.

    Attributes:
        tensor: full name.
        start, stop: range of rows.
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
        block: index of the block.
        name: name within the block, such as `mlp`; that of an expert has a number, `expert.3`.
        unit: a unit, in words.
        units: number of units.
        columns_per_unit: consecutive columns of the consumer that one unit owns.
        producers: the rows that are removed with the units.
        consumer: full name of the module whose columns are removed, and which is compensated.
        value: the rows of the value projection, if the consumer follows attention; a unit has them
            once for all its query heads.
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
        """Name without an expert's number: the same in all blocks."""
        return self.name.partition(".")[0]

    @property
    def routed(self) -> bool:
        """True for a site of an expert, which may get no token at all."""
        return self.kind != self.name

    @property
    def columns(self) -> int:
        """Number of the consumer's columns, d."""
        return self.units * self.columns_per_unit

    @property
    def weight(self) -> str:
        """Full name of the consumer's weight."""
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
    def fitted(self) -> tuple[Rows, ...]:
        """The rows that reconstruction fits besides the consumer: weights of its direct inputs.

        For attention these are the values; queries and keys stay fixed, and so does the attention
        map.
        """
        producers = (self.value,) if self.value else self.producers
        return tuple(rows for rows in producers if rows.tensor.endswith(".weight"))

    @property
    def tensors(self) -> frozenset[str]:
        """Full names of all tensors of the site; the model may lack some."""
        return frozenset({*(rows.tensor for rows in self.producers), self.weight, self.bias})

    def kept_columns(self, units: KeptSet) -> KeptSet:
        """The consumer's columns that the kept units own."""
        return units.columns(self.columns_per_unit)


@dataclass(frozen=True)
class BlockLayout:
    """A block of a model.

    Attributes:
        index: position in the model.
        prefix: prefix of the names of its tensors.
        sites: the places where units are removed.
    """

    index: int
    prefix: str
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Layout:
    """The blocks of a model, and the names of the tensors around them.

    Attributes:
        blocks: in order.
        embedding: the tensor that turns token ids into hidden states.
        norm: the weight of the norm after the last block.
        head: the tensor that turns hidden states into logits, if it is not the embedding.
    """

    blocks: tuple[BlockLayout, ...]
    embedding: str
    norm: str
    head: str

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all blocks, in order."""
        return tuple(site for block in self.blocks for site in block.sites)

    @property
    def kinds(self) -> tuple[Site, ...]:
        """The first site of every kind."""
        first: dict[str, Site] = {}
        for site in self.sites:
            first.setdefault(site.kind, site)
        return tuple(first.values())
