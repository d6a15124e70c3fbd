"""A decoder whose widths differ by block.

`config.block_widths` holds one table for each block, of the configuration's own keys
(num_attention_heads, num_key_value_heads, intermediate_size). Each decoder layer is built from a
copy of the configuration with its block's sizes; all else is the stock model.
"""

import copy
from typing import Any


class NonUniformBlocks:
    """Base class to put before a decoder of transformers, with a head or without.

    Servers that run transformers' modules build the decoder alone.
    """

    post_init: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        decoder: Any = getattr(self, "model", self)
        layers = decoder.layers
        for index, widths in enumerate(config.block_widths):
            changed = copy.deepcopy(config)
            for key, size in widths.items():
                setattr(changed, key, size)
            layers[index] = type(layers[index])(changed, index)
        self.post_init()
