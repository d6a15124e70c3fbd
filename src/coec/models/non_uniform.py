"""Models whose widths differ by block: their class, and the code written beside their weights.

No stock class builds such a model. The same few lines build it here, without any code of the
folder, and in the folder, for users who load it with `trust_remote_code=True`.
"""

import inspect
from pathlib import Path
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


def class_of(stock: type) -> Any:
    """Derive the class with widths by block from the stock class of transformers."""
    return type(_PREFIX + stock.__name__, (NonUniformBlocks, stock), {})


def config_keys(shape: Shape, model_type: str, stock: str) -> JsonDict:
    """Configuration keys for widths that differ by block, where `stock` computes uniform ones."""
    module = Path(FILE).stem
    return {
        "architectures": [_PREFIX + stock],
        "auto_map": {
            "AutoConfig": f"{module}.{_PREFIX}{_config(model_type)}",
            "AutoModel": f"{module}.{_PREFIX}{_decoder(model_type)}",
            "AutoModelForCausalLM": f"{module}.{_PREFIX}{stock}",
        },
        BLOCK_WIDTHS: [shape.at(index).keys() for index in range(shape.layers)],
    }


def code(model_type: str, stock: str) -> str:
    """Write the Python file that goes with such a configuration."""
    config = _config(model_type)
    names = sorted((stock, _decoder(model_type)))
    typing = "from typing import Any\n"
    source = inspect.getsource(modeling_non_uniform)
    imported = ", ".join(sorted((config, *names)))
    source = source.replace(typing, f"{typing}\nfrom transformers import {imported}\n")
    source += (
        f"\n\nclass {_PREFIX}{config}({config}):\n"
        f'    """{config} under a name that no stock model is built from."""\n\n'
        f'    model_type = "{_TYPE}{model_type}"\n'
    )
    classes = (
        f"\n\nclass {_PREFIX}{name}(NonUniformBlocks, {name}):\n"
        f'    """{name}, its blocks at widths of their own."""\n\n'
        f"    config_class = {_PREFIX}{config}\n"
        for name in names
    )
    return source + "".join(classes)


def as_written(config: JsonDict) -> JsonDict:
    """The configuration as its folder has it."""
    own = {"model_type": _TYPE + config["model_type"]}
    return config | own if BLOCK_WIDTHS in config else config


def as_read(config: JsonDict) -> JsonDict:
    """The configuration with the stock class's model type: the inverse of `as_written`."""
    name = config.get("model_type")
    if BLOCK_WIDTHS not in config or not isinstance(name, str):
        return config
    return config | {"model_type": name.removeprefix(_TYPE)}


def _config(model_type: str) -> str:
    return type(AutoConfig.for_model(model_type)).__name__


def _decoder(model_type: str) -> str:
    return str(MODEL_MAPPING_NAMES[model_type])
