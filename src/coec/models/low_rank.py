"""Models whose blocks have matrices of low rank: their class, and the code beside their weights.

An m×n matrix of rank r is stored as r of its rows, and the others as combinations of these:
`r (m + n) − r²` numbers, and the order of the rows, which is no parameter (METHODS §11).
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.errors import ModelError
from coec.models import modeling_low_rank
from coec.models.files import JsonDict
from coec.models.layout import Layout
from coec.models.modeling_low_rank import LowRankBlocks
from coec.models.non_uniform import config_name, decoder_name

FILE = "modeling_low_rank.py"
"""Name of the code in a model folder."""
RANKS = "ranks"
"""Configuration key of the ranks: for each block a table of its layers, by their names in it."""
Ranks = Mapping[str, int]
"""Rank of every matrix that is replaced, by the full name of its weight."""
_PREFIX, _TYPE = "LowRank", "low_rank_"
_PIVOTS, _COEFFICIENTS, _ORDER = ".pivots.weight", ".coefficients.weight", ".order"


def class_of(stock: type) -> Any:
    """Derive the class with matrices of low rank from the stock class of transformers."""
    return type(_PREFIX + stock.__name__, (LowRankBlocks, stock), {})


def weights(layout: Layout, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Shapes of the matrices that low rank replaces: those of all sites, by their names."""
    names = {name for site in layout.sites for name in site.tensors if name.endswith(".weight")}
    return {name: shape for name, shape in shapes.items() if name in names}


def parameters(shapes: Mapping[str, torch.Size]) -> int:
    """Number of parameters in stored tensors, which orders of rows are not."""
    return sum(shape.numel() for name, shape in shapes.items() if not is_order(name))


def is_order(tensor: str) -> bool:
    """True for the name of a tensor that holds an order of rows, in whole numbers."""
    return tensor.endswith(_ORDER)


def in_dtype(
    tensor: Tensor, device: torch.device, dtype: torch.dtype, *, copy: bool = False
) -> Tensor:
    """Return a weight on a device in a dtype; an order of rows stays in whole numbers."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype, copy=copy)


def stored(weight: str, pivots: Tensor, coefficients: Tensor, order: Tensor) -> dict[str, Tensor]:
    """The tensors that a checkpoint has in place of a weight; `order` lists pivots, then others."""
    name, places = weight.removesuffix(".weight"), order.argsort().to(torch.int32)
    return {name + _PIVOTS: pivots, name + _COEFFICIENTS: coefficients, name + _ORDER: places}


def refuse_low_rank(config: JsonDict, purpose: str) -> None:
    """Raise ModelError for a model of low rank, where whole matrices are needed."""
    if config.get(RANKS) is not None:
        raise ModelError(
            f"{purpose} needs whole matrices, and this model's are of low rank: give the dense "
            "model that it was made from"
        )


def config_keys(ranks: Ranks, layout: Layout, model_type: str, stock: str) -> JsonDict:
    """Configuration keys for matrices of low rank, where `stock` computes whole ones."""
    module = Path(FILE).stem
    config, decoder, causal = (
        f"{_PREFIX}{name}" for name in (config_name(model_type), decoder_name(model_type), stock)
    )
    return {
        "architectures": [causal],
        "auto_map": {
            "AutoConfig": f"{module}.{config}",
            "AutoModel": f"{module}.{decoder}",
            "AutoModelForCausalLM": f"{module}.{causal}",
        },
        RANKS: [
            {
                name.removeprefix(block.prefix).removesuffix(".weight"): rank
                for name, rank in ranks.items()
                if name.startswith(block.prefix)
            }
            for block in layout.blocks
        ],
    }


def code(model_type: str, stock: str) -> str:
    """Write the Python file that goes with such a configuration."""
    config, names = config_name(model_type), sorted((stock, decoder_name(model_type)))
    nn = "from torch import Tensor, nn\n"
    imported = ", ".join(sorted((config, *names)))
    source = inspect.getsource(modeling_low_rank)
    source = source.replace(nn, f"{nn}from transformers import {imported}\n")
    source += (
        f"\n\nclass {_PREFIX}{config}({config}):\n"
        f'    """{config} under a name that no stock model is built from."""\n\n'
        f'    model_type = "{_TYPE}{model_type}"\n'
    )
    return source + "".join(
        f"\n\nclass {_PREFIX}{name}(LowRankBlocks, {name}):\n"
        f'    """{name}, its blocks with matrices of low rank."""\n\n'
        f"    config_class = {_PREFIX}{config}\n"
        for name in names
    )


def as_written(config: JsonDict) -> JsonDict:
    """The configuration as its folder has it."""
    return config | {"model_type": _TYPE + config["model_type"]} if RANKS in config else config


def as_read(config: JsonDict) -> JsonDict:
    """The configuration with the stock class's model type: the inverse of `as_written`."""
    name = config.get("model_type")
    if RANKS not in config or not isinstance(name, str):
        return config
    return config | {"model_type": name.removeprefix(_TYPE)}
