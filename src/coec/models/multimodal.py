"""Language models inside multimodal ones: their configuration, and the names of their tensors.

The language model is pruned as if it stood alone. Everything else is carried over as it is, and the
configuration around it has its new sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig

from coec.errors import ModelError, OptionError, last_line
from coec.models.files import JsonDict, decoded

_T = TypeVar("_T")
MODALITIES = ("vision_config", "audio_config")
_TEXT = "text_config"
_DTYPES = ("dtype", "torch_dtype")
_TIED = "tie_word_embeddings"
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size",
)  # fmt: skip
"""Sizes that a release may leave to the class of the whole model, as Gemma 3's and LLaVA's do."""
_ALONE = {"qwen2_5_vl_text": "qwen2"}
"""Types of language models inside others → equivalent types for text alone."""
_MULTIMODAL_ROPE = "mrope_section"
"""Key of rotary settings with positions in time, height and width, which agree over text."""
_NAMES = (
    ("language_model.", ""), ("model.language_model.", "model."),
    ("model.text_model.", "model."), ("", ""),
)  # fmt: skip
"""Prefixes of the language model's tensor names in a file, and when it stands alone."""
_INSIDE = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


@dataclass(frozen=True)
class Around:
    """Multimodal model around a language model.

    Attributes:
        config: the whole configuration.
        outer, inner: prefixes of the language model's tensor names in files, and alone.
    """

    config: JsonDict
    outer: str = ""
    inner: str = ""

    @property
    def name(self) -> str:
        """The class of the whole model."""
        return str((self.config.get("architectures") or [self.config.get("model_type")])[0])

    def alone(self, stored: str) -> str | None:
        """Return the name of a stored tensor when the language model stands alone; None outside."""
        name = self.inner + stored.removeprefix(self.outer)
        inside = stored.startswith(self.outer) if self.outer else name.startswith(_INSIDE)
        return name if inside else (stored if stored.startswith("lm_head.") else None)

    def split(self, stored: Mapping[str, _T]) -> tuple[dict[str, _T], dict[str, _T]]:
        """Return what files have of the language model, by names as if it stood alone; the rest."""
        alone = {whole: self.alone(whole) for whole in stored}
        inside = {name: stored[whole] for whole, name in alone.items() if name is not None}
        return inside, {whole: stored[whole] for whole, name in alone.items() if name is None}

    def stored(self, name: str) -> str:
        """Return the name in files of a tensor of the language model."""
        if self.outer != "language_model." and name.startswith("lm_head."):
            return name
        return self.outer + name.removeprefix(self.inner)

    def with_sizes(self, before: JsonDict, after: JsonDict) -> JsonDict:
        """Return the whole configuration, with what pruning changed of the language model's."""
        changed = {
            key: value
            for key, value in after.items()
            if key not in ("architectures", "model_type")
            and (key in _SIZES or before.get(key) != value)
        }
        dtypes = {key: changed[key] for key in _DTYPES if key in changed and key in self.config}
        # Releases of transformers read one place or the other
        tied = {_TIED: after[_TIED]}
        text = {**self.config[_TEXT], **changed, **tied}
        return {**self.config, **dtypes, **tied, _TEXT: text}

    def outside(self) -> int:
        """Return the number of parameters of all but the language model."""
        named = self._built(self.config).named_parameters()
        return sum(p.numel() for n, p in named if not (_is_language(n) or "lm_head" in n))

    def _built(self, config: JsonDict) -> torch.nn.Module:
        """Build the whole model without memory; OptionError where its class refuses."""
        try:
            kind = getattr(transformers, self.name)
            with torch.device("meta"):
                model: torch.nn.Module = kind._from_config(AutoConfig.for_model(**config))
        except Exception as error:  # configuration classes may raise anything
            raise self._refusal(last_line(error)) from error
        return model

    def check(self, config: JsonDict, shapes: dict[str, torch.Size]) -> None:
        """Raise OptionError unless the whole model's class builds the language model so.

        Args:
            config: the whole configuration.
            shapes: of the language model's tensors, as it runs alone.
        """
        model = self._built(config)
        # In memory the parts have other names than in files: compared by what follows the block.
        built = {name.rpartition("layers.")[2]: p.shape for name, p in model.state_dict().items()
                 if _is_language(name) and "layers." in name}  # fmt: skip
        for name, shape in shapes.items():
            if "layers." in name and (found := built.get(name.rpartition("layers.")[2])) != shape:
                had = "none" if found is None else tuple(found)
                raise self._refusal(f"{name} is {tuple(shape)}, and {had} there")

    def _refusal(self, reason: str) -> OptionError:
        return OptionError(
            f"{self.name} cannot hold a language model of these sizes ({reason}): set "
            "attention_sparsity = 0, or a compensation without a bias"
        )


def _is_language(name: str) -> bool:
    """Return whether a tensor of the whole model in memory is in its language model."""
    return "language_model" in name or "text_model" in name


def around(config: JsonDict, stored: Any = ()) -> Around | None:
    """Return the model around the language model of a configuration; None if it stands alone.

    Args:
        config: the whole configuration.
        stored: names of the tensors in files, which tell how they begin.
    """
    text = config.get(_TEXT)
    if not isinstance(text, dict) or not any(key in config for key in MODALITIES):
        return None
    for outer, inner in _NAMES:
        if any(
            name.startswith(f"{outer}{'model.' if not inner else ''}layers.") for name in stored
        ):
            return Around(config, outer, inner)
    return Around(config)


def alone(config: JsonDict) -> JsonDict:
    """Return the configuration of the language model, as if it stood alone.

    Raises ModelError where transformers does not accept the whole.
    """
    try:
        whole = AutoConfig.for_model(**decoded(config))
    except Exception as error:  # configuration classes may raise anything
        raise ModelError(
            f"transformers does not accept this multimodal config.json: {last_line(error)}"
        ) from error
    sizes = {key: getattr(getattr(whole, _TEXT, None), key, None) for key in _SIZES}
    text = {key: size for key, size in sizes.items() if type(size) is int} | config[_TEXT]
    text["model_type"] = _ALONE.get(str(text.get("model_type")), text.get("model_type"))
    text[_TIED] = bool(getattr(whole, _TIED, False) or text.get(_TIED))
    for key in _DTYPES:
        if key in config:
            text.setdefault(key, config[key])
    # Plain frequencies, in the form of transformers 4 and in that of 5
    if _MULTIMODAL_ROPE in (text.get("rope_scaling") or ()):
        text["rope_scaling"] = None
    if _MULTIMODAL_ROPE in (rope := text.get("rope_parameters") or {}):
        plain = {key: value for key, value in rope.items() if key != _MULTIMODAL_ROPE}
        text["rope_parameters"] = plain | {"rope_type": "default"}
    return text
