"""Device and dtypes of a run, and the memory and disk that it takes (docs/FORMATS.md)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coec.allocation.widths import parameters_inside
from coec.calibration.sources import Documents, mixture
from coec.calibration.tokens import LONG_TEXT, TOKEN_SUFFIXES
from coec.calibration.windows import validation_count
from coec.devices import (
    DTYPES,
    choose_forward_dtype,
    choose_solve_dtype,
    resident_bytes,
    stored_dtype,
)
from coec.models.layout import Site
from coec.planning.plan import Plan
from coec.reconstruction.block_training import step_tokens
from coec.streaming.copies import AHEAD
from coec.streaming.dense_stream import batch_size
from coec.streaming.head import LOGITS_PER_PASS
from coec.streaming.layers import tokens_per_batch
from coec.streaming.self_text import MOST, window_bytes
from coec.streaming.sensitivity import TOKENS as TRIED_TOKENS

SHARD_BYTES = 2 * 10**9
_BESIDE_WEIGHTS = 2**24
"""Bytes of the files beside the weights."""
_NAMED_TEXT = 11_000_000
"""Characters that are read of a data set at most."""
_CHARACTER_BYTES = 170
"""Memory that tokenising one character takes, measured (docs/FORMATS.md)."""
_ON_HOST = (
    "program", "text", "hidden states", "states of allocation", "states without a block",
    "consumers", "shard",
)  # fmt: skip
"""Purposes that are on the host; hidden states may be on the device instead."""


@dataclass(frozen=True)
class ComputeConfig:
    """Device and dtypes of a run; they change its result by rounding only.

    Attributes:
        device: cpu or cuda.
        stored, forward, written: dtypes of the dense weights, of the dense pass, of the result.
        solve: dtype of the compensation's iterations.
        measured: True where statistics are given, and no text is run.
        at_once: number of windows that the model samples together.
        states_on_device: True where the hidden states of both models wait on the device too.
    """

    device: str
    stored: torch.dtype
    forward: torch.dtype
    written: torch.dtype
    solve: torch.dtype
    measured: bool = False
    at_once: int = MOST
    states_on_device: bool = False

    @classmethod
    def of(
        cls,
        plan: Plan,
        device: torch.device,
        stored: torch.dtype | None = None,
        *,
        measured: bool = False,
    ) -> "ComputeConfig":
        """Resolve the dtypes that a run of a plan has on a device.

        `stored` is the configuration's where it is None.
        """
        pruning = plan.recipe.pruning
        stored = stored_dtype(plan.output.config) if stored is None else stored
        calibration = plan.recipe.calibration
        forward = choose_forward_dtype(
            calibration.forward_dtype, stored, device, summed=calibration.summed
        )
        written = DTYPES[pruning.dtype] if pruning.dtype else stored
        solve = choose_solve_dtype(pruning.solve_dtype, device)
        return cls(device.type, stored, forward, written, solve, measured)


def placed(
    purposes: dict[str, int], compute: ComputeConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """Split bytes by purpose into those on the device and those on the host."""
    on_host = set(purposes if compute.device == "cpu" else _ON_HOST)
    if compute.states_on_device:
        on_host.discard("hidden states")
    host = {purpose: size for purpose, size in purposes.items() if size and purpose in on_host}
    return {name: size for name, size in purposes.items() if size and name not in on_host}, host


def needed_beside(sizes: dict[str, int]) -> int:
    """Sum the bytes that are needed besides the program, which is there already."""
    return sum(size for purpose, size in sizes.items() if purpose != "program")


def disk(plan: Plan, written: torch.dtype) -> tuple[int, int]:
    """Estimate bytes of the pruned model's folder, and of unfinished work at its largest.

    Blocks are removed once the shard that holds them is durable, so only one shard is there twice.
    """
    output = int(plan.parameters_after * written.itemsize * 1.01)
    return output, min(output, SHARD_BYTES) + _BESIDE_WEIGHTS


def purposes_of(plan: Plan, compute: ComputeConfig, site_kind: str = "") -> dict[str, int]:
    """Estimate bytes by purpose; those of solves for one kind of site, or for the widest."""
    layout, shapes, recipe = plan.model.layout, plan.model.shapes, plan.recipe
    stored, forward = compute.stored.itemsize, compute.forward.itemsize
    block = max(parameters_inside(block, shapes) for block in layout.blocks)
    state = plan.dense.hidden * forward  # of a token
    # The embedding is on the device while windows are embedded, before any block is.
    embedding, tokens = shapes[layout.embedding].numel(), plan.tokens
    settings = recipe.reconstruction
    models = 2 if settings.sequential else 1
    # Sums of a part of the windows, and those before it.
    sums = 2 if settings.sequential and not settings.propagate else 1
    widest = max(site.columns for site in layout.sites)
    # States and their copies inside a layer; the Gram's inputs in float64
    per_token = (6 * plan.dense.hidden + 4 * plan.dense.ffn) * forward + 8 * widest
    at_once = tokens_per_batch(torch.device(compute.device), plan.dense.hidden)
    batch = min(batch_size(plan.seq_len, at_once) * plan.seq_len, tokens)
    copied = compute.device != "cpu"

    def waiting(tokens_at_once: int) -> float:
        """Return bytes of a token's state, in a batch of so many, that waits on the host."""
        # Beside a GPU that is in pages which torch takes in powers of two.
        return (
            (1 << (tokens_at_once * state - 1).bit_length()) / tokens_at_once if copied else state
        )

    held = validation_count(recipe.calibration.samples, recipe.calibration.validation)
    fitted = recipe.calibration.samples - held if settings.sequential else None
    of_streams = min(batch_size(plan.seq_len, at_once, fitted) * plan.seq_len, tokens)
    tried = tried_tokens(plan)
    logits = min(LOGITS_PER_PASS, tokens * plan.model.vocabulary)
    sampled = min(compute.at_once, recipe.calibration.samples) * sampled_window(plan, compute)
    sizes = {
        "program": resident_bytes(),
        "text": _text(plan),
        "block's weights": max(models * block, embedding)
        * (stored + forward if compute.device == "cpu" else forward),
        "hidden states": int(
            _streams(plan) * tokens * (state if compute.states_on_device else waiting(of_streams))
        ),
        "states of allocation": int(
            tokens * waiting(batch)
            + _sets_of_allocation(plan) * tried * waiting(min(step_tokens(plan.seq_len), tried))
        ),
        # A pass has one more on its way up, and what the last made of it.
        "copies": (2 * AHEAD + 5) * batch * state if copied else 0,
        "states without a block": int(plan.dense.layers * tried * waiting(tried)),
        "consumers": _pruned_consumers(plan) * forward,
        "forward pass": batch * per_token,
        "statistics": sums * _grams(plan, layout.sites) + 8 * widest**2,
        "fit": _training(plan, compute),
        "logits": embedding * forward + 24 * logits,  # six copies in float32
        "whole model": plan.parameters_before * forward + sampled,
        "shard": min(plan.parameters_after * compute.written.itemsize, SHARD_BYTES),
        **_solving(plan, compute, site_kind),
    }
    if compute.measured:
        sizes |= dict.fromkeys(
            ("text", "hidden states", "states of allocation", "copies", "forward pass"), 0
        )
    return sizes


def _solving(plan: Plan, compute: ComputeConfig, site_kind: str) -> dict[str, int]:
    """Estimate bytes of selection and compensation at the widest site of a kind; "" for any.

    COEC holds six matrices of the consumer's size (four, and two more inside a decomposition),
    closed forms three, `obs` two. The Grams of the sites that follow in the block wait meanwhile.
    """
    site_kinds = [site.kind for site in plan.model.layout.kinds]
    later = site_kinds[site_kinds.index(site_kind) :] if site_kind else site_kinds
    waiting = [site for site in plan.model.layout.sites if site.kind in later]
    sites = [site for site in waiting if site_kind in ("", site.kind)]
    widest = max(sites, key=lambda site: site.columns)
    method = plan.recipe.method.name
    iterative = method == "coec"
    closed = method in ("rcpu", "least-squares", "ridge-to-slice")
    # Matrices of the consumer's size at the peak, for the method and then for the selection
    matrices = 6.0 if iterative else 3.0 if closed else 0.25
    if plan.recipe.pruning.selection == "obs":
        matrices = max(matrices, 2.0)
    if not (plan.recipe.reconstruction.propagate or any(map(plan.widths.removes_from, sites))):
        matrices = 0.0  # all units stay, and nothing is solved
    entries, solve = int(matrices * widest.columns**2), compute.solve.itemsize if iterative else 8
    grams = _grams(plan, waiting)
    return {
        # Where validation windows are fitted on in the end, the sum of both kinds as well.
        "Grams": grams + grams // 2 if plan.recipe.fits_validation else grams,
        "weight": plan.model.shapes[widest.weight].numel() * (compute.stored.itemsize + 8),
        "solver": entries * solve,
        "decomposition": entries * (8 - solve),  # in float64, on the host where the device is full
    }


def _grams(plan: Plan, sites: Iterable[Site]) -> int:
    """Sum bytes of the Grams of one block's sites in float64, validation windows included."""
    squares: Counter[int] = Counter()
    for site in sites:
        squares[site.block] += site.columns**2
    return 8 * max(squares.values()) * (2 if plan.recipe.calibration.validation else 1)


def _streams(plan: Plan) -> int:
    """Number of sets of hidden states, of all windows, that wait at once.

    Where the pruned model runs beside the dense one, there are its states before a block and the
    dense ones behind it, and either the dense ones between or before, or the pruned ones between.
    """
    return 3 if plan.recipe.reconstruction.sequential else 1


def _sets_of_allocation(plan: Plan) -> int:
    """Number of sets of hidden states of the tokens that widths by error are decided on."""
    if not plan.recipe.allocation.runs_models:
        return 0
    return 3 + 2 * plan.dense.layers  # three models', and those of two before every block


def _pruned_consumers(plan: Plan) -> int:
    """Number of weights of the pruned consumers that allocation by error keeps of all blocks."""
    if not plan.recipe.allocation.runs_models:
        return 0
    return sum(plan.model.shapes[site.weight].numel() for site in plan.model.layout.sites)


def tried_tokens(plan: Plan) -> int:
    """Number of tokens that allocation by error runs models over, one window's at least."""
    return min(plan.tokens, max(TRIED_TOKENS, plan.seq_len))


def _training(plan: Plan, compute: ComputeConfig) -> int:
    """Estimate bytes of training the largest block: each weight in the dtype of the forward pass,
    and five times in float32 (itself, its derivative, AdamW's moments, the best state), and the
    activations of a step, which derivatives need.
    """
    if not plan.recipe.reconstruction.reconstruct:
        return 0
    itemsize = compute.forward.itemsize
    weights = max(
        parameters_inside(block, plan.pruned_shapes) for block in plan.model.layout.blocks
    )
    active = 24 * plan.dense.hidden + 6 * plan.dense.ffn  # numbers, for each token
    return (itemsize + 5 * max(4, itemsize)) * weights + step_tokens(plan.seq_len) * active * max(
        4, itemsize
    )


def sampled_window(plan: Plan, compute: ComputeConfig) -> int:
    """Memory of one window that the model samples."""
    itemsize = compute.forward.itemsize
    return window_bytes(plan.dense, plan.model.vocabulary, plan.seq_len, itemsize)


def _text(plan: Plan) -> int:
    """Memory of the text that takes most of it; texts of a mixture are read in turn."""
    return max(map(_text_bytes, (source for source, _ in mixture(plan.recipe.calibration.source))))


def _text_bytes(source: Any) -> int:
    if isinstance(source, Documents):
        return _CHARACTER_BYTES * LONG_TEXT
    if not isinstance(source, str | Path) or source == "self":
        return 0
    path = Path(source)
    if path.suffix in TOKEN_SUFFIXES:
        return 2 * path.stat().st_size if path.is_file() else 0
    characters = path.stat().st_size if path.is_file() else _NAMED_TEXT
    return _CHARACTER_BYTES * min(characters, LONG_TEXT)
