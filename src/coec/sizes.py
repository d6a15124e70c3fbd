"""How much is run, copied and sampled at once: what streams do and a plan's memory counts."""

from jaxtyping import Int
from torch import Tensor, device

from coec.models.layout import Shape

AHEAD = 2
"""Batches whose work may be going on when the next is copied to a GPU."""
LOGITS_PER_PASS = 2**24
"""Logits held at once."""
TRIED_TOKENS = 4096
"""Tokens on which widths by block and blocks to leave out are decided."""
MOST_SAMPLED = 128
"""Windows that the model samples at once, at most."""
TOKENS_PER_BATCH = 8192
"""Tokens that are run at once on a CPU."""
NUMBERS_PER_BATCH = 2**25
"""Numbers of the hidden states that are run at once on a GPU: 8192 tokens of a hidden size of 4096.
More of a narrow model, whose kernels take longer to launch than to run: up to eight times as many.
"""
_LOGIT_COPIES = 6
"""Copies of a window's logits, in float32, that sampling is counted to hold."""


def tokens_per_batch(computing: device, hidden: int) -> int:
    """Return how many tokens are run at once, of a hidden size."""
    if computing.type == "cpu":
        return TOKENS_PER_BATCH
    return min(NUMBERS_PER_BATCH // hidden, 8 * TOKENS_PER_BATCH)


def window_bytes(shape: Shape, vocabulary: int, seq_len: int, itemsize: int) -> int:
    """Return the memory of one window that is sampled, at its last token.

    Keys and values of all layers; of one layer a second time while they grow, and repeated for the
    query heads that share them; and copies of the logits in float32.
    """
    layer = 2 * shape.kv_heads * shape.head_dim * seq_len * itemsize
    return layer * (shape.layers + 1 + shape.group) + 4 * _LOGIT_COPIES * vocabulary


def first_windows(windows: Int[Tensor, "n length"], tokens: int) -> Int[Tensor, "m length"]:
    """Return the first windows: of no more than `tokens` tokens together, and one at least."""
    return windows[: max(1, tokens // windows.shape[1])]
