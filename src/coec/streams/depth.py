"""Choose the blocks that a model misses least: in turn, by KL without them."""

import torch
from jaxtyping import Int
from torch import Tensor

from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.planning.plan import Plan
from coec.sizes import TRIED_TOKENS, first_windows
from coec.streams.head import Head
from coec.streams.layers import Layers, State


@torch.no_grad()
def choose_blocks(
    plan: Plan, dense: Dense, windows: Int[Tensor, "n length"], progress: Progress | None
) -> tuple[dict[str, Tensor], JsonDict]:
    """Return the indices of `drop_blocks` blocks to leave out, ascending, as `blocks`; no facts.
    The first and the last block stay.

    In every turn the block goes without which, and without those before it, predictions are nearest
    to the dense model's by KL over a few windows. A turn is one pass over the weights, in which as
    many models advance as blocks may go.

    Args:
        plan: says how many, where and in which dtype.
        dense: the model.
        windows: token ids; the first of them are run.
        progress: called with ("choosing blocks", done, all).
    """
    windows, count = first_windows(windows, TRIED_TOKENS), plan.recipe.drop_blocks
    blocks = dense.layout.blocks
    layers = Layers(dense, device=plan.device, dtype=plan.forward)
    start = layers.embed([windows], dense.tensor(dense.layout.embedding))[0]
    head, gone = Head(dense, device=plan.device, dtype=plan.forward), set[int]()
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
    return {"blocks": torch.tensor(sorted(gone))}, {}
