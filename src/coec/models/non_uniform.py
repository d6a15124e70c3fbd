"""Models whose widths differ by block: their class, and the code written beside their weights.

No stock class builds such a model. The same few lines build it here, without any code of the
folder, and in the folder, for users who load it with `trust_remote_code=True`. Models of low rank
share the names and the types.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from coec.models import modeling_non_uniform
from coec.models.files import JsonDict
from coec.models.layout import BLOCK_WIDTHS, RANKS, Shape
from coec.models.modeling_non_uniform import NonUniformBlocks

FILE = "modeling_non_uniform.py"
"""Name of the code in a model folder."""
_PREFIX = "NonUniform"
TYPES = {BLOCK_WIDTHS: "non_uniform_", RANKS: "low_rank_"}
"""Prefixes of the model type in a folder, by the configuration key that says so: transformers
silently builds a type that it knows as the stock class, whose loading then ends at a tensor of
another size."""
NAS = "nemotron-nas"
"""Model type of a Llama with channels by block, which servers run by code of their own."""
NAS_STOCK = "mistral"
"""The stock type of the same function, which takes any number of heads."""
BLOCK_CONFIGS = "block_configs"
"""Configuration key of the widths as those servers read them."""
_NAS_MULTIPLE = 256
"""To what most of them round channels up."""


class BlockConfigs:
    """Base class to put before a configuration whose `block_configs` servers read as objects."""

    @property
    def block_configs(self) -> list[SimpleNamespace]:
        """Return what every block has; config.json is written from the tables behind it."""
        return [
            SimpleNamespace(**{part: SimpleNamespace(**keys) for part, keys in block.items()})
            for block in self.__dict__.get("block_configs", [])
        ]

    @block_configs.setter
    def block_configs(self, blocks: list[dict[str, dict[str, Any]]]) -> None:
        self.__dict__["block_configs"] = blocks


def class_of(stock: type) -> Any:
    """Derive the class with widths by block from the stock class of transformers."""
    return type(_PREFIX + stock.__name__, (NonUniformBlocks, stock), {})


def config_keys(shape: Shape, model_type: str, stock: str, *, nas: bool = False) -> JsonDict:
    """Configuration keys for widths that differ by block, where `stock` computes uniform ones.

    Args:
        nas: writes those that servers of Nemotron-NAS read besides.
    """
    return {
        **keys_of_code(FILE, (_own_name(n, nas=nas) for n in stock_names(model_type, stock))),
        BLOCK_WIDTHS: [shape.at(index).keys() for index in range(shape.layers)],
        **({BLOCK_CONFIGS: _block_configs(shape)} if nas else {}),
    }


def whole_multiples(shape: Shape) -> bool:
    """Return whether every block's channels are a multiple that all servers of NAS build."""
    return all(shape.at(index).ffn % _NAS_MULTIPLE == 0 for index in range(shape.layers))


def _block_configs(shape: Shape) -> list[JsonDict]:
    """Say what every block has; a factor in place of channels wherever that can be said."""
    whole = whole_multiples(shape)
    present = {"no_op": False, "replace_with_linear": False}
    tables = []
    for index in range(shape.layers):
        channels = shape.at(index).ffn
        # Servers round 2/3 of this up to the next multiple: the middle is far from both ends.
        factor = 3 / 2 * (channels - _NAS_MULTIPLE / 2) / shape.hidden
        size = {"ffn_mult": factor} if whole else {"intermediate_size": channels}
        tables.append({
            "attention": {**present, "n_heads_in_group": shape.group}, "ffn": {**present, **size}
        })  # fmt: skip
    return tables


def code(model_type: str, stock: str, *, nas: bool = False) -> str:
    """Write the Python file that goes with such a configuration."""
    config, *models = stock_names(model_type, stock)
    typing = "from typing import Any\n"
    source = inspect.getsource(modeling_non_uniform)
    source = source.replace(typing, f"{typing}\n{stock_import(model_type, stock)}")
    bases = config
    if nas:
        source = source.replace(typing, f"from types import SimpleNamespace\n{typing}")
        source += f"\n\n{inspect.getsource(BlockConfigs)}"
        bases = f"{BlockConfigs.__name__}, {config}"
    derived = _own_name(config, nas=nas)
    source += config_class(derived, bases, NAS if nas else TYPES[BLOCK_WIDTHS] + model_type)
    return source + "".join(
        model_class(_own_name(name, nas=nas), f"NonUniformBlocks, {name}", derived)
        for name in sorted(models)
    )


def as_written(config: JsonDict) -> JsonDict:
    """The configuration as its folder has it."""
    if not (prefix := _prefix_of(config)):
        return config
    name = NAS if BLOCK_CONFIGS in config else prefix + config["model_type"]
    return config | {"model_type": name}


def as_read(config: JsonDict) -> JsonDict:
    """The configuration with the stock class's model type: the inverse of `as_written`."""
    name, prefix = config.get("model_type"), _prefix_of(config)
    if not prefix or not isinstance(name, str):
        return config
    return config | {"model_type": NAS_STOCK if name == NAS else name.removeprefix(prefix)}


def _prefix_of(config: JsonDict) -> str:
    return next((prefix for key, prefix in TYPES.items() if key in config), "")


def _own_name(stock: str, *, nas: bool) -> str:
    """Name a class in the folder; servers know Nemotron-NAS by that of its class."""
    return stock.replace("Mistral", "DeciLM") if nas else _PREFIX + stock


def stock_names(model_type: str, stock: str) -> tuple[str, str, str]:
    """Names of a stock class's configuration, of the class without a head, and its own."""
    config = type(AutoConfig.for_model(model_type)).__name__
    return config, str(MODEL_MAPPING_NAMES[model_type]), stock


def stock_import(model_type: str, stock: str) -> str:
    """The line of Python that imports these classes."""
    return f"from transformers import {', '.join(sorted(stock_names(model_type, stock)))}\n"


def keys_of_code(file: str, names: Iterable[str]) -> JsonDict:
    """Configuration keys that name the code in a folder, by its classes in that order."""
    config, decoder, causal = (f"{Path(file).stem}.{name}" for name in names)
    return {
        "architectures": [causal.rpartition(".")[2]],
        "auto_map": {"AutoConfig": config, "AutoModel": decoder, "AutoModelForCausalLM": causal},
    }


def config_class(name: str, bases: str, model_type: str) -> str:
    """The lines of Python that derive a configuration."""
    return (
        f"\n\nclass {name}({bases}):\n"
        f'    """A configuration under a name that no stock model is built from."""\n\n'
        f'    model_type = "{model_type}"\n'
    )


def model_class(name: str, bases: str, config: str) -> str:
    """The lines of Python that derive a model with such a configuration."""
    return f"\n\nclass {name}({bases}):\n    config_class = {config}\n"
