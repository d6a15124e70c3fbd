"""Supported architectures: layout, formats, quirks (METHODS §1), as values.

All have grouped-query attention with q/k/v/o projections, and a gated MLP or experts. They differ
in the names of modules, in whether attention can lose units, in the biases that a configuration can
express (and so the formats that a pruned model can be written in), and in how a block adds up
attention and MLP. All this is data in `architectures.toml` and `blocks.toml`: a new architecture is
one table there, and the contract tests then run over it.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coec.errors import ModelError
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Layout, Rows, Shape, Site
from coec.models.quantised import released_in


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
        self,
        block: int,
        prefix: str,
        shape: Shape,
        shapes: Mapping[str, torch.Size],
        *,
        heads: bool,
    ) -> Iterator[Site]:
        """Yield the sites of a block; raises ModelError if tensors do not divide into units.

        `heads` makes query heads the units of attention: they own queries, not keys or values.
        """
        numbered, heads = "{}" in self.consumer, heads and self.value is not None
        units = shape.heads if heads else getattr(shape, self.counted_by)
        unit = "query head" if heads else self.unit
        for number in itertools.count() if numbered else (0,):
            module = self.consumer.format(number)
            consumer = f"{prefix}{module}"
            if f"{consumer}.weight" not in shapes:
                return
            if not units:
                raise ModelError(f"config.json does not say how many {unit}s {module} has")
            columns = shapes[f"{consumer}.weight"][1]
            producers = list(self._projections(prefix, number, columns, shapes))
            values = f"{prefix}{self.value}.weight" if self.value else ""
            value = next((rows for rows in producers[::-1] if rows.tensor == values), None)
            if heads:  # queries come first, and have as many rows as the consumer has columns
                queries = f"{prefix}{self.producers[0]}."
                producers = [
                    rows for rows in producers if rows.tensor.startswith(queries) and not rows.start
                ]
            sizes = [(rows.tensor, rows.count) for rows in producers]
            for name, size in [*sizes, (consumer, columns)]:
                if size % units or not size:
                    raise ModelError(f"{name} does not divide into {units} {unit}s: it is {size}")
            yield Site(
                block=block,
                name=f"{self.name}.{number}" if numbered else self.name,
                unit=unit,
                units=units,
                columns_per_unit=columns // units,
                producers=tuple(producers),
                consumer=consumer,
                value=value,
                groups=shape.kv_heads if heads else 0,
            )

    def _projections(
        self, prefix: str, number: int, columns: int, shapes: Mapping[str, torch.Size]
    ) -> Iterator[Rows]:
        """Yield the rows of every projection in the tensors of the producers, in order."""
        for module, kind in itertools.product(self.producers, ("weight", "bias")):
            tensor = f"{prefix}{module.format(number)}.{kind}"
            if tensor not in shapes:
                continue
            rows, starts = shapes[tensor][0], [0]
            if self.projections > 1:
                # Queries first, as many rows as the consumer has columns; the others are alike.
                first = columns if self.value else rows // self.projections
                size = (rows - first) // (self.projections - 1)
                starts += [first + size * index for index in range(self.projections - 1)]
            for start, stop in itertools.pairwise([*starts, rows]):
                yield Rows(tensor, start, stop)


WIDE = ("e_score_correction_bias", "A_log", "dt_bias")
"""Ends of the names of tensors that are float32 at least, as they are released next to narrower
weights: corrections of routers, on whose small differences the choice of experts depends, and decay
rates and steps of state-space layers."""


@dataclass(frozen=True)
class Experts:
    """The experts of a decoder.

    Attributes:
        module: the module of all experts in a block of the model that runs, relative to the block.
        count: configuration key with their number; empty if no tensor chooses among them.
        by_block: the value of that key is a list, with a number for every block.
        router: tensors with a number for each of them, relative to the block, and the dimension.
    """

    module: str
    count: str = ""
    by_block: bool = False
    router: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class BlockPattern:
    """The sites in an architecture's blocks, and their experts if there are any."""

    sites: tuple[SitePattern, ...]
    experts: Experts | None = None

    def layout(
        self, shape: Shape, shapes: Mapping[str, torch.Size], *, heads: bool = False
    ) -> Layout:
        """Lay out a model, by its sizes and the shapes of its stored tensors.

        The units of attention are KV groups, or query heads.
        """
        blocks = []
        for index in range(shape.layers):
            prefix, sizes = f"model.layers.{index}.", shape.at(index)
            sites = (
                site
                for pattern in self.sites
                for site in pattern.sites(index, prefix, sizes, shapes, heads=heads)
            )
            blocks.append(BlockLayout(index, prefix, tuple(sites), self._router(prefix, shapes)))
        return Layout(tuple(blocks))

    def _router(self, prefix: str, shapes: Mapping[str, torch.Size]) -> tuple[Rows, ...]:
        if self.experts is None:
            return ()
        names = ((f"{prefix}{inside}", dim) for inside, dim in self.experts.router)
        return tuple(Rows(name, 0, shapes[name][dim], dim) for name, dim in names if name in shapes)


@dataclass(frozen=True)
class Architecture:
    """A supported model type.

    Attributes:
        class_name: the transformers class a checkpoint names.
        families: the usual names of its models.
        source: publication.
        written_as: model types that a pruned model may be written as; the first that fits is used.
        bias_flags: by site, the configuration key that gives its consumer a bias, if there is one.
        foreign: keys of other types that a configuration relabelled as this type must not carry.
        blocks: the sites of its blocks; by its name in `blocks.toml` in the data.
        adds: what its blocks add to the hidden states, unless attention and MLP each add their
            output in turn; errors cannot propagate through such a block site by site.
        rope_keys: keys that its `rope_scaling` must have in transformers 4.57, if that accepts no
            others.
        attention_kept: why attention keeps all its units; empty if it may lose some.
        added_constants: keys that a configuration relabelled as this type gets in any case.
        inferred: its MLPs and experts are inferred from its class.
        widths: field of `Shape` → configuration key with its number of channels.
        by_block: keys of these whose values are lists, with a number for every block.
        count: configuration key with the number of experts that transformers 4.57 reads.
        parts: rows of tensors that files have in unequal parts, as `Names.rows_in` returns them.
    """

    model_type: str
    class_name: str
    families: str
    source: str
    written_as: tuple[str, ...]
    blocks: BlockPattern
    bias_flags: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    adds: str = ""
    rope_keys: tuple[str, ...] = ()
    attention_kept: str = ""
    added_constants: Mapping[str, bool | float] = field(default_factory=dict)
    inferred: bool = False
    widths: Mapping[str, str] = field(default_factory=lambda: {"ffn": "intermediate_size"})
    by_block: tuple[str, ...] = ()
    count: str = ""
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def sizes(self, shape: Shape) -> JsonDict:
        """Return the sizes that pruning changes, as configuration keys."""
        layers = range(shape.layers)
        sizes: JsonDict = {
            key: [getattr(shape.at(n), name) for n in layers]
            if key in self.by_block
            else getattr(shape, name)
            for name, key in self.widths.items()
        }
        experts = self.blocks.experts
        if experts and experts.count:
            count = shape.experts
            sizes[experts.count] = [count] * shape.layers if experts.by_block else count
        whole = self.inferred and self.attention_kept
        return sizes if whole else shape.heads_keys() | sizes

    def added(self, shape: Shape) -> JsonDict:
        """Keys that a configuration relabelled as this type gets, by the pruned sizes."""
        keys: JsonDict = {}
        if self.model_type == "mistral":
            keys = {"sliding_window": None}
        elif self.model_type == "granite":
            keys = {"attention_multiplier": shape.head_dim**-0.5}
        return {**keys, **self.added_constants}

    def refuses(self, config: JsonDict, pruned: Shape) -> str | None:
        """Say why this type cannot hold a model at pruned sizes; None if it can."""
        if self.model_type == "llama" and pruned.hidden % pruned.heads:
            return f"hidden size {pruned.hidden} is not a multiple of {pruned.heads} heads"
        if self.model_type == "mistral" and config.get("attention_bias"):
            return "it has no biases"
        return None


def packaged(name: str) -> JsonDict:
    """Tables of a TOML file of this package; its lists become tuples, so that all are values."""
    tables = tomllib.loads(files("coec.models").joinpath(name).read_text(encoding="utf-8"))
    frozen: JsonDict = _frozen(tables)
    return frozen


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _architectures() -> dict[str, Architecture]:
    tables = packaged("blocks.toml")
    sites = {name: SitePattern(**table) for name, table in tables["sites"].items()}
    blocks = {
        name: BlockPattern(tuple(sites[site] for site in table["sites"]))
        for name, table in tables["blocks"].items()
    }
    return {
        name: Architecture(name, **table | {"blocks": blocks[table.get("blocks", "llama")]})
        for name, table in packaged("architectures.toml").items()
    }


ARCHITECTURES = _architectures()
"""The supported architectures, by model type."""
ATTENTION, MLP = ARCHITECTURES["llama"].blocks.sites


def architecture_of(config: JsonDict) -> Architecture:
    """Look up the architecture of a raw configuration; raises ModelError for any other model."""
    # Weights that can be read, of a language model alone that has its head, of a type listed
    model_type = config.get("model_type")
    released_in(config)
    classes = config.get("architectures") or ["ForCausalLM"]
    classes = classes if isinstance(classes, list) else [classes]
    if config.get("is_encoder_decoder") or not any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in classes
    ):
        names = ", ".join(str(name) for name in classes)
        if model_type in ARCHITECTURES and names.endswith("Model"):
            raise ModelError(
                f"this is a {names:.200}, which has no head to predict tokens with: give the whole "
                "causal language model (AutoModelForCausalLM), as it was before its head was left "
                "out"
            )
        model = "an encoder with a decoder" if config.get("is_encoder_decoder") else names
        raise ModelError(
            f"this is not a decoder-only language model, but {model:.200} (model type "
            f"'{model_type!s:.80}'): pruning needs one that predicts the next token "
            "(…ForCausalLM)"
        )
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model type '{model_type!s:.80}' is not known to transformers "
            f"{transformers.__version__}: install a newer release; models with code of their own "
            "are not supported"
        )
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return ARCHITECTURES.get(model_type) or _unlisted(model_type, name)


def _unlisted(model_type: str, class_name: str) -> Architecture:
    """Return the architecture of a type without a table, whose MLPs are to be inferred."""
    return Architecture(
        model_type, class_name, families="", source="", written_as=(model_type,),
        blocks=BlockPattern(()), adds="parts that are not told apart",
        attention_kept="the units of what mixes its tokens are not known", inferred=True,
    )  # fmt: skip
