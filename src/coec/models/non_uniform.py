"""Models whose blocks have widths of their own: their class, and the code written beside weights.

No stock class builds such a model. The same few lines build it here, without any code of the
folder, and in the folder, for those who load it with `trust_remote_code=True`.
"""

import inspect
from pathlib import Path
from typing import Any

from coec.models import modeling_non_uniform
from coec.models.modeling_non_uniform import NonUniformBlocks
from coec.models.shape import Shape

FILE = "modeling_non_uniform.py"
"""The name of the code in a model folder."""
PREFIX = "NonUniform"


def class_of(stock: type) -> Any:
    """The class of transformers with blocks of their own widths, from the stock one."""
    return type(PREFIX + stock.__name__, (NonUniformBlocks, stock), {})


def config_keys(shape: Shape, stock: str) -> dict[str, Any]:
    """What a configuration says of widths by block, besides those of the widest.

    Args:
        shape: the sizes.
        stock: the class of transformers that computes a uniform model.
    """
    blocks = [shape.at(index).keys() for index in range(shape.layers)]
    return {
        "architectures": [PREFIX + stock],
        "auto_map": {"AutoModelForCausalLM": f"{Path(FILE).stem}.{PREFIX}{stock}"},
        "block_widths": blocks,
    }


def code(stock: str) -> str:
    """The Python file that goes with such a configuration."""
    return (
        inspect.getsource(modeling_non_uniform).replace(
            "from typing import Any\n",
            f"from typing import Any\n\nfrom transformers import {stock}\n",
        )
        + f"\n\nclass {PREFIX}{stock}(NonUniformBlocks, {stock}):\n"
        + f'    """{stock}, its blocks at widths of their own."""\n'
    )
