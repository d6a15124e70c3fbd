"""Models whose blocks have widths of their own: their class, and the code written beside weights.

No stock class builds such a model. The same few lines build it here, without any code of the
folder, and in the folder, for those who load it with `trust_remote_code=True`.
"""

import inspect
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from coec.models import modeling_non_uniform
from coec.models.modeling_non_uniform import NonUniformBlocks
from coec.models.shape import BLOCK_WIDTHS, Shape

FILE = "modeling_non_uniform.py"
"""The name of the code in a model folder."""
PREFIX = "NonUniform"


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
            "AutoModel": f"{module}.{PREFIX}{_decoder(model_type)}",
            "AutoModelForCausalLM": f"{module}.{PREFIX}{stock}",
        },
        BLOCK_WIDTHS: [shape.at(index).keys() for index in range(shape.layers)],
    }


def code(model_type: str, stock: str) -> str:
    """The Python file that goes with such a configuration."""
    names = sorted((stock, _decoder(model_type)))
    typing = "from typing import Any\n"
    own = inspect.getsource(modeling_non_uniform)
    own = own.replace(typing, f"{typing}\nfrom transformers import {', '.join(names)}\n")
    classes = (
        f"\n\nclass {PREFIX}{name}(NonUniformBlocks, {name}):\n"
        f'    """{name}, its blocks at widths of their own."""\n'
        for name in names
    )
    return own + "".join(classes)


def _decoder(model_type: str) -> str:
    """The stock class of a model without its head."""
    return str(MODEL_MAPPING_NAMES[model_type])
