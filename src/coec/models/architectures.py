"""Supported architectures: layout, formats, quirks (METHODS §1); data in `architectures.toml`.

All have grouped-query attention with q/k/v/o projections, and a gated MLP or experts. They differ
in whether attention can lose units, which biases a configuration can express (and so which format a
pruned model can be written in), and how a block adds up attention and MLP. A new architecture is
one table there; the contract tests then run over it.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from coec.errors import ModelError
from coec.models.block_patterns import (
    FUSED_BLOCKS,
    LLAMA_BLOCKS,
    MIXTRAL_BLOCKS,
    MLP_ONLY_BLOCKS,
    QWEN_MOE_BLOCKS,
    BlockPattern,
)
from coec.models.files import JsonDict
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


_ADDED = {
    "mistral": _no_window,
    "granite": _neutral_multipliers,
    "seed_oss": _qwen2_biases,
}
_REFUSES = {"llama": _llama_refuses, "mistral": _mistral_refuses}
_BLOCKS = {
    "llama": LLAMA_BLOCKS,
    "mlp_only": MLP_ONLY_BLOCKS,
    "fused": FUSED_BLOCKS,
    "mixtral": MIXTRAL_BLOCKS,
    "qwen_moe": QWEN_MOE_BLOCKS,
}


def _read() -> dict[str, Architecture]:
    text = files("coec.models").joinpath("architectures.toml").read_text(encoding="utf-8")
    architectures: dict[str, Architecture] = {}
    for name, table in tomllib.loads(text).items():
        fields: JsonDict = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        fields["blocks"] = _BLOCKS[table.get("blocks", "llama")]
        architectures[name] = Architecture(
            model_type=name,
            added=_ADDED.get(name, _nothing_added),
            refuses=_REFUSES.get(name, _nothing_refused),
            **fields,
        )
    return architectures


ARCHITECTURES = _read()
"""The supported architectures, by model type."""


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
