"""Models without some of their blocks: their configuration, and the names of what stays."""

from collections.abc import Collection
from typing import Any

from transformers import AutoConfig

from coec.models.description import LAYER
from coec.models.files import JsonDict

_LAYERS = "num_hidden_layers"
_BY_BLOCK = ("layer_types", "no_rope_layers")
"""Lists with an entry for every block that a class derives from numbers where they are absent."""
_FIRST, _INDICES, _STEP = "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step"
"""Blocks without experts: so many of the first, these, and all but every so many."""


def without_blocks(config: JsonDict, dropped: Collection[int]) -> JsonDict:
    """Return a raw configuration with fewer blocks; lists with an entry for each lose theirs.

    What follows from the number of a block is listed, or counted anew: it would be another's.
    """
    if not dropped:
        return config
    layers = config[_LAYERS]
    stay = [index for index in range(layers) if index not in dropped]
    short = {
        key: [value[index] for index in stay]
        if isinstance(value, list) and len(value) == layers
        else value
        for key, value in (config | _kinds(config)).items()
    } | {_LAYERS: len(stay)}
    if _FIRST in config:
        short[_FIRST] = sum(index < config[_FIRST] for index in stay)
    if (step := config.get(_STEP, 1)) > 1 or config.get(_INDICES):
        dense = {index for index in range(layers) if (index + 1) % step}.union(
            config.get(_INDICES) or ()
        )
        short[_INDICES] = [number for number, index in enumerate(stay) if index in dense]
        short[_STEP] = 1
    return short


def has_kinds(config: JsonDict) -> bool:
    """Tell whether layers are of several kinds, which programs may take from their numbers."""
    return any(len(set(kinds)) > 1 for kinds in _kinds(config).values())


def _kinds(config: JsonDict) -> dict[str, list[Any]]:
    """Return the lists of `_BY_BLOCK` as the class has them, given or derived; none it lacks."""
    resolved: Any = AutoConfig.for_model(**{k: v for k, v in config.items() if k != "auto_map"})
    return {key: value for key in _BY_BLOCK if (value := getattr(resolved, key, None))}


def renumbered(name: str, dropped: Collection[int]) -> str | None:
    """Return the name of a tensor where blocks before it are left out; None for one of these."""
    match = LAYER.match(name)
    if match is None:
        return name
    index = int(match[1])
    before = sum(other < index for other in dropped)
    return None if index in dropped else f"model.layers.{index - before}.{name[match.end() :]}"
