"""Supported architectures: layout, formats, quirks (METHODS §1); data in `architectures.toml`.

All have grouped-query attention with q/k/v/o projections, and a gated MLP or experts. They differ
in the names of modules, in whether attention can lose units, in the biases that a configuration can
express (and so the formats that a pruned model can be written in), and in how a block adds up
attention and MLP. A new architecture is one table there; the contract tests then run over it.
"""

import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files

import torch

from coec.errors import ModelError
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Layout, Rows, Shape, Site


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
        router: the module in it with a row for each of them.
        gate, up, down: an expert's projections in a checkpoint.
        count: the configuration key with their number that transformers 4.57 reads.
    """

    stored: str = "mlp"
    module: str = "mlp"
    router: str = "gate"
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
    """The names in an architecture's blocks: of sites, and of experts if there are any."""

    sites: tuple[SitePattern, ...] = (ATTENTION, MLP)
    experts: ExpertNames | None = None

    def layout(self, shape: Shape, shapes: Mapping[str, torch.Size]) -> Layout:
        """Lay out a model, by its sizes and the shapes of its stored tensors."""
        blocks = (self._block(index, shape.at(index), shapes) for index in range(shape.layers))
        return Layout(tuple(blocks))

    def _block(self, index: int, shape: Shape, shapes: Mapping[str, torch.Size]) -> BlockLayout:
        prefix = f"model.layers.{index}."
        sites = (
            site
            for pattern in self.sites
            for site in pattern.sites(index, prefix, getattr(shape, pattern.counted_by), shapes)
        )
        return BlockLayout(index, prefix, tuple(sites), self._router(prefix, shapes))

    def _router(self, prefix: str, shapes: Mapping[str, torch.Size]) -> Rows | None:
        if self.experts is None:
            return None
        name = f"{prefix}{self.experts.stored}.{self.experts.router}.weight"
        return Rows(name, 0, shapes[name][0]) if name in shapes else None


_QKV = "self_attn.qkv_proj"
_MIXTRAL = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", count="num_local_experts")
_DEEPSEEK = ExpertNames(count="n_routed_experts")
# Of n shared experts, a unit is the same channel of each: all keep as many as a routed one.
_SHARED = replace(
    MLP,
    name="shared",
    counted_by="expert_ffn",
    producers=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    consumer="mlp.shared_experts.down_proj",
)
_BLOCKS = {
    # The names of Llama, which most families share.
    "llama": BlockPattern(),
    # The same for attention that cannot lose units without becoming another function.
    "mlp_only": BlockPattern(sites=(MLP,)),
    # An MLP of two matrices, whose units no gate multiplies.
    "ungated": BlockPattern(
        sites=(ATTENTION, replace(MLP, producers=("mlp.c_fc",), consumer="mlp.c_proj"))
    ),
    # Query, key and value in one matrix; gate and up in another.
    "fused": BlockPattern(
        sites=(
            replace(ATTENTION, producers=(_QKV,), value=_QKV, projections=3),
            replace(MLP, producers=("mlp.gate_up_proj",), projections=2),
        )
    ),
    # Gate and up alone in one matrix.
    "gate_up": BlockPattern(
        sites=(ATTENTION, replace(MLP, producers=("mlp.gate_up_proj",), projections=2))
    ),
    # Experts with `intermediate_size` channels.
    "mixtral": BlockPattern(sites=(ATTENTION, _MIXTRAL.site("ffn")), experts=_MIXTRAL),
    # The same under other names, and attention that cannot lose units.
    "olmoe": BlockPattern(sites=(ExpertNames().site("ffn"),), experts=ExpertNames()),
    # Experts with a size of their own in some blocks, an MLP in the others.
    "qwen_moe": BlockPattern(
        sites=(ATTENTION, MLP, ExpertNames().site("expert_ffn")), experts=ExpertNames()
    ),
    # And experts that every token passes, side by side in one module.
    "glm_moe": BlockPattern(
        sites=(ATTENTION, MLP, _SHARED, _DEEPSEEK.site("expert_ffn")), experts=_DEEPSEEK
    ),
    # The same, and attention whose keys and values are of low rank.
    "deepseek": BlockPattern(sites=(MLP, _SHARED, _DEEPSEEK.site("expert_ffn")), experts=_DEEPSEEK),
}


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
        adds: what its blocks add to the hidden states, unless attention and MLP each add their
            output in turn; errors cannot propagate through such a block site by site.
        rope_keys: keys that its `rope_scaling` must have in transformers 4.57, if that accepts no
            others.
        attention_kept: why attention keeps all its units; empty if it may lose some.
        experts_kept: why no expert may go whole, likewise.
    """

    model_type: str
    class_name: str
    families: str
    source: str
    written_as: tuple[str, ...]
    bias_flags: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    adds: str = ""
    rope_keys: tuple[str, ...] = ()
    attention_kept: str = ""
    experts_kept: str = ""
    blocks: BlockPattern = _BLOCKS["llama"]

    def added(self, shape: Shape) -> JsonDict:
        """Keys that a configuration relabelled as this type gets, by the pruned sizes."""
        add = _ADDED.get(self.model_type)
        return add(shape) if add else {}

    def refuses(self, config: JsonDict, pruned: Shape) -> str | None:
        """Say why this type cannot hold a model at pruned sizes; None if it can."""
        if self.model_type == "llama" and pruned.hidden % pruned.heads:
            return f"hidden size {pruned.hidden} is not a multiple of {pruned.heads} heads"
        if self.model_type == "mistral" and config.get("attention_bias"):
            return "it has no biases"
        return None


_ADDED: Mapping[str, Callable[[Shape], JsonDict]] = {
    "mistral": lambda shape: {"sliding_window": None},
    "granite": lambda shape: {
        "attention_multiplier": shape.head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    # Only Qwen2 is relabelled as Seed-OSS, and it always has q, k and v biases.
    "seed_oss": lambda shape: {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
}


def _read() -> dict[str, Architecture]:
    text = files("coec.models").joinpath("architectures.toml").read_text(encoding="utf-8")
    architectures: dict[str, Architecture] = {}
    for name, table in tomllib.loads(text).items():
        fields: JsonDict = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        blocks = _BLOCKS[fields.pop("blocks", "llama")]
        architectures[name] = Architecture(model_type=name, blocks=blocks, **fields)
    return architectures


ARCHITECTURES = _read()
"""The supported architectures, by model type."""


def _check_text_alone(config: JsonDict) -> None:
    modalities = [key for key in ("vision_config", "audio_config") if key in config]
    text = config.get("text_config")
    if not modalities or not isinstance(text, dict):
        return
    text_type = text.get("model_type")
    advice = (
        f"save its {text_type} as a checkpoint of its own (…ForCausalLM), and prune that"
        if text_type in ARCHITECTURES
        else f"its language model '{text_type!s:.80}' is not supported either "
        f"(supported: {', '.join(ARCHITECTURES)})"
    )
    names = config.get("architectures") or [config.get("model_type")]
    raise ModelError(
        f"this is a multimodal model ({names[0]!s:.80}, with {' and '.join(modalities)}), and "
        f"pruning is of language models alone: {advice}"
    )


def architecture_of(config: JsonDict) -> Architecture:
    """Look up the architecture of a raw configuration; raises ModelError for any other model."""
    model_type = config.get("model_type")
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation
        if isinstance(quantisation, dict):
            method = quantisation.get("quant_method", "unknown method")
        raise ModelError(
            f"the weights are quantised ({method}): pruning needs float weights; "
            "use the original checkpoint, prune it, then quantise the result"
        )
    _check_text_alone(config)
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
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ModelError(
            f"model type '{model_type}' is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]
