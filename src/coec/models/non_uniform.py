"""Models whose widths differ by block: their class, and the code written next to their weights.

No stock class builds such a model. The same few lines build it here, without any code of the
folder, and in the folder, for users who load it with `trust_remote_code=True`.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from coec.models import modeling_non_uniform
from coec.models.files import JsonDict
from coec.models.layout import BLOCK_WIDTHS, Shape
from coec.models.modeling_non_uniform import NonUniformBlocks

FILE = "modeling_non_uniform.py"
"""Name of the code in a model folder."""
_PREFIX = "NonUniform"
_TYPE = "non_uniform_"
"""Prefix of the model type in a folder: transformers silently builds a type that it knows as the
stock class, whose loading then ends at a tensor of another size."""
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
        """Return the parts of every block; config.json is written from the stored tables."""
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
        nas: also write the keys that servers of Nemotron-NAS read.
    """
    # Names of the stock classes → names of the classes derived from them in the folder's code
    module, names = Path(FILE).stem, _stock_names(model_type, stock)
    config, decoder, causal = (_own_name(name, nas=nas) for name in names)
    return {
        "architectures": [causal],
        "auto_map": {
            "AutoConfig": f"{module}.{config}",
            "AutoModel": f"{module}.{decoder}",
            "AutoModelForCausalLM": f"{module}.{causal}",
        },
        BLOCK_WIDTHS: [shape.at(index).keys() for index in range(shape.layers)],
        **({BLOCK_CONFIGS: _block_configs(shape)} if nas else {}),
    }


def whole_multiples(shape: Shape) -> bool:
    """Return whether every block's channels are a multiple that all servers of NAS build."""
    return all(shape.at(index).ffn % _NAS_MULTIPLE == 0 for index in range(shape.layers))


def _block_configs(shape: Shape) -> list[JsonDict]:
    """List the parts of every block, with a factor instead of channels if all blocks allow it."""
    in_multiples = whole_multiples(shape)
    present = {"no_op": False, "replace_with_linear": False}
    tables = []
    for index in range(shape.layers):
        channels = shape.at(index).ffn
        # Servers round 2/3 of this up to the next multiple: the middle is far from both ends.
        factor = 3 / 2 * (channels - _NAS_MULTIPLE / 2) / shape.hidden
        size = {"ffn_mult": factor} if in_multiples else {"intermediate_size": channels}
        tables.append({
            "attention": {**present, "n_heads_in_group": shape.group}, "ffn": {**present, **size}
        })  # fmt: skip
    return tables


def code(model_type: str, stock: str, *, nas: bool = False) -> str:
    """Write the Python file that goes with such a configuration."""
    # The package's own module as text, with the stock classes imported and one class derived from
    # each: users need nothing of this package.
    config, *models = names = _stock_names(model_type, stock)
    typing = "from typing import Any\n"
    source = inspect.getsource(modeling_non_uniform)
    imported = ", ".join(sorted(names))
    source = source.replace(typing, f"{typing}\nfrom transformers import {imported}\n")
    bases = config
    if nas:
        source = source.replace(typing, f"from types import SimpleNamespace\n{typing}")
        source += f"\n\n{inspect.getsource(BlockConfigs)}"
        bases = f"{BlockConfigs.__name__}, {config}"
    derived = _own_name(config, nas=nas)
    source += (
        f"\n\nclass {derived}({bases}):\n"
        f'    """A configuration under a name that no stock model is built from."""\n\n'
        f'    model_type = "{NAS if nas else _TYPE + model_type}"\n'
    )
    return source + "".join(
        f"\n\nclass {_own_name(name, nas=nas)}(NonUniformBlocks, {name}):\n"
        f"    config_class = {derived}\n"
        for name in sorted(models)
    )


def as_written(config: JsonDict) -> JsonDict:
    """The configuration as its folder has it."""
    if BLOCK_WIDTHS not in config:
        return config
    name = NAS if BLOCK_CONFIGS in config else _TYPE + config["model_type"]
    return config | {"model_type": name}


def as_read(config: JsonDict) -> JsonDict:
    """The configuration with the stock class's model type: the inverse of `as_written`."""
    name = str(config.get("model_type"))
    return config | {"model_type": NAS_STOCK if name == NAS else name.removeprefix(_TYPE)}


def _own_name(stock: str, *, nas: bool) -> str:
    """Name a class in the folder; servers know Nemotron-NAS by that of its class."""
    return stock.replace("Mistral", "DeciLM") if nas else _PREFIX + stock


def _stock_names(model_type: str, stock: str) -> tuple[str, str, str]:
    """Names of a stock class's configuration, of the class without a head, and its own."""
    config = type(AutoConfig.for_model(model_type)).__name__
    return config, str(MODEL_MAPPING_NAMES[model_type]), stock
