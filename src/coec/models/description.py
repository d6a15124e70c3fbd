"""A model as its configuration describes it, before any weight is opened."""

import copy
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coec.errors import ModelError
from coec.models import multimodal
from coec.models.architectures import ARCHITECTURES, CORRECTION, Architecture, architecture_of
from coec.models.files import FLOAT_DTYPES, Header, JsonDict, read_tensor
from coec.models.folder import CONFIG, find_model, read_config
from coec.models.layout import BLOCK_WIDTHS, LIMITS, Layout, Shape, Site, read_size
from coec.models.multimodal import Around
from coec.models.non_uniform import class_of
from coec.models.quantised import QUANTISATION, released_in
from coec.models.surgery import unstacked

_Model = TypeVar("_Model", bound="Description")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
HEAD, _EMBEDDING = Layout.head, Layout.embedding
_PARAMETER = re.compile(r"(model|lm_head)\..*(weight|bias)")
"""Names of tensors that would change the function of a model with another configuration."""
DRAFTS = "num_nextn_predict_layers"
"""Configuration key of the number of layers after the last: servers draft further tokens with
them, and transformers does not read them. They are left out."""
_POSITIONS = "max_position_embeddings"
_LOW_RANK = "kv_lora_rank"
"""Configuration key of attention whose keys and values are of low rank."""
_PARTIAL = "partial_rotary_factor"
"""Fraction of a head that is rotated; the old form has it next to `rope_scaling`."""


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
        tied: true if the output head is the embedding.
        around: the multimodal model that it is inside of, if it is.
        released: format of quantised weights, which are read as bfloat16; None if they are floats.
    """

    config: JsonDict
    architecture: Architecture
    shape: Shape
    layout: Layout
    shapes: dict[str, torch.Size]
    positions: int
    vocabulary: int
    tied: bool
    around: Around | None
    released: str | None

    @staticmethod
    def of(config: JsonDict) -> "Description":
        """Describe the model of a raw configuration; raises ModelError if it is unsupported.

        Inside a multimodal model it is the language model.
        """
        if around := multimodal.around(config):
            config = language_model(config)
        architecture, shape = architecture_of(config), Shape.of(config)
        for key in LIMITS:
            read_size(config, key, 1)  # the classes below have defaults of these sizes
        released = released_in(config)
        config = {key: value for key, value in config.items() if key != QUANTISATION}
        config |= {"dtype": "bfloat16"} if released else {}
        config = _with_both_ropes(config, architecture.rope_keys)
        config |= {DRAFTS: 0} if DRAFTS in config else {}
        model = _skeleton(_stock(config))  # is read, and not changed
        resolved = model.config
        # Defaults of the configuration class → shapes of all tensors → blocks and sites
        experts = architecture.blocks.experts
        for key in (experts.count, "num_experts_per_tok") if experts else ():
            if config.get(key) is None:  # transformers 5 saves the first under another name
                config = {**config, key: getattr(resolved, key)}
                shape = Shape.of(config)
        tied = bool(getattr(resolved, "tie_word_embeddings", False))
        # Tensors on the meta device, which take no memory, are taken apart for their shapes.
        stored = unstacked(model.state_dict(), experts)
        shapes = {n: t.shape for n, t in stored.items() if not (tied and n == HEAD)}
        read = {key: getattr(resolved, key, None) for key in (_POSITIONS, "vocab_size")}
        return Description(
            config=config,
            architecture=architecture,
            shape=shape,
            layout=architecture.blocks.layout(shape, shapes),
            shapes=shapes,
            positions=read_size(read, _POSITIONS),
            vocabulary=read_size(read, "vocab_size"),
            tied=tied,
            around=around,
            released=released,
        )

    @staticmethod
    def read(model: "str | Path | Description") -> "Description":
        """Describe the model of a folder, a config.json, or a hub name; no weights are read."""
        if isinstance(model, Description):
            return model
        return Description.of(read_config(find_model(model, weights=False)))

    def counted_in(self: _Model, units: Literal["groups", "heads"]) -> _Model:
        """Return the model with KV groups, or query heads, as the units of its attention."""
        heads = units == "heads"
        if heads == any(site.groups for site in self.layout.sites):
            return self
        layout = self.architecture.blocks.layout(self.shape, self.shapes, heads=heads)
        return replace(self, layout=layout)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def vocabulary_parameters(self) -> int:
        """Number of parameters of the embedding and the head."""
        return sum(self.shapes[n].numel() for n in (_EMBEDDING, HEAD) if n in self.shapes)

    def cached(self, blocks: Iterable[int] | None = None) -> int:
        """Return the size of a server's cache per token, of some blocks: their keys and values.

        If keys and values of attention are of low rank, it keeps the low-rank ones.
        """
        numbers = range(self.shape.layers) if blocks is None else blocks
        if rank := self.config.get(_LOW_RANK):
            return sum(rank + int(self.config["qk_rope_head_dim"]) for _ in numbers)
        return sum(2 * self.shape.at(n).kv_heads * self.shape.head_dim for n in numbers)

    def cached_by_unit(self, site: Site) -> int:
        """Return how much of that belongs to one unit of a site: nothing but for a KV group."""
        is_group = site.value is not None and not site.groups and not self.config.get(_LOW_RANK)
        return 2 * self.shape.head_dim if is_group else 0

    def skeleton(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Build the transformers model on the meta device: shapes, no memory."""
        model: Any = copy.deepcopy(_skeleton(_stock(self.config)))
        model.config.dtype = dtype
        retyped: PreTrainedModel = model.to(dtype)
        return retyped


def language_model(config: JsonDict) -> JsonDict:
    """Return the configuration of the language model inside a multimodal one.

    Raises ModelError where that is not supported.
    """
    if config.get(QUANTISATION):
        raise ModelError(
            "this is a multimodal model with quantised weights, which is not read: give the "
            "original checkpoint"
        )
    text = multimodal.alone(config)
    listed = ARCHITECTURES.get(str(text["model_type"]))
    if listed is None:
        names = config.get("architectures") or [config.get("model_type")]
        raise ModelError(
            f"this is a multimodal model ({names[0]!s:.80}) whose language model "
            f"'{text['model_type']!s:.80}' is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return {**text, "architectures": [listed.class_name]}


def _stock(config: JsonDict) -> str:
    """Return a raw configuration as JSON; without `auto_map` no remote code is asked for."""
    return json.dumps({k: v for k, v in config.items() if k != "auto_map"})


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
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"transformers does not accept this {CONFIG}: {lines[-1].strip()}"
        ) from error
    return model.eval()


def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute a skeleton's buffers outside its layers; raises ModelError if one has no value.

    These are no weights, and are stored nowhere: rotary frequencies, and the factor of embeddings
    in some models. Their classes compute them.
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
    computes with; of its keys those named, if it accepts no others.
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
    # The new form, written in the old one; an old form next to it must agree.
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


def numbered_layers(headers: Mapping[str, Header]) -> dict[str, int]:
    """Number of the layer that every tensor of a layer belongs to, by the tensor's name."""
    return {name: int(match[1]) for name in headers if (match := LAYER.match(name))}


def drafts_of(headers: Mapping[str, Header], config: JsonDict) -> set[str]:
    """Names of the tensors of the layers that `DRAFTS` counts."""
    layers, drafts = (config.get(key) for key in ("num_hidden_layers", DRAFTS))
    if not isinstance(layers, int) or not isinstance(drafts, int):
        return set()
    numbers = numbered_layers(headers)
    return {name for name, number in numbers.items() if layers <= number < layers + drafts}


def check_layers(folder: Path, headers: Mapping[str, Header], config: JsonDict) -> None:
    """Raise ModelError unless the files hold as many layers as the configuration; builds none."""
    architecture_of(config)
    layers, numbers = Shape.of(config).layers, numbered_layers(headers)
    if beyond := [name for name, number in numbers.items() if number >= layers]:
        raise ModelError(
            f"'{folder}' holds more layers than the {layers} in config.json "
            f"(first: {min(beyond, key=numbers.__getitem__)}); mend num_hidden_layers"
        )
    missing = set(range(layers)).difference(numbers.values())
    if numbers and missing:
        raise ModelError(
            f"'{folder}' lacks layer {min(missing)} of the {layers} in config.json; download it "
            "again, or mend num_hidden_layers"
        )


def has_separate_head(folder: Path, headers: Mapping[str, Header]) -> bool:
    """Compare the stored head with the embedding; a copy in a narrower dtype is no other head."""
    if HEAD not in headers or _EMBEDDING not in headers:
        return False
    head, embedding = (
        read_tensor(folder / headers[name].file, headers[name].stored)
        for name in (HEAD, _EMBEDDING)
    )
    if head.shape != embedding.shape:
        return True
    # A copy in a narrower dtype is the embedding, rounded: compared in that.
    narrow = min(head.dtype, embedding.dtype, key=lambda dtype: dtype.itemsize)
    return not torch.equal(head.to(narrow), embedding.to(narrow))


def check_headers(
    folder: Path, headers: Mapping[str, Header], expected: Mapping[str, torch.Size]
) -> torch.dtype:
    """Check every tensor by its header; return the narrowest dtype that holds all weights.

    Corrections of a router are left out: they are float32 next to narrower weights.
    """
    missing = [name for name in expected if name not in headers]
    if missing:
        raise ModelError(
            f"'{folder}' lacks {len(missing)} of {len(expected)} tensors "
            f"(first: {missing[0]}); download it again"
        )
    # A tensor beyond those expected may be let pass, unless the function would miss it.
    for name, header in headers.items():
        place = f"{name} in '{header.file}'"
        if name not in expected:
            if _PARAMETER.fullmatch(name) and name != HEAD:
                raise ModelError(
                    f"{place} has no place in a model of this config.json: it would be dropped; "
                    "mend the configuration (a bias has a flag there), or the files"
                )
            continue
        if header.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{place} is {header.dtype}: the weights are quantised; pruning needs float weights"
            )
        if header.shape != tuple(expected[name]):
            hint = "; ZeRO-3 leaves empty tensors: gather them first (zero_to_fp32.py)"
            empty = hint if 0 in header.shape else ""
            raise ModelError(
                f"{place} has shape {header.shape}, config.json says {tuple(expected[name])}{empty}"
            )
    weights = [name for name in expected if not name.endswith(CORRECTION)]
    dtypes = {FLOAT_DTYPES[headers[name].dtype] for name in weights}
    return functools.reduce(torch.promote_types, sorted(dtypes, key=str))
