"""A model as its configuration describes it, before any weight is opened."""

import copy
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coec.errors import ModelError
from coec.models.architectures import ARCHITECTURES, Architecture, architecture_of
from coec.models.companion_files import DOWNLOADED, NOT_DOWNLOADED
from coec.models.experts import stored_shapes
from coec.models.files import JsonDict, check_fetched, parse_json
from coec.models.layout import Layout
from coec.models.non_uniform import as_read, class_of
from coec.models.shape import BLOCK_WIDTHS, LIMITS, Shape, read_size

CONFIG = "config.json"
MERGE = (
    "merge it first (PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(FOLDER)), "
    "and give that folder"
)
_GGUF = (
    "'{}' is a GGUF file, which no weights can be pruned in: give the folder with config.json and "
    "safetensors that it was made from"
)
_PARTIAL = "partial_rotary_factor"
"""Fraction of a head that is rotated; the old form has it beside `rope_scaling`."""


@dataclass(frozen=True, eq=False)
class Description:
    """A model as its configuration describes it.

    Attributes:
        config: the configuration, complete for every supported release of transformers.
        architecture: the entry of its model type.
        shape: the sizes that pruning reads and changes.
        layout: its blocks and their sites.
        shapes: shape of every tensor that a checkpoint stores; a tied output head is not stored.
        positions: the largest number of tokens that it can take.
        vocabulary: number of token ids.
        tied: whether the output head is the embedding.
    """

    config: JsonDict
    architecture: Architecture
    shape: Shape
    layout: Layout
    shapes: dict[str, torch.Size]
    positions: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: JsonDict) -> "Description":
        """Describe the model of a raw configuration.

        Raises:
            ModelError: it is of no supported model, or inconsistent.
        """
        return cls(**described(config))

    @classmethod
    def read(cls, model: "str | Path | Description") -> "Description":
        """Describe the model of a folder, a config.json, or a hub name; no weights are read.

        Raises:
            ModelError: there is no such model, or its configuration cannot be used.
        """
        if isinstance(model, Description):
            return model
        return cls.of(read_config(find_model(model, weights=False)))

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(shape.numel() for shape in self.shapes.values())

    def skeleton(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Build the transformers model on the meta device: shapes, no memory."""
        return skeleton(self.config, dtype)


def described(config: JsonDict) -> JsonDict:
    """Compute the fields of a `Description`, by name."""
    architecture = architecture_of(config)
    shape = Shape.of(config)
    for key in LIMITS:
        read_size(config, key, 1)  # the classes below have defaults of these sizes
    config = _with_both_ropes(
        {k: v for k, v in config.items() if k != "quantization_config"}, architecture.rope_keys
    )
    model = skeleton(config)
    resolved = model.config
    names = architecture.blocks.experts
    if names and config.get(names.count) is None:
        config = {
            **config,
            names.count: resolved.num_experts,
        }  # transformers 5 saves it under another name
    tied = bool(getattr(resolved, "tie_word_embeddings", False))
    positions = getattr(resolved, "max_position_embeddings", None)
    state = {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    shapes = stored_shapes(state, architecture.blocks.experts)
    return {
        "config": config,
        "architecture": architecture,
        "shape": shape,
        "layout": architecture.blocks.layout(shape, shapes),
        "shapes": shapes,
        "positions": read_size({"max_position_embeddings": positions}, "max_position_embeddings"),
        "vocabulary": read_size({"vocab_size": resolved.vocab_size}, "vocab_size"),
        "tied": tied,
    }


def find_model(model: str | Path, *, weights: bool = True) -> Path:
    """Find the local folder of a model, or download a hub name into the cache.

    Args:
        weights: False accepts a configuration alone.

    Raises:
        ModelError: there is no such folder, and no such hub model can be downloaded.
    """
    path, name = Path(model), str(model)
    try:
        if path.is_dir():
            return path
        if path.is_file() and path.suffix == ".json" and not weights:
            return path
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a loop of links
        raise ModelError(f"'{_short(name)}' is no model folder: {_reason(error)}") from error
    if exists:
        check_fetched(path)
        raise ModelError(_no_folder(path, _short(name)))
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"no model at '{_short(name)}': give a folder with config.json and safetensors "
            "weights, or a hub name such as 'org/model'"
        )
    try:
        patterns = [*DOWNLOADED, *["*.safetensors"] * weights]
        ignored = [*NOT_DOWNLOADED]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
    except Exception as error:  # the hub's client may raise anything
        raise ModelError(
            f"'{_short(name)}' is no local folder and could not be downloaded: "
            f"{_short(_reason(error))}"
        ) from error


def _no_folder(path: Path, name: str) -> str:
    """Explain that a file is no model, and what to give instead."""
    if path.suffix == ".gguf":
        return _GGUF.format(name)
    return f"no model at '{name}', a file: give the folder with config.json and safetensors weights"


def check_merged(folder: Path) -> None:
    """Raise ModelError for a PEFT adapter, which holds only changes of a model."""
    path = folder / "adapter_config.json"
    if not path.is_file() or any(folder.glob("model*.safetensors*")):
        return
    try:
        base = parse_json(path).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = "an unknown model"
    raise ModelError(f"'{folder}' is a PEFT adapter of '{base!s:.200}': {MERGE}")


def read_config(model: Path) -> JsonDict:
    """Read the raw config.json of a model folder (or the file itself)."""
    try:
        path = model if model.is_file() else model / CONFIG
        config = parse_json(path)
    except FileNotFoundError as error:
        check_merged(model)
        if gguf := next(iter(sorted(model.glob("*.gguf"))), None):
            raise ModelError(_GGUF.format(gguf)) from error
        raise ModelError(f"no {CONFIG} in '{model}': it is not a model folder") from error
    except ValueError as error:
        raise ModelError(f"'{path}' is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' holds no JSON object")
    return as_read(config)


def skeleton(config: JsonDict, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build the transformers model of a raw configuration on the meta device.

    Raises:
        ModelError: the installed transformers does not accept the configuration.
    """
    # Without auto_map no remote code is asked for.
    stock = json.dumps({k: v for k, v in config.items() if k != "auto_map"})
    model: Any = copy.deepcopy(_skeleton(stock))
    model.config.dtype = dtype
    retyped: PreTrainedModel = model.to(dtype)
    return retyped


@functools.lru_cache(maxsize=4)
def _skeleton(config: str) -> PreTrainedModel:
    """Build a skeleton to copy, since building 80 blocks takes most of a second."""
    try:
        raw = json.loads(config)
        resolved = AutoConfig.for_model(**raw)
        listed = ARCHITECTURES.get(resolved.model_type)
        # Eager experts: stacked ones are multiplied in float32 and narrower dtypes only.
        experts = {"experts_implementation": "eager"} if listed and listed.blocks.experts else {}
        with torch.device("meta"):
            if raw.get(BLOCK_WIDTHS) is None:
                model = AutoModelForCausalLM.from_config(resolved, dtype=torch.float32, **experts)
            else:
                stock: Any = AutoModelForCausalLM._model_mapping[type(resolved)]
                model = class_of(stock)._from_config(resolved, dtype=torch.float32)
    except Exception as error:  # configuration classes may raise anything
        raise ModelError(
            f"transformers does not accept this {CONFIG}: {_reason(error, last=True)}"
        ) from error
    return model.eval()


def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute a skeleton's buffers outside its layers.

    These are no weights, and are stored nowhere: rotary frequencies, and the factor of embeddings
    in some models. Their classes compute them.

    Raises:
        ModelError: the installed transformers leaves one without a value.
    """
    base = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)
    embed = base.embed_tokens
    for name, buffer in embed.named_buffers(recurse=False):
        setattr(embed, name, torch.full_like(buffer, math.nan, device=device))
    model._init_weights(embed)  # its weight is still on the meta device, where that costs nothing
    for name, buffer in base.named_buffers():
        inside = name.startswith("layers.")
        if not inside and (buffer.is_meta or not torch.isfinite(buffer).all()):
            raise ModelError(
                f"the installed transformers ({transformers.__version__}) has no value for {name} "
                f"of a {model.config.model_type}: install a newer release"
            )


def _with_both_ropes(config: JsonDict, keys: tuple[str, ...]) -> JsonDict:
    """Add the rotary settings in the form of transformers 4.57, which does not read that of 5.

    4.57 silently reads a configuration with only `rope_parameters` as one of plain frequencies.
    Existing settings are never changed. An empty old form gets the values that transformers 5
    computes with.

    Args:
        config: the raw configuration.
        keys: the keys that the old form must have, if it accepts no others.

    Raises:
        ModelError: the two forms name different frequencies, so that releases would disagree.
    """
    new = config.get("rope_parameters")
    old, theta = config.get("rope_scaling"), config.get("rope_theta")
    if not isinstance(new, dict) or not new or not isinstance(old, dict | None):
        return config  # nothing to complete, or transformers refuses it
    if any(isinstance(value, dict) for value in new.values()):
        return config  # one per kind of layer, which the old form cannot express
    if theta is None:
        theta = new.get("rope_theta")
    if new.get("rope_theta", theta) != theta:
        raise ModelError(
            f"rope_theta in {CONFIG} is {theta}, in its rope_parameters "
            f"{new['rope_theta']}: releases of transformers read one or the other; mend it"
        )
    scaling = _scaling(new, keys)
    if old:
        if _scaling(old, keys) != scaling or old.get("rope_theta", theta) != theta:
            raise ModelError(
                f"rope_scaling in {CONFIG} is {old}, its rope_parameters {new}: releases of "
                "transformers read one or the other; mend it"
            )
        scaling = old
    added = {} if theta is None else {"rope_theta": theta}
    if _PARTIAL in new and config.get(_PARTIAL) is None:
        added[_PARTIAL] = new[_PARTIAL]
    return config | added | {"rope_scaling": scaling}


def _scaling(rope: JsonDict, keys: tuple[str, ...]) -> JsonDict | None:
    """Scaling of rotary frequencies in the old form; None if they are plain."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if keys:
        return {key: rope_type if key == "type" else rope.get(key) for key in keys}
    separate = ("rope_theta", "rope_type", "type", _PARTIAL)
    return {"rope_type": rope_type, **{k: v for k, v in rope.items() if k not in separate}}


def _reason(error: Exception, *, last: bool = False) -> str:
    """Summarize a library's error in one line; its type if it has no text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if last else 0].strip()


def _short(name: str) -> str:
    """Shorten a name for printing: impossible names would fill the screen."""
    return name if len(name) <= 200 else f"{name[:200]}…"
