"""Which stock format a pruned model is written in, decided before any work (docs/FORMATS.md).

transformers ≥ 5.4 refuses a Llama whose hidden size is not a multiple of its head count, at save
and at load, whatever `head_dim` says. The same weights under another model type compute the same
function, so the checkpoint is relabelled. Candidates are tried in order; the first that can
express the pruned shape and its biases, and whose configuration class accepts it, is used.
"""

import copy
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from coec.errors import OptionError
from coec.models.architectures import ARCHITECTURES, Architecture, Shape

CANDIDATES: dict[str, tuple[str, ...]] = {
    "llama": ("llama", "mistral", "granite"),
    "mistral": ("mistral", "llama", "granite"),
    "qwen2": ("qwen2", "seed_oss"),
    "qwen3": ("qwen3",),
    "granite": ("granite",),
    "seed_oss": ("seed_oss",),
}

FOREIGN_KEYS = {
    "llama": ("sliding_window",),
    "mistral": ("attention_bias", "mlp_bias", "pretraining_tp"),
    "granite": ("pretraining_tp", "sliding_window"),
    "seed_oss": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}
"""Keys of the original configuration that a relabelled one must not carry."""


@dataclass(frozen=True)
class OutputFormat:
    """The format of the pruned checkpoint.

    Attributes:
        config: the whole config.json.
        relabelled: whether the model type changed, and why.
        loads_in: loader → `yes` or what to know. transformers is checked by this package's tests;
            the servers' rows are read from their sources, not run.
    """

    config: dict[str, Any]
    relabelled: str | None
    loads_in: dict[str, str]

    @property
    def model_type(self) -> str:
        """The model type written."""
        return str(self.config["model_type"])


def choose_format(
    config: dict[str, Any],
    shape: Shape,
    *,
    o_proj_bias: bool,
    down_proj_bias: bool,
) -> OutputFormat:
    """The first candidate format that expresses the pruned model.

    Args:
        config: the dense model's raw configuration.
        shape: the pruned shape.
        o_proj_bias: whether `o_proj` will have a bias (its own, or the compensation's).
        down_proj_bias: likewise.

    Raises:
        OptionError: no stock format can hold the result.
    """
    refusals: list[str] = []
    for model_type in CANDIDATES[config["model_type"]]:
        target = ARCHITECTURES[model_type]
        refusal = _refusal(config, target, shape, o_proj_bias, down_proj_bias)
        if refusal is None:
            new = _rewritten(config, target, shape, o_proj_bias, down_proj_bias)
            try:
                AutoConfig.for_model(**copy.deepcopy(new))  # it changes what it is given
            except Exception as error:  # whatever a configuration class raises is its refusal
                refusal = (str(error).strip().splitlines() or [repr(error)])[-1].strip()
        if refusal is None:
            relabelled = "; ".join(refusals) if refusals else None
            return OutputFormat(new, relabelled, _loads_in(new, shape, o_proj_bias, down_proj_bias))
        refusals.append(f"not {model_type}: {refusal}")
    raise OptionError(
        f"no stock format can hold this pruned model ({'; '.join(refusals)}); "
        "choose another sparsity or a compensation without a bias"
    )


def _refusal(
    config: dict[str, Any],
    target: Architecture,
    shape: Shape,
    o_proj_bias: bool,
    down_proj_bias: bool,
) -> str | None:
    """Why the target cannot express the model, independent of the installed transformers."""
    if target.model_type == "llama" and shape.hidden % shape.heads:
        return f"hidden size {shape.hidden} is not a multiple of {shape.heads} heads"
    if o_proj_bias and target.o_proj_flag is None:
        return "it has no bias on o_proj"
    if down_proj_bias and target.down_proj_flag is None:
        return "it has no bias on down_proj"
    relabelled = target.model_type != config["model_type"]
    if relabelled and _slides(config):
        return "it has no sliding window"
    if target.model_type == "mistral" and config.get("attention_bias"):
        return "it has no biases"
    return None


def _slides(config: dict[str, Any]) -> bool:
    if "use_sliding_window" in config:
        return bool(config["use_sliding_window"])
    return config.get("sliding_window") is not None


def _rewritten(
    config: dict[str, Any],
    target: Architecture,
    shape: Shape,
    o_proj_bias: bool,
    down_proj_bias: bool,
) -> dict[str, Any]:
    """The raw configuration with the pruned sizes, under the target's model type."""
    new = {k: v for k, v in config.items() if k not in ("_name_or_path", "auto_map")}
    relabelled = target.model_type != config["model_type"]
    if relabelled:
        new = {k: v for k, v in new.items() if k not in FOREIGN_KEYS[target.model_type]}
    new |= {
        "model_type": target.model_type,
        "architectures": [target.class_name],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
    }
    if target.o_proj_flag and o_proj_bias:
        new[target.o_proj_flag] = True
    if target.down_proj_flag and down_proj_bias:
        new[target.down_proj_flag] = True
    if relabelled and target.model_type == "mistral":
        new["sliding_window"] = None
    if relabelled and target.model_type == "granite":
        new |= {
            "attention_multiplier": shape.head_dim**-0.5,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        }
    if relabelled and target.model_type == "seed_oss":
        # Qwen2 always has q, k and v biases.
        new |= {"attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0}
    return new


def _loads_in(
    config: dict[str, Any], shape: Shape, o_proj_bias: bool, down_proj_bias: bool
) -> dict[str, str]:
    """Rules read in the loaders' sources (docs/FORMATS.md names the versions)."""
    model_type = config["model_type"]
    full_width = shape.heads * shape.head_dim == shape.hidden
    table = {"transformers": "yes", "vLLM": "yes", "SGLang": "yes", "llama.cpp": "yes"}
    if model_type == "qwen2" and not full_width:
        table["vLLM"] = "with --model-impl transformers (its Qwen2 ignores head_dim)"
        table["llama.cpp"] = "no (its qwen2 ignores head_dim)"
    if model_type == "seed_oss":
        table["vLLM"] = "with --model-impl transformers"
        table["SGLang"] = "not known"
        table["llama.cpp"] = "no" if o_proj_bias or down_proj_bias else "not known"
    if model_type == "granite" and not full_width:
        table["llama.cpp"] = "no (its converter drops head_dim)"
    if model_type == "llama" and down_proj_bias:
        table["SGLang"] = "no (it drops down_proj.bias without a word)"
    if model_type == "qwen3" and o_proj_bias:
        table["vLLM"] = "no (its Qwen3 has no o_proj bias)"
    return table
