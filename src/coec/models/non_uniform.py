"""Models whose blocks have widths of their own: their class, and the code written beside weights.

No stock class builds such a model. The same few lines build it here, without any code of the
folder, and in the folder, for those who load it with `trust_remote_code=True`.
"""

import inspect
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from coec.models import modeling_non_uniform
from coec.models.modeling_non_uniform import NonUniformBlocks
from coec.models.shape import BLOCK_WIDTHS, Shape

FILE = "modeling_non_uniform.py"
"""The name of the code in a model folder."""
PREFIX = "NonUniform"
TYPE = "non_uniform_"
"""Before the model type in a folder: a type that transformers knows is built as the stock class,
without a word of the code, and its loading then ends at a tensor of another size."""


def class_of(stock: type) -> Any:
    """The class of transformers with blocks of their own widths, from the stock one."""
    return type(PREFIX + stock.__name__, (NonUniformBlocks, stock), {})


def config_keys(shape: Shape, model_type: str, stock: str) -> dict[str, Any]:
    """What a configuration says of widths by block, besides those of the widest.

    Args:
        shape: the sizes.
        model_type: of the configuration.
        stock: the class of transformers that computes a uniform model.
    """
    module = Path(FILE).stem
    return {
        "architectures": [PREFIX + stock],
        "auto_map": {
            "AutoConfig": f"{module}.{PREFIX}{_config(model_type)}",
            "AutoModel": f"{module}.{PREFIX}{_decoder(model_type)}",
            "AutoModelForCausalLM": f"{module}.{PREFIX}{stock}",
        },
        BLOCK_WIDTHS: [shape.at(index).keys() for index in range(shape.layers)],
    }


def code(model_type: str, stock: str) -> str:
    """The Python file that goes with such a configuration."""
    config = _config(model_type)
    names = sorted((stock, _decoder(model_type)))
    typing = "from typing import Any\n"
    own = inspect.getsource(modeling_non_uniform)
    every = ", ".join(sorted((config, *names)))
    own = own.replace(typing, f"{typing}\nfrom transformers import {every}\n")
    own += (
        f"\n\nclass {PREFIX}{config}({config}):\n"
        f'    """{config} under a name that no stock model is built from."""\n\n'
        f'    model_type = "{TYPE}{model_type}"\n'
    )
    classes = (
        f"\n\nclass {PREFIX}{name}(NonUniformBlocks, {name}):\n"
        f'    """{name}, its blocks at widths of their own."""\n\n'
        f"    config_class = {PREFIX}{config}\n"
        for name in names
    )
    return own + "".join(classes)


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as its folder has it."""
    if BLOCK_WIDTHS not in config:
        return config
    return config | {"model_type": TYPE + config["model_type"]}


def as_read(config: dict[str, Any]) -> dict[str, Any]:
    """The same by the model type of the stock class."""
    name = config.get("model_type")
    if BLOCK_WIDTHS not in config or not isinstance(name, str):
        return config
    return config | {"model_type": name.removeprefix(TYPE)}


def _config(model_type: str) -> str:
    """The stock class of its configuration."""
    return type(AutoConfig.for_model(model_type)).__name__


def _decoder(model_type: str) -> str:
    """The stock class of a model without its head."""
    return str(MODEL_MAPPING_NAMES[model_type])
