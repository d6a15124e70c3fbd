"""Supported architectures, as values: layout, formats, quirks (METHODS §1).

All have grouped-query attention with q/k/v/o projections, and a gated MLP or experts. They differ
in whether attention can lose units, which biases a configuration can express (and so which format a
pruned model can be written in), and how a block adds up attention and MLP. A new architecture is
one value here; the contract tests then run over it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coec.errors import ModelError
from coec.models.files import JsonDict
from coec.models.layout import (
    ATTENTION,
    FUSED_BLOCKS,
    LLAMA_BLOCKS,
    MIXTRAL_BLOCKS,
    MLP,
    MLP_ONLY_BLOCKS,
    QWEN_MOE_BLOCKS,
    BlockPattern,
)
from coec.models.shape import Shape


def _nothing_added(shape: Shape) -> JsonDict:
    return {}


def _nothing_refused(config: JsonDict, pruned: Shape) -> str | None:
    return None


@dataclass(frozen=True)
class Architecture:
    """A supported model type.

    Attributes:
        model_type: the `model_type` of its configuration.
        class_name: the transformers class a checkpoint names.
        families: the usual names of its models.
        source: publication.
        written_as: model types that a pruned model may be written as; the first that fits is used.
        bias_flags: by site, the configuration key that gives its consumer a bias, if there is one.
        foreign: keys of other types that a configuration relabelled as this type must not carry.
        added: keys that a configuration relabelled as this type gets, by the pruned sizes.
        refuses: says why this type cannot hold a model of a configuration at pruned sizes; None if
            it can.
        adds: what its blocks add to the hidden states, unless attention and MLP each add their
            output in turn; such a block cannot be fitted site by site.
        rope_keys: keys that its `rope_scaling` must have in transformers 4.57, if that accepts no
            others.
        attention_kept: why attention keeps all its units; empty if it may lose some.
        blocks: names of its modules, and the places where units are removed.
    """

    model_type: str
    class_name: str
    families: str
    source: str
    written_as: tuple[str, ...]
    bias_flags: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    added: Callable[[Shape], JsonDict] = _nothing_added
    refuses: Callable[[JsonDict, Shape], str | None] = _nothing_refused
    adds: str = ""
    rope_keys: tuple[str, ...] = ()
    attention_kept: str = ""
    blocks: BlockPattern = LLAMA_BLOCKS


def _llama_refuses(config: JsonDict, pruned: Shape) -> str | None:
    if pruned.hidden % pruned.heads:
        return f"hidden size {pruned.hidden} is not a multiple of {pruned.heads} heads"
    return None


def _mistral_refuses(config: JsonDict, pruned: Shape) -> str | None:
    return "it has no biases" if config.get("attention_bias") else None


def _no_window(shape: Shape) -> JsonDict:
    return {"sliding_window": None}


def _neutral_multipliers(shape: Shape) -> JsonDict:
    return {
        "attention_multiplier": shape.head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }


def _qwen2_biases(shape: Shape) -> JsonDict:
    """Only Qwen2 is relabelled as Seed-OSS, and it always has q, k and v biases."""
    return {"attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0}


ARCHITECTURES: dict[str, Architecture] = {
    a.model_type: a
    for a in (
        Architecture(
            model_type="llama",
            class_name="LlamaForCausalLM",
            families="Llama 1, 2, 3, 3.1-3.3; DeepSeek-R1-Distill-Llama",
            source="Touvron et al. 2023; Llama Team 2024",
            written_as=("llama", "mistral", "granite"),
            bias_flags={ATTENTION.name: "attention_bias", MLP.name: "mlp_bias"},
            foreign=("sliding_window",),
            refuses=_llama_refuses,
        ),
        Architecture(
            model_type="mistral",
            class_name="MistralForCausalLM",
            families="Mistral 7B, Nemo, Small (text)",
            source="Jiang et al. 2023",
            written_as=("mistral", "llama", "granite"),
            foreign=("attention_bias", "mlp_bias", "pretraining_tp"),
            added=_no_window,
            refuses=_mistral_refuses,
        ),
        Architecture(
            model_type="qwen2",
            class_name="Qwen2ForCausalLM",
            families="Qwen2, Qwen2.5, QwQ; DeepSeek-R1-Distill-Qwen",
            source="Qwen Team 2024",
            written_as=("qwen2", "seed_oss"),
        ),
        Architecture(
            model_type="qwen3",
            class_name="Qwen3ForCausalLM",
            families="Qwen3 (dense); DeepSeek-R1-0528-Qwen3-8B",
            source="Qwen Team 2025",
            written_as=("qwen3",),
            bias_flags={ATTENTION.name: "attention_bias"},
        ),
        Architecture(
            model_type="granite",
            class_name="GraniteForCausalLM",
            families="Granite 3 (dense); a pruned Llama with biases is written as this",
            source="IBM Granite Team 2024",
            written_as=("granite",),
            bias_flags={ATTENTION.name: "attention_bias", MLP.name: "mlp_bias"},
            foreign=("pretraining_tp", "sliding_window"),
            added=_neutral_multipliers,
        ),
        Architecture(
            model_type="seed_oss",
            class_name="SeedOssForCausalLM",
            families="Seed-OSS; a pruned Qwen2 with biases is written as this",
            source="ByteDance Seed Team 2025",
            written_as=("seed_oss",),
            bias_flags={ATTENTION.name: "attention_out_bias", MLP.name: "mlp_bias"},
            foreign=(
                "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
            ),
            added=_qwen2_biases,
        ),
        Architecture(
            model_type="smollm3",
            class_name="SmolLM3ForCausalLM",
            families="SmolLM3 (some layers without rotary positions)",
            source="Bakouch et al. 2025",
            written_as=("smollm3",),
            bias_flags={ATTENTION.name: "attention_bias", MLP.name: "mlp_bias"},
        ),
        Architecture(
            model_type="gemma2",
            class_name="Gemma2ForCausalLM",
            families="Gemma 2",
            source="Gemma Team 2024",
            written_as=("gemma2",),
            bias_flags={ATTENTION.name: "attention_bias"},
            adds="what a norm makes of each part",
        ),
        Architecture(
            model_type="gemma3_text",
            class_name="Gemma3ForCausalLM",
            families="Gemma 3 (text: 270M, 1B)",
            source="Gemma Team 2025",
            written_as=("gemma3_text",),
            bias_flags={ATTENTION.name: "attention_bias"},
            adds="what a norm makes of each part",
        ),
        Architecture(
            model_type="cohere2",
            class_name="Cohere2ForCausalLM",
            families="Command R7B, Command A",
            source="Cohere Team 2025",
            written_as=("cohere2",),
            bias_flags={ATTENTION.name: "attention_bias"},
            adds="both parts, of the same inputs",
        ),
        Architecture(
            model_type="olmo2",
            class_name="Olmo2ForCausalLM",
            families="OLMo 2 (MLP channels only)",
            source="OLMo Team 2024",
            written_as=("olmo2",),
            adds="what a norm makes of each part",
            attention_kept="norms of its queries and of its keys run over all heads together",
            blocks=MLP_ONLY_BLOCKS,
        ),
        Architecture(
            model_type="phi3",
            class_name="Phi3ForCausalLM",
            families="Phi-3, Phi-3.5, Phi-4 (text)",
            source="Abdin et al. 2024",
            written_as=("phi3",),
            rope_keys=("type", "short_factor", "long_factor"),
            blocks=FUSED_BLOCKS,
        ),
        Architecture(
            model_type="mixtral",
            class_name="MixtralForCausalLM",
            families="Mixtral 8x7B, 8x22B",
            source="Jiang et al. 2024",
            written_as=("mixtral",),
            adds="a sum of experts, weighed by a router",
            blocks=MIXTRAL_BLOCKS,
        ),
        Architecture(
            model_type="qwen3_moe",
            class_name="Qwen3MoeForCausalLM",
            families="Qwen3 30B-A3B, 235B-A22B; Qwen3-Coder",
            source="Qwen Team 2025",
            written_as=("qwen3_moe",),
            bias_flags={ATTENTION.name: "attention_bias"},
            adds="a sum of experts, weighed by a router",
            blocks=QWEN_MOE_BLOCKS,
        ),
    )
}  # fmt: skip


def _check_text_alone(config: JsonDict) -> None:
    """Raise ModelError for a multimodal model."""
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
    """Look up the architecture of a raw configuration.

    Raises:
        ModelError: the model is an encoder, quantised, or of a type not listed.
    """
    supported = f"supported: {', '.join(ARCHITECTURES)}"
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
        model = "an encoder with a decoder" if config.get("is_encoder_decoder") else names
        raise ModelError(
            f"this is not a decoder-only language model, but {model:.200} (model type "
            f"'{model_type!s:.80}'): pruning needs one that predicts the next token "
            "(…ForCausalLM)"
        )
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ModelError(f"model type '{model_type}' is not supported; {supported}")
    return ARCHITECTURES[model_type]
