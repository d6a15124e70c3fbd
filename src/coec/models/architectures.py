"""Supported architectures, as data (METHODS §1).

All share one block: grouped-query attention with q/k/v/o projections and a gated MLP. What differs
is which biases a configuration can express, and so which format a pruned model can be written in.
Adding an architecture is one entry here and one in `coec.models.formats.CANDIDATES`.
"""

from dataclasses import dataclass
from typing import Any

from coec.errors import ModelError


@dataclass(frozen=True)
class Site:
    """A place where units are removed: rows of the producers, columns of the consumer.

    Attributes:
        name: `mlp` or `attention`.
        unit: what one unit is.
        producers: modules whose output rows go with the unit.
        consumer: the module whose input columns go with it, and which is compensated.
    """

    name: str
    unit: str
    producers: tuple[str, ...]
    consumer: str


ATTENTION = Site(
    "attention",
    "KV group",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
)
MLP = Site("mlp", "intermediate channel", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
SITES = (ATTENTION, MLP)
VALUE = "self_attn.v_proj"


@dataclass(frozen=True)
class Architecture:
    """What the package must know of a model type.

    Attributes:
        model_type: the `model_type` of its configuration.
        class_name: the transformers class a checkpoint names.
        families: the models people know it by.
        o_proj_flag: the configuration key that gives `o_proj` a bias, or None.
        down_proj_flag: the configuration key that gives `down_proj` a bias, or None.
        source: where it was introduced.
    """

    model_type: str
    class_name: str
    families: str
    o_proj_flag: str | None
    down_proj_flag: str | None
    source: str


ARCHITECTURES: dict[str, Architecture] = {
    a.model_type: a
    for a in (
        Architecture(
            model_type="llama",
            class_name="LlamaForCausalLM",
            families="Llama 1, 2, 3, 3.1-3.3; DeepSeek-R1-Distill-Llama",
            o_proj_flag="attention_bias",
            down_proj_flag="mlp_bias",
            source="Touvron et al. 2023; Llama Team 2024",
        ),
        Architecture(
            model_type="mistral",
            class_name="MistralForCausalLM",
            families="Mistral 7B, Nemo, Small (text)",
            o_proj_flag=None,
            down_proj_flag=None,
            source="Jiang et al. 2023",
        ),
        Architecture(
            model_type="qwen2",
            class_name="Qwen2ForCausalLM",
            families="Qwen2, Qwen2.5, QwQ; DeepSeek-R1-Distill-Qwen",
            o_proj_flag=None,
            down_proj_flag=None,
            source="Qwen Team 2024",
        ),
        Architecture(
            model_type="qwen3",
            class_name="Qwen3ForCausalLM",
            families="Qwen3 (dense); DeepSeek-R1-0528-Qwen3-8B",
            o_proj_flag="attention_bias",
            down_proj_flag=None,
            source="Qwen Team 2025",
        ),
        Architecture(
            model_type="granite",
            class_name="GraniteForCausalLM",
            families="Granite 3 (dense); a pruned Llama with biases is written as this",
            o_proj_flag="attention_bias",
            down_proj_flag="mlp_bias",
            source="IBM Granite Team 2024",
        ),
        Architecture(
            model_type="seed_oss",
            class_name="SeedOssForCausalLM",
            families="Seed-OSS; a pruned Qwen2 with biases is written as this",
            o_proj_flag="attention_out_bias",
            down_proj_flag="mlp_bias",
            source="ByteDance Seed Team 2025",
        ),
    )
}


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture of a raw configuration.

    Raises:
        ModelError: the model is an encoder, quantised, or of a type not listed.
    """
    supported = f"supported: {', '.join(ARCHITECTURES)}"
    model_type = config.get("model_type")
    quantisation = config.get("quantization_config")
    if quantisation:
        known = isinstance(quantisation, dict)
        method = quantisation.get("quant_method", "unknown method") if known else quantisation
        raise ModelError(
            f"the weights are quantised ({method}): pruning needs float weights; "
            "use the original checkpoint, prune it, then quantise the result"
        )
    classes = config.get("architectures") or ["ForCausalLM"]
    classes = classes if isinstance(classes, list) else [classes]
    if config.get("is_encoder_decoder") or not any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in classes
    ):
        names = ", ".join(str(name) for name in classes)
        kind = "an encoder with a decoder" if config.get("is_encoder_decoder") else names
        raise ModelError(
            f"this is not a decoder-only language model, but {kind:.200} (model type "
            f"'{model_type!s:.80}'): pruning needs one that predicts the next token "
            "(…ForCausalLM)"
        )
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ModelError(f"model type '{model_type}' is not supported; {supported}")
    return ARCHITECTURES[model_type]


LARGEST = {
    "num_hidden_layers": 512,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
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
    """

    layers: int
    hidden: int
    head_dim: int
    kv_heads: int
    group: int
    ffn: int

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
        return cls(layers, hidden, head_dim, kv_heads, heads // kv_heads, ffn)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def units(self, site: Site) -> int:
        """How many units the site has."""
        return self.kv_heads if site is ATTENTION else self.ffn

    def columns_per_unit(self, site: Site) -> int:
        """How many consumer columns one unit owns."""
        return self.group * self.head_dim if site is ATTENTION else 1
