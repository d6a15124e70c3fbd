"""A model as its configuration describes it, before any weight is opened."""

import copy
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coec.errors import ModelError, last_line
from coec.models import multimodal
from coec.models.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture_of,
)
from coec.models.calls import decoder_of, reads_tokens
from coec.models.files import JsonDict, decoded
from coec.models.folder import CONFIG, find_model, read_config
from coec.models.inferred import chosen_experts, infer
from coec.models.layout import BLOCK_WIDTHS, EXPERT_COUNTS, LIMITS, Layout, Shape, Site, read_size
from coec.models.multimodal import Around
from coec.models.names import Names, loading
from coec.models.non_uniform import class_of
from coec.models.quantised import QUANTISATION, released_in

_Model = TypeVar("_Model", bound="Description")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
DRAFTS = "num_nextn_predict_layers"
"""Configuration key of the number of layers after the last: servers draft further tokens with
them, and transformers does not read them. They are left out."""
_POSITIONS = "max_position_embeddings"
_NO_LIMIT = 2**20
"""Tokens that a model takes whose configuration names no limit."""
_PARTIAL = "partial_rotary_factor"
"""Fraction of a head that is rotated; the old form has it next to `rope_scaling`."""
_ADJUSTS = "block_auto_adjust_ff_dim"
"""Configuration key of LFM2: whether its class derives the width of MLPs from the given one."""
_WIDTH, _FIRST_WIDTH = "intermediate_size", "block_ff_dim"
"""Keys of that width; LFM2's class reads the second one if it is there."""


@dataclass(frozen=True, eq=False)
class Description:
    """A model as its configuration describes it.

    Attributes:
        config: the configuration, complete for every supported release of transformers.
        architecture: the entry of its model type.
        shape: the sizes that pruning reads and changes.
        layout: its blocks and their sites.
        names: their names in files, and in the model that runs.
        chosen: number of experts that every token goes to; 0 without experts.
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
    names: Names
    chosen: int
    shapes: dict[str, torch.Size]
    positions: int
    vocabulary: int
    tied: bool
    around: Around | None
    released: str | None

    @staticmethod
    def of(config: JsonDict, like: Architecture | None = None) -> "Description":
        """Describe the model of a raw configuration; raises ModelError if it is unsupported.

        Inside a multimodal model it is the language model.

        Args:
            config: the raw configuration.
            like: architecture of a model of the same type with other widths.
        """
        if around := multimodal.around(config):
            config = language_model(config)
        architecture = architecture_of(config)
        if not architecture.inferred:
            Shape.of(config)  # names what is missing
        check_sizes(config)
        released = released_in(config)
        config = _prepared(config, architecture, released)
        model = _skeleton(_stock(config))  # is read, and not changed
        resolved = model.config
        # Defaults of the configuration class → shapes of all tensors → blocks and sites
        # of which transformers 5 saves the number of experts under another name
        for key in (architecture.count, "num_experts_per_tok") if architecture.count else ():
            config |= {key: getattr(resolved, key)} if config.get(key) is None else {}
        names = Names()
        if architecture.inferred:
            architecture, names = _inferred(architecture, like, config, model)
        shape = shape_of(config, architecture, resolved)
        tied = bool(getattr(resolved, "tie_word_embeddings", False))
        # Tensors on the meta device, which take no memory, are split for their shapes.
        stored = names.from_model(model.state_dict())
        embedding, head = _ends(model)
        shapes = {n: t.shape for n, t in stored.items() if not (tied and n == head)}
        layout = architecture.blocks.layout(shape, shapes)
        read = {key: getattr(resolved, key, None) for key in (_POSITIONS, "vocab_size")}
        return Description(
            config=config,
            architecture=architecture,
            shape=shape,
            layout=replace(layout, embedding=embedding, head=head),
            names=names,
            chosen=chosen_experts(resolved),
            shapes=shapes,
            positions=read_size(read, _POSITIONS) if read[_POSITIONS] else _NO_LIMIT,
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
        if units == self.layout.attention_units:
            return self
        sites = self.architecture.blocks.layout(self.shape, self.shapes, heads=units == "heads")
        return replace(self, layout=replace(self.layout, blocks=sites.blocks))

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def by_token(self) -> list[str]:
        """Names of the tensors with a row for every token: of the embedding and the head."""
        ends = self.layout.embedding, self.layout.head
        modules = tuple(name.removesuffix("weight") for name in ends)
        return [name for name in self.shapes if name.startswith(modules)]

    @property
    def vocabulary_parameters(self) -> int:
        """Number of parameters of the embedding and the head."""
        return sum(self.shapes[name].numel() for name in self.by_token)

    @property
    def outside(self) -> list[str]:
        """Names of the tensors that are in no block, but for the head."""
        return [n for n in self.shapes if not LAYER.match(n) and n != self.layout.head]

    @cached_property
    def reads_tokens(self) -> bool:
        """True if layers get more of the tokens than their hidden states."""
        return not self.listed and reads_tokens(self.skeleton())

    @property
    def listed(self) -> bool:
        """True if its type has a table."""
        return self.architecture.model_type in ARCHITECTURES

    def cached(self, blocks: Iterable[int] | None = None) -> int:
        """Return the size of a server's cache per token, of some blocks: their keys and values.

        If keys and values of attention are of low rank, it keeps the low-rank ones.
        """
        numbers = range(self.shape.layers) if blocks is None else blocks
        if rank := self.config.get("kv_lora_rank"):
            return sum(rank + int(self.config["qk_rope_head_dim"]) for _ in numbers)
        return sum(2 * self.shape.at(n).kv_heads * self.shape.head_dim for n in numbers)

    def cached_by_unit(self, site: Site) -> int:
        """Return how much of that belongs to one unit of a site: nothing but for a KV group."""
        low_rank = self.config.get("kv_lora_rank")
        return 2 * self.shape.head_dim if site.value and not (site.groups or low_rank) else 0

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
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text["model_type"]))
    if class_name is None:
        names = config.get("architectures") or [config.get("model_type")]
        raise ModelError(
            f"this is a multimodal model ({names[0]!s:.80}) whose language model "
            f"'{text['model_type']!s:.80}' is not known to transformers {transformers.__version__}"
        )
    return {**text, "architectures": [class_name]}


def _stock(config: JsonDict) -> str:
    """Return a raw configuration as JSON; without `auto_map` no remote code is asked for."""
    return json.dumps({k: v for k, v in config.items() if k != "auto_map"})


@functools.lru_cache(maxsize=4)
def _skeleton(config: str) -> PreTrainedModel:
    """Build a skeleton to copy, since building 80 blocks takes most of a second."""
    try:
        raw = decoded(json.loads(config))
        resolved = AutoConfig.for_model(**raw)
        listed = ARCHITECTURES.get(resolved.model_type)
        # Eager experts: stacked ones are multiplied in float32 and narrower dtypes only.
        eager = {} if listed and not listed.inferred else {"experts_implementation": "eager"}
        with torch.device("meta"):
            if raw.get(BLOCK_WIDTHS) is None:
                model = AutoModelForCausalLM.from_config(resolved, dtype=torch.float32, **eager)
            else:
                stock: Any = AutoModelForCausalLM._model_mapping[type(resolved)]
                model = class_of(stock)._from_config(resolved, dtype=torch.float32)
    except Exception as error:  # configuration classes may raise anything
        raise ModelError(
            f"transformers does not accept this {CONFIG}: {last_line(error)}"
        ) from error
    return model.eval()


def _prepared(config: JsonDict, architecture: Architecture, released: str | None) -> JsonDict:
    """Return a configuration of float weights, with both forms of rotary settings."""
    config = {key: value for key, value in config.items() if key != QUANTISATION}
    config |= {"dtype": "bfloat16"} if released else {}
    config = _with_both_ropes(config, architecture.rope_keys)
    config |= {DRAFTS: 0} if DRAFTS in config else {}
    return _with_plain_width(config) if architecture.inferred else config


def _with_plain_width(config: JsonDict) -> JsonDict:
    """Give the width of LFM2's MLPs as its layers have it, and under one key.

    Its class may take two thirds of the width in the configuration and round them up.
    """
    if not hasattr(CONFIG_MAPPING[config["model_type"]], _ADJUSTS):
        return config
    model: Any = _skeleton(_stock(config))
    if not (getattr(model.config, _ADJUSTS) or _FIRST_WIDTH in config):
        return config
    key = _FIRST_WIDTH if _FIRST_WIDTH in config else _WIDTH
    kept = {name: value for name, value in config.items() if name not in (_FIRST_WIDTH, _WIDTH)}
    return kept | {_ADJUSTS: False, key: model.model.layers[0].feed_forward.w1.out_features}


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


def check_sizes(config: JsonDict) -> None:
    """Raise ModelError for sizes beyond `LIMITS`, with which a skeleton is never built."""
    for key in LIMITS:
        values = config.get(key)
        for value in values if isinstance(values, list) else [values]:
            if value != 0 or key not in EXPERT_COUNTS:  # 0 where a family may have experts
                read_size({key: value}, key, 1)


def _inferred(
    architecture: Architecture, like: Architecture | None, config: JsonDict, model: PreTrainedModel
) -> tuple[Architecture, Names]:
    """Return an architecture with the MLPs and experts of a model, and the names of tensors.

    `like` has them already.
    """
    layers, _ = decoder_of(model)
    if loading is None:
        raise ModelError(
            f"model type '{architecture.model_type}' needs transformers 5: its tensors have other "
            "names in files"
        )
    if like is None:
        like = infer(architecture, config, model, layers, lambda other: _skeleton(_stock(other)))
    return like, Names.of(model, layers, like.parts)


def _ends(model: PreTrainedModel) -> tuple[str, str]:
    """Return the names of a model's embedding and head."""
    paths = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding, head = map(id, (model.get_input_embeddings(), model.get_output_embeddings()))
    if not paths.keys() >= {embedding, head}:
        word = "head" if embedding in paths else "embedding"
        raise ModelError(f"a {type(model).__name__} has no {word} that is known to be one")
    return paths[embedding], paths[head]


def shape_of(config: JsonDict, architecture: Architecture, resolved: Any) -> Shape:
    """Return the sizes of a model, by the keys that its architecture has for them."""
    if not architecture.inferred:
        return Shape.of(config)

    known = resolved.to_dict() | {key: v for key, v in config.items() if v is not None}

    def size(key: str) -> Any:
        return known[key] if key in known else getattr(resolved, key, None)

    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "n_group")  # fmt: skip
    sizes = {key: value for key in keys if isinstance(value := size(key), int)}
    heads = sizes.setdefault("num_attention_heads", 1)
    if heads % sizes.get("num_key_value_heads", 1):
        sizes["num_key_value_heads"] = heads
    experts = architecture.blocks.experts
    count = size(experts.count) if experts and experts.count else None
    sizes |= {} if count is None else {"num_experts": _widest(count)}
    shape = Shape.of({**sizes, "intermediate_size": 1})
    widths = {field: size(key) for field, key in architecture.widths.items()}
    widest: dict[str, Any] = {"ffn": 0, **{name: _widest(n) for name, n in widths.items()}}
    shape = replace(shape, **widest)
    lists = {name: n for name, n in widths.items() if isinstance(n, list) and len(set(n)) > 1}
    if set(lists) - {"ffn"}:
        raise ModelError(f"{', '.join(lists)} differ by block in config.json: not supported")
    return shape.with_blocks([{"ffn": n} for n in lists["ffn"]]) if lists else shape


def _widest(size: Any) -> int:
    return max(size) if isinstance(size, list) else int(size)
