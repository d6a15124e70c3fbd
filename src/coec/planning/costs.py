"""What a run will take: memory and operations, from sizes alone."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coec.calibration.layers import TOKENS_PER_BATCH
from coec.calibration.sensitivity import TOKENS as TRIED
from coec.calibration.tokens import TOKEN_SUFFIXES, WHOLE
from coec.devices import DTYPES, choose_device, choose_solve_dtype, resident_bytes
from coec.models.layout import Site

if TYPE_CHECKING:
    from coec.planning.plan import Plan

SOLVER_MATRICES = 6
"""Matrices of the wider consumer's size in a solve: four are counted (benchmarks), and an
eigendecomposition takes two more inside."""
SOLVER_OPERATIONS = 20
"""Times d³: an eigendecomposition takes 9, an inverse 2, and what a repair adds the rest."""
BYTES_PER_CHARACTER = 170
"""Memory that tokenising takes, measured (docs/FORMATS.md)."""
NAMED_TEXT = 11_000_000
"""Characters that are read of a data set at most."""
SHARD_BYTES = 2 * 10**9
OF_TEXT = ("text", "hidden states", "forward pass")
"""What a dense pass takes memory for."""


def statistics_per_block(plan: "Plan") -> int:
    """Bytes of one block's Grams in float64, held-out ones included."""
    kinds = 2 if plan.recipe.calibration.holdout else 1
    blocks = plan.model.layout.blocks
    squares = max(sum(site.columns**2 for site in block.sites) for block in blocks)
    return kinds * squares * torch.float64.itemsize


def memory(
    plan: "Plan", stored: torch.dtype, forward: torch.dtype, *, measured: bool = False
) -> dict[str, int]:
    """Bytes in memory at the fullest moment, by purpose (docs/FORMATS.md explains each).

    Args:
        plan: the widths, and what is asked for.
        stored: the dtype of the dense weights.
        forward: that of the dense pass.
        measured: there are statistics already, and no text is run.
    """
    layout, shapes = plan.model.layout, plan.model.shapes
    block = max(
        sum(shape.numel() for name, shape in shapes.items() if name.startswith(one.prefix))
        for one in layout.blocks
    )
    embedding = shapes[layout.embedding].numel()
    samples = plan.recipe.calibration.windows
    length, hidden = plan.seq_len, plan.dense.hidden
    widest = max(site.columns for site in layout.sites)
    per_token = (6 * hidden + 4 * plan.dense.ffn) * forward.itemsize + 8 * widest
    batch = max(1, TOKENS_PER_BATCH // length) * length
    written = plan.parameters_after * DTYPES[plan.recipe.repair.dtype or "float32"].itemsize
    repair, device = plan.recipe.repair, choose_device(plan.recipe.runtime.device)
    solve = choose_solve_dtype(repair.solve_dtype, device).itemsize
    found = {
        "program": resident_bytes(),
        "text": _text_bytes(plan, forward),
        "one block's weights": max(block, embedding) * (stored.itemsize + forward.itemsize),
        "hidden states": _waiting(plan, samples * length) * hidden * forward.itemsize,
        "forward pass": min(batch, samples * length) * per_token,
        "statistics": statistics_per_block(plan) + 8 * widest**2,
        "solver": SOLVER_MATRICES * widest**2 * solve,
        "shard being filled": min(written, SHARD_BYTES),
    }
    return found | dict.fromkeys(OF_TEXT, 0) if measured else found


def _waiting(plan: "Plan", tokens: int) -> int:
    """Of how many tokens hidden states wait at once, those of several models each counted."""
    beside = _streams(plan) * tokens
    if plan.recipe.repair.allocation != "error":
        return beside
    tried = min(tokens, max(TRIED, plan.seq_len))
    return max(beside, tokens + 2 * len(plan.model.layout.sites) * tried)


def _streams(plan: "Plan") -> int:
    """How many sets of hidden states there are at once: the dense model's before a block, and,
    where the pruned one runs beside it, behind each of its parts, and the pruned one's own.
    """
    beside = 1 + len(plan.model.layout.kinds)
    return 1 + beside if plan.recipe.rebuilding.in_order else 1


def operations(plan: "Plan") -> dict[str, float]:
    """Of one candidate.

    A product with all weights is 2 operations per weight and token; attention maps are left
    out. An iteration of a reconstruction is a forward pass with its derivative, and back:
    eleven thirds of a product with the weights that are fitted (docs/METHODS.md §8).
    """
    how = plan.recipe.rebuilding
    tokens = plan.recipe.calibration.windows * plan.seq_len
    sites = plan.model.layout.sites
    embedding = plan.model.shapes[plan.model.layout.embedding].numel()
    found = {
        "dense pass": 2.0 * (plan.parameters_before - embedding) * tokens,
        "statistics": sum(2.0 * site.columns**2 * tokens for site in sites),
        "solving": sum(SOLVER_OPERATIONS * float(site.columns) ** 3 for site in sites),
    }
    if plan.recipe.repair.allocation != "uniform":
        found["allocating"] = found["dense pass"] + found["statistics"] + found["solving"]
    if plan.recipe.repair.allocation == "error":
        models = 2 * plan.dense.layers + 4  # that run through a block, on average
        found["allocating"] += found["dense pass"] / tokens * min(tokens, TRIED) * models
    if how.in_order:
        found["pruned pass"] = 2.0 * (plan.parameters_after - embedding) * tokens
    if how.reconstruct:
        found["reconstruction"] = sum(
            22 / 3 * tokens * how.inner * how.curvature
            * _fitted(plan, site)
            * (1 if site.value is not None else how.reconstruct)
            for site in sites
        )  # fmt: skip
    return found


def _fitted(plan: "Plan", site: Site) -> int:
    """How many weights reconstruction fits at a site, of the pruned model."""
    rows = sum(
        (part.stop - part.start) // site.units * plan.model.shapes[part.tensor][1]
        for part in site.fitted
    )
    return rows * plan.widths.of(site) + plan.pruned_shapes[site.weight].numel()


def _text_bytes(plan: "Plan", forward: torch.dtype) -> int:
    """What making the windows takes: tokenising a text, or a whole model that is sampled."""
    calibration = plan.recipe.calibration
    source = calibration.source
    whole = plan.parameters_before * forward.itemsize if calibration.written else 0
    if not isinstance(source, str | Path) or calibration.own:
        return whole
    path = Path(source)
    size = path.stat().st_size if path.is_file() else NAMED_TEXT
    if path.suffix in TOKEN_SUFFIXES:
        return max(whole, 2 * size if path.is_file() else 0)
    return max(whole, BYTES_PER_CHARACTER * min(size, WHOLE))
