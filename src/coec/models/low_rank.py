"""Models whose blocks have matrices of low rank: their class, and the code beside their weights.

An m×n matrix of rank r is stored as r of its rows, and the others as combinations of these:
`r (m + n) − r²` numbers, and the order of the rows, which is no parameter (METHODS §11).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coec.errors import ModelError
from coec.models import modeling_low_rank
from coec.models.files import JsonDict
from coec.models.layout import RANKS, Layout
from coec.models.modeling_low_rank import LowRankBlocks
from coec.models.non_uniform import (
    TYPES,
    config_class,
    keys_of_code,
    model_class,
    stock_import,
    stock_names,
)

FILE = "modeling_low_rank.py"
"""Name of the code in a model folder."""
_PREFIX = "LowRank"
_PIVOTS, COEFFICIENTS, _ORDER = ".pivots.weight", ".coefficients.weight", ".order"


def class_of(stock: type) -> Any:
    """Derive the class with matrices of low rank from the stock class of transformers."""
    return type(_PREFIX + stock.__name__, (LowRankBlocks, stock), {})


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


def stored_tensors(
    weight: str, pivots: Tensor, coefficients: Tensor, order: Tensor
) -> dict[str, Tensor]:
    """The tensors that a checkpoint has in place of a weight; `order` lists pivots, then others."""
    name, places = weight.removesuffix(".weight"), order.argsort().to(torch.int32)
    return {name + _PIVOTS: pivots, name + COEFFICIENTS: coefficients, name + _ORDER: places}


def refuse_low_rank(
    config: JsonDict, purpose: str, advice: str = "give the dense model that it was made from"
) -> None:
    """Raise ModelError for a model of low rank, where whole matrices are needed."""
    if config.get(RANKS) is not None:
        raise ModelError(
            f"{purpose} needs whole matrices, and this model's are of low rank: {advice}"
        )


def config_keys(ranks: Mapping[str, int], layout: Layout, model_type: str, stock: str) -> JsonDict:
    """Configuration keys for matrices of low rank, where `stock` computes whole ones.

    `ranks` has those of all matrices that are replaced, by the full names of their weights.
    """
    names = (_PREFIX + name for name in stock_names(model_type, stock))
    return keys_of_code(FILE, names) | {
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
    config, *models = stock_names(model_type, stock)
    nn, derived = "from torch import Tensor, nn\n", _PREFIX + config
    source = inspect.getsource(modeling_low_rank)
    source = source.replace(nn, nn + stock_import(model_type, stock))
    source += config_class(derived, config, TYPES[RANKS] + model_type)
    return source + "".join(
        model_class(_PREFIX + name, f"LowRankBlocks, {name}", derived) for name in sorted(models)
    )
