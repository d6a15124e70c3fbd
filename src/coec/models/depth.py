"""Models without some of their blocks: their configuration, and the names of what stays."""

from collections.abc import Collection
from typing import Any

from transformers import AutoConfig

from coec.models.description import LAYER
from coec.models.files import JsonDict

_LAYERS, _TYPES = "num_hidden_layers", "layer_types"


def without_blocks(config: JsonDict, dropped: Collection[int]) -> JsonDict:
    """Return a raw configuration with fewer blocks; lists with an entry for each lose theirs.

    The kind of every block is listed, where the class has kinds: it would follow from a number.
    """
    if not dropped:
        return config
    layers = config[_LAYERS]
    resolved: Any = AutoConfig.for_model(**{k: v for k, v in config.items() if k != "auto_map"})
    kinds = getattr(resolved, _TYPES, None)
    listed = config | ({_TYPES: list(kinds)} if kinds else {})
    return {
        key: [entry for index, entry in enumerate(value) if index not in dropped]
        if isinstance(value, list) and len(value) == layers
        else value
        for key, value in listed.items()
    } | {_LAYERS: layers - len(dropped)}


def renumbered(name: str, dropped: Collection[int]) -> str | None:
    """Return the name of a tensor where blocks before it are left out; None for one of these."""
    match = LAYER.match(name)
    if match is None:
        return name
    index = int(match[1])
    before = sum(other < index for other in dropped)
    return None if index in dropped else f"model.layers.{index - before}.{name[match.end() :]}"
