"""A decoder whose blocks multiply by matrices of low rank.

`config.ranks` holds one table for each block: the ranks of its linear layers, by their names in the
block. Every other layer is the stock model's.
"""

from typing import Any

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """A linear layer of rank r: r of its outputs, and the others as combinations of these.

    `order` says where each output stands among the pivots and then the others.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.pivots = nn.Linear(linear.in_features, rank, bias=False)
        self.coefficients = nn.Linear(rank, linear.out_features - rank, bias=False)
        self.register_buffer("order", torch.arange(linear.out_features, dtype=torch.int32))
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by the pivots, and their products by the coefficients of the others."""
        rows = self.pivots(inputs)
        order: Any = self.order
        out = torch.cat([rows, self.coefficients(rows)], dim=-1).index_select(-1, order)
        return out if self.bias is None else out + self.bias


class LowRankBlocks:
    """Base class to put before a decoder of transformers, with a head or without."""

    post_init: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        decoder: Any = getattr(self, "model", self)
        for layer, ranks in zip(decoder.layers, config.ranks, strict=True):
            for name, rank in ranks.items():
                parent, _, child = name.rpartition(".")
                module = layer.get_submodule(parent)
                setattr(module, child, LowRankLinear(getattr(module, child), rank))
        self.post_init()
