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
    model_type = str(config.get("model_type"))
    quantisation = config.get("quantization_config")
    if quantisation:
        known = isinstance(quantisation, dict)
        method = quantisation.get("quant_method", "unknown method") if known else quantisation
        raise ModelError(
            f"the weights are quantised ({method}): pruning needs float weights; "
            "use the original checkpoint, prune it, then quantise the result"
        )
    classes = config.get("architectures") or ["ForCausalLM"]
    if not isinstance(classes, list):
        raise ModelError(f"'architectures' in config.json must be a list, got {classes!r:.80}")
    if config.get("is_encoder_decoder") or not any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in classes
    ):
        names = ", ".join(str(name) for name in classes)
        kind = "an encoder with a decoder" if config.get("is_encoder_decoder") else names
        raise ModelError(
            f"this is not a decoder-only language model, but {kind:.200} (model type "
            f"'{model_type:.80}'): pruning needs one that predicts the next token (…ForCausalLM)"
        )
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"model type '{model_type}' is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]


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
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            layers, ffn = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        except KeyError as error:
            raise ModelError(f"config.json lacks {error}") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"a size in config.json is no whole number: {error}") from error
        if min(layers, hidden, head_dim, heads, kv_heads, ffn) < 1:
            raise ModelError(
                f"a size in config.json is below 1 ({layers} layers, hidden size {hidden}, {heads} "
                f"heads of {head_dim}, {kv_heads} KV groups, {ffn} intermediate channels)"
            )
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
