"""Costs of a run: peak memory, disk and operations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coec.config import OWN
from coec.devices import AHEAD, LOGITS_PER_PASS, FreeMemory, resident_bytes, tokens_per_batch
from coec.errors import OptionError
from coec.methods.block_training import step_tokens
from coec.models.description import Description
from coec.models.layout import Shape, Site
from coec.planning.plan import Plan
from coec.planning.widths import Costs, parameters_inside
from coec.text.sources import mixture
from coec.text.tokens import LONG_TEXT, holds_tokens
from coec.text.windows import TRIED_TOKENS

OVER = 1.2
"""Estimate over free memory from which a plan is refused: no run was planned at more than
1.16 times its actual use (docs/lab/LOG.md)."""
SHARD_BYTES = 2 * 10**9
MOST_SAMPLED = 128
"""Windows that the model samples at once, at most."""
_LOGIT_COPIES = 6
"""Copies of a window's logits, in float32, that sampling is counted to hold."""
_ROOM_FOR_STATES = 0.8
"""Fraction of a device's free memory that a plan may fill whose hidden states wait there."""
_NAMED_TEXT = 11_000_000
"""Characters that are read of a data set at most."""
_CHARACTER_BYTES = 170
"""Memory that tokenising one character takes, measured (docs/FORMATS.md)."""
_DESCENT = 1600
"""Operations of a descent of COEC over b²k: about 25 steps, as small trained models take."""


@dataclass(frozen=True)
class Memory:
    """Memory by purpose at the fullest moment of a run, on the device and on the host.

    The host has all of it if it computes.
    """

    moment: str
    device: dict[str, int]
    host: dict[str, int]

    def largest(self, place: int) -> str:
        """Return what takes most on the device (0) or the host (1), without the program."""
        sizes = (self.device, self.host)[place]
        return max(sizes, key=lambda name: sizes[name] * (name != "program"))

    @property
    def needed(self) -> tuple[int, int]:
        """Sizes on the device and on the host, without the program, which is there already."""
        host = sum(size for purpose, size in self.host.items() if purpose != "program")
        return sum(self.device.values()), host


def memory(plan: Plan) -> list[Memory]:
    """Estimate the memory in use at every moment of a run that could be the peak."""
    sizes, on_gpu = _sizes(plan), plan.device.type != "cpu"
    host = {"program", "text", "states of allocation", "states without a block", "shard"}
    if plan.home.type == "cpu":
        host.add("hidden states")
    block = ("block's weights", "hidden states", "copies")
    moments = {
        "reading text": ("text",),
        "sampling text": ("whole model",) if plan.recipe.own else (),
        "choosing blocks": ("block's weights", "states without a block", "logits"),
        "allocating": (
            "block's weights", "states of allocation", "copies", "forward pass", "statistics",
            "solving", "logits",
        ),
        "passes": (*block, "forward pass", "statistics"),
        "solving": ("hidden states", "solving"),
        "training": (*block, "training", "logits"),
        "predicting": ("hidden states", "logits"),
        "writing": ("shard",),
    }  # fmt: skip
    if not plan.recipe.drop_blocks:
        del moments["choosing blocks"]
    if plan.decided:
        del moments["allocating"]
    if not plan.trains:
        del moments["training"]
    if not (plan.sequential and plan.validation_count):
        del moments["predicting"]
    estimates = []
    for moment, purposes in moments.items():
        held = {purpose: sizes[purpose] for purpose in ("program", *purposes) if sizes[purpose]}
        of_host = {name: size for name, size in held.items() if not on_gpu or name in host}
        device = {name: size for name, size in held.items() if name not in of_host}
        estimates.append(Memory(moment, device, of_host))
    return estimates


def placed(plan: Plan, free: FreeMemory | None = None) -> Plan:
    """Return the plan with the place where hidden states wait: the GPU, if all fits there with
    them, else the host.

    Raises:
        OptionError: the run needs more than the free memory.
    """
    free = free or FreeMemory.of(plan.device)
    if free.device is not None:
        # The hidden states of two models wait on a GPU where everything fits with a margin.
        fullest = max(estimate.needed[0] for estimate in memory(plan))
        if not plan.sequential or fullest > _ROOM_FOR_STATES * free.device:
            plan = replace(plan, home=torch.device("cpu"))
    for estimate in memory(plan):
        for needed, room, place in zip(
            estimate.needed, (free.device, free.host), ("the device", "this machine"), strict=True
        ):
            if room is not None and needed > OVER * room:
                largest = estimate.largest(int(place == "this machine"))
                raise OptionError(
                    f"about {needed / 1e9:.1f} GB of memory are needed ({estimate.moment}, most of "
                    f"it for {largest}), and {place} has {room / 1e9:.1f} GB free: take fewer "
                    f"samples than {plan.recipe.samples}, a seq_len below {plan.seq_len}, or a "
                    "shorter text" + (", or set device=cpu" if free.device is not None else "")
                )
    return plan


def disk(plan: Plan) -> tuple[int, int]:
    """Estimate bytes of the pruned model's folder, and of unfinished work at its largest.

    Blocks are removed once the shard that holds them is durable, so only the blocks of one shard
    are there twice. What is around a language model is written once, as it is stored.
    """
    pruned = int(plan.parameters_after * plan.written.itemsize * 1.01)
    around = 0 if plan.model.around is None else plan.model.around.outside()
    output = pruned + around * plan.stored.itemsize
    return output, min(pruned, SHARD_BYTES) + 2**24


def _sizes(plan: Plan) -> dict[str, int]:
    """Estimate bytes by purpose."""
    layout, shapes, hidden = plan.model.layout, plan.model.shapes, plan.dense.hidden
    stored, forward, on_gpu = plan.stored.itemsize, plan.forward.itemsize, plan.device.type != "cpu"
    block = max(parameters_inside(block, shapes) for block in layout.blocks)
    embedding, tokens, state = shapes[layout.embedding].numel(), plan.tokens, hidden * forward
    widest = max(site.columns for site in layout.sites)
    at_once = min(tokens_per_batch(plan.device, hidden), -(-tokens // 8))
    batch = min(max(at_once // plan.seq_len, 1) * plan.seq_len, tokens)
    tried = min(tokens, max(TRIED_TOKENS, plan.seq_len))
    # Pinned pages that wait on the host of a GPU come in powers of two.
    waiting = (1 << (batch * state - 1).bit_length()) / batch if on_gpu else state
    grams = max(sum(8 * site.columns**2 for site in block.sites) for block in layout.blocks)
    consumers = sum(shapes[site.weight].numel() for site in layout.sites)
    logits = min(LOGITS_PER_PASS, tokens * plan.model.vocabulary)
    sampled = min(MOST_SAMPLED, plan.recipe.samples) * window_bytes(
        plan.dense, plan.model.vocabulary, plan.seq_len, forward
    )
    return {
        "program": resident_bytes(),
        "text": max(_text_bytes(source) for source, _ in mixture(plan.recipe.calibration)),
        "block's weights": max((1 + plan.sequential) * block, embedding)
        * (forward if on_gpu else stored + forward),
        # Of two models: before the block and after it, and between its sites
        "hidden states": int((3 if plan.sequential else 1) * tokens * waiting),
        # One model's; of the tokens that are tried three models', two of them before every block
        "states of allocation": int(
            tokens * waiting + (3 + 2 * plan.dense.layers) * tried * state * (2 if on_gpu else 1)
        ) + consumers * forward,
        "copies": (2 * AHEAD + 5) * batch * state if on_gpu and plan.home.type == "cpu" else 0,
        "states without a block": plan.dense.layers * tried * state * (2 if on_gpu else 1),
        # States and their copies inside a layer, and the Gram's inputs in float64
        "forward pass": batch * ((6 * hidden + 4 * plan.dense.ffn) * forward + 8 * widest),
        # Sums of a part of the windows, and of the parts before it
        "statistics": 2 * grams + 8 * widest**2,
        "training": _training(plan) if plan.trains else 0,
        "logits": embedding * forward + 24 * logits,  # six copies in float32
        "whole model": plan.parameters_before * forward + sampled,
        "shard": min(plan.parameters_after * plan.written.itemsize, SHARD_BYTES),
        "solving": grams + _solving(plan),
    }  # fmt: skip


def window_bytes(shape: Shape, vocabulary: int, seq_len: int, itemsize: int) -> int:
    """Return the memory of one window that is sampled, at its last token.

    Keys and values of all layers; of one layer a second time while they grow, and repeated for the
    query heads that share them; and copies of the logits in float32.
    """
    layer = 2 * shape.kv_heads * shape.head_dim * seq_len * itemsize
    return layer * (shape.layers + 1 + shape.group) + 4 * _LOGIT_COPIES * vocabulary


def _solving(plan: Plan) -> int:
    """Estimate bytes of selection and compensation at the widest site.

    COEC holds six matrices of the consumer's size (four, and two more inside a decomposition),
    closed forms three, `obs` two.
    """
    matrices = {"coec": 6.0, "none": 0.25, "bias": 0.25}.get(plan.method.name, 3.0)
    if plan.recipe.selection == "obs":
        matrices = max(matrices, 2.0)
    widest = max(plan.model.layout.sites, key=lambda site: site.columns)
    weight = plan.model.shapes[widest.weight].numel() * (plan.stored.itemsize + 8)
    return int(8 * matrices * widest.columns**2) + weight


def _training(plan: Plan) -> int:
    """Estimate bytes of training the largest block: each weight in the dtype of the forward pass,
    and five times in float32 (itself, its derivative, AdamW's moments, the best state), and the
    activations of a step, which derivatives need.
    """
    itemsize, wide = plan.forward.itemsize, max(4, plan.forward.itemsize)
    weights = max(parameters_inside(b, plan.pruned_shapes) for b in plan.model.layout.blocks)
    active = 24 * plan.dense.hidden + 6 * plan.dense.ffn  # numbers, for each token
    return (itemsize + 5 * wide) * weights + step_tokens(plan.seq_len) * active * wide


def _text_bytes(source: Any) -> int:
    """Estimate the memory that reading one source takes; sources of a mixture are read in turn."""
    if not isinstance(source, str):  # token ids, or documents
        return 0 if hasattr(source, "dtype") else _CHARACTER_BYTES * LONG_TEXT
    if source == OWN:
        return 0
    path = Path(source.removeprefix(f"{OWN}:"))
    if holds_tokens(path):
        return 2 * path.stat().st_size if path.is_file() else 0
    characters = path.stat().st_size if path.is_file() else _NAMED_TEXT
    return _CHARACTER_BYTES * min(characters, LONG_TEXT)


def operations(plan: Plan) -> float:
    """Count floating-point operations of a run to leading order; a multiplication and an addition
    are two. Nothing is decided by them.
    """
    model, tokens = plan.model, plan.tokens
    dense = 2 * weights_met(model, model.shapes) + 4 * plan.seq_len * plan.dense.hidden
    pruned = 2 * weights_met(model, plan.pruned_shapes) + 4 * plan.seq_len * plan.dense.hidden
    head = 2 * plan.dense.hidden * model.vocabulary
    passed = Costs(model, active=True).passed
    grams = 2 * sum(passed(site) * site.columns**2 for site in model.layout.sites)
    solving = sum(_solve(plan, site) for site in filter(plan.widths.stays, model.layout.sites))
    total = (dense + grams) * tokens + solving
    tried = min(tokens, TRIED_TOKENS)
    if not plan.decided:  # a dense pass and every block solved, then derivatives of two models
        total += (dense + grams) * tokens + solving + (9 * dense + 12 * head) * tried
    total += plan.recipe.drop_blocks * plan.dense.layers * (dense / 2 + head) * tried
    if plan.sequential:
        total += (dense + 1.5 * pruned) * tokens
    last = pruned / plan.dense.layers
    if plan.trains:
        total += (3 * plan.recipe.reconstruct * pruned + 2 * (3 * last + 4 * head)) * tokens
    return total


def weights_met(model: Description, shapes: Mapping[str, torch.Size]) -> float:
    """Number of weights in all blocks that multiply a token; of experts, only the routed ones."""
    passed = Costs(model, active=True).passed
    return sum(
        passed(site) * sum(shapes[name].numel() for name in site.tensors if name in shapes)
        for site in model.layout.sites
    )


def _solve(plan: Plan, site: Site) -> float:
    """Choose units and compensate at a site, of m outputs and k of d inputs.

    Scores, errors and a closed form take 14md² + 6mk² + k³, `obs` md² + 2d³, and COEC the
    eigenpairs of d×d and k×k and its descent.
    """
    m, d = int(plan.model.shapes[site.weight][0]), site.columns
    k = plan.widths.of(site) * site.columns_per_unit
    total = 14.0 * m * d**2 + 6 * m * k**2 + k**3
    if plan.recipe.selection == "obs" and plan.kept is None:
        total += m * d**2 + 2 * d**3
    if plan.method.name == "coec":
        total += 14 / 3 * (d**3 + k**3) + _DESCENT * min(m, k) ** 2 * k
    return total
