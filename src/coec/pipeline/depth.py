"""Choose the blocks that a model misses least: in turn, by KL without them."""

import torch
from jaxtyping import Int
from torch import Tensor

from coec.events import Progress
from coec.execution.journal import Journal
from coec.models.dense import Dense
from coec.planning.run import Run
from coec.streaming.dense_stream import first_windows
from coec.streaming.head import Head
from coec.streaming.layers import Layers, State
from coec.streaming.passes import BlockSource
from coec.streaming.sensitivity import TOKENS

_DROPPED = "dropped blocks"
"""The note that says which blocks are left out."""


def shortened(
    journal: Journal, dense: Dense, run: Run, source: BlockSource, progress: Progress | None
) -> Run:
    """Return the run that leaves out the blocks that are missed least, chosen once."""
    if _DROPPED not in journal:
        windows, _ = source.windows_of_text()
        blocks = dispensable_blocks(
            dense, windows, run.recipe.pruning.drop_blocks, device=run.device, dtype=run.forward,
            progress=progress,
        )  # fmt: skip
        journal.note(_DROPPED, blocks=blocks, made_of=dense.digests_of(dense.layout.blocks))
    return run.without(tuple(journal.facts(_DROPPED)["blocks"]))


@torch.no_grad()
def dispensable_blocks(
    dense: Dense,
    windows: Int[Tensor, "n length"],
    count: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> tuple[int, ...]:
    """Return the indices of blocks to leave out, ascending; the first and the last one stay.

    In every turn the block goes without which, and without those before it, predictions are nearest
    to the dense model's by KL over a few windows. A turn is one pass over the weights, in which as
    many models advance as blocks may go.

    Args:
        windows: token ids; the first of them are run.
        count: how many blocks go.
    """
    windows = first_windows(windows, TOKENS)
    blocks = dense.layout.blocks
    layers = Layers(dense, device=device, dtype=dtype)
    start = layers.embed([windows], dense.tensor(dense.layout.embedding))[0]
    head, gone = Head(dense, device=device, dtype=dtype), set[int]()
    dense_state = start
    for turn in range(count):
        # The model so far, and from every block on the one without it, all through the same blocks
        so_far, without = start, dict[int, State]()
        for block in (b for b in blocks if b.index not in gone):
            layers.load(block, dense.tensors(block))
            before = so_far
            so_far = layers.advance(block.index, before)
            without = {n: layers.advance(block.index, state) for n, state in without.items()}
            if block.index not in (0, len(blocks) - 1):
                without[block.index] = before
            layers.drop(block.index)
            if progress:
                done = turn * len(blocks) + block.index + 1
                progress("choosing blocks", done, count * len(blocks))
        if turn == 0:
            dense_state = so_far
        scores = {n: head.predicted(state, dense_state, windows).kl for n, state in without.items()}
        gone.add(min(scores, key=scores.__getitem__))
    return tuple(sorted(gone))
