"""What every phase holds in memory at its fullest moment, by purpose (docs/FORMATS.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coec.calibration.tokens import LONG_TEXT, TOKEN_SUFFIXES
from coec.devices import resident_bytes
from coec.models.layout import Site
from coec.planning.facts import NAMED_TEXT
from coec.planning.how import ComputeConfig
from coec.streaming.dense_stream import batch_size
from coec.streaming.head import LOGITS_PER_PASS
from coec.streaming.self_text import window_bytes
from coec.streaming.sensitivity import TOKENS as TRIED

if TYPE_CHECKING:
    from coec.planning.plan import Plan

SOLVER_MATRICES = {
    "coec": 6.0, "auto": 6.0, "rcpu": 3.0, "least-squares": 3.0, "ridge-to-slice": 3.0
}  # fmt: skip
"""Matrices of the consumer's size in a solve: of COEC four are counted (tests), and an
eigendecomposition takes two more inside."""
ITERATIVE = ("coec", "auto")
"""Those whose iterations may be in float32; what their decompositions take besides, in float64, is
taken of the host where a device has no room for it."""
LIGHT, ELIMINATION = 0.25, 2.0
"""Of other compensations; and of the selection `obs`, in float64, beside the statistics."""
BYTES_PER_CHARACTER = 170
"""Memory that tokenising takes, measured (docs/FORMATS.md)."""
SHARD_BYTES = 2 * 10**9
DUALS = 2
"""In an iteration of a fit every activation has a derivative beside it."""
VECTORS = 9
"""Of the size of what is fitted: θ, a direction, residuals, gradients."""
MAPS = 8
"""Attention maps of a batch at once in a fit, where they are made in plain form."""
LOGIT_COPIES = 6
LEAST = {
    "block's weights": 0.5, "hidden states": 1.0, "forward pass": 0.25, "statistics": 0.5,
    "Grams": 1.0, "weight": 0.3, "solver": 0.5, "fit": 0.4, "logits": 0.3, "whole model": 1.0,
    "shard": 0.5,
}  # fmt: skip
"""How much of what a purpose is planned to take it takes at least: what a refusal goes by. The
program and what a text took are left out: they are there already, or may be given back."""
HOST = ("program", "text", "hidden states", "shard")
"""Purposes that are on the host in any case."""


@dataclass(frozen=True)
class Held:
    """What one phase holds at its fullest moment.

    Attributes:
        phase: its name.
        device, host: bytes by purpose; all of it is the host's where that computes.
    """

    phase: str
    device: dict[str, int]
    host: dict[str, int]

    @property
    def least(self) -> tuple[int, int]:
        """What it cannot do without beside what is there already, on the device and the host."""
        device, host = (
            int(sum(size * LEAST.get(purpose, 0.0) for purpose, size in part.items()))
            for part in (self.device, self.host)
        )
        return device, host


def memory(plan: "Plan", how: ComputeConfig) -> list[Held]:
    """Every phase, in order."""
    sizes = purposes(plan, how)
    found = []
    for phase, names in _phases(plan, how).items():
        own = {name: sizes[name] for name in names if sizes.get(name)}
        if "solver" in own:
            own |= _solving(plan, how, phase.partition(" ")[2])
        if how.device == "cpu":
            found.append(Held(phase, {}, own))
            continue
        host = {name: size for name, size in own.items() if name in HOST}
        found.append(Held(phase, {n: size for n, size in own.items() if n not in host}, host))
    return found


def _phases(plan: "Plan", how: ComputeConfig) -> dict[str, tuple[str, ...]]:
    """What each phase holds."""
    calibrating = (
        "program",
        "text",
        "block's weights",
        "hidden states",
        "forward pass",
        "statistics",
    )
    waiting = ("program", "text", "hidden states", "Grams", "weight", "solver")
    found: dict[str, tuple[str, ...]] = {"checking": ("program", "text")}
    kinds = [site.kind for site in plan.model.layout.kinds]
    if plan.recipe.calibration.written and not how.measured:
        found["sampling text"] = ("program", "text", "whole model")
    if not plan.decided:
        found["allocating"] = (*calibrating, "weight", "solver", "logits")
    if plan.recipe.reconstruction.sequential:
        found["passes"] = calibrating
        for kind in kinds:
            found[f"solving {kind}"] = waiting
            if plan.recipe.reconstruction.reconstruct:
                found[f"fitting {kind}"] = (
                    "program", "text", "block's weights", "hidden states", "fit"
                )  # fmt: skip
        found["predicting"] = ("program", "text", "hidden states", "logits")
    else:
        found["calibrating"] = calibrating
        found |= {f"solving {kind}": waiting for kind in kinds}
    return found | {"writing": ("program", "text", "shard")}


def purposes(plan: "Plan", how: ComputeConfig) -> dict[str, int]:
    """Bytes by purpose, in whatever phase."""
    layout, shapes = plan.model.layout, plan.model.shapes
    block = max(
        sum(shape.numel() for name, shape in shapes.items() if name.startswith(one.prefix))
        for one in layout.blocks
    )
    embedding = shapes[layout.embedding].numel()
    tokens = plan.recipe.calibration.windows * plan.seq_len
    stored, forward = how.stored.itemsize, how.forward.itemsize
    models = 2 if plan.recipe.reconstruction.sequential else 1
    widest = max(site.columns for site in layout.sites)
    per_token = (6 * plan.dense.hidden + 4 * plan.dense.ffn) * forward + 8 * widest
    written = plan.parameters_after * how.written.itemsize
    loaded = stored + forward if how.device == "cpu" else forward
    found = {
        "program": resident_bytes(),
        "text": _text(plan),
        "block's weights": max(models * block, embedding) * loaded,
        "hidden states": _waiting(plan, tokens) * plan.dense.hidden * forward,
        "forward pass": min(_batch(plan), tokens) * per_token,
        "statistics": statistics_per_block(plan) + 8 * widest**2,
        **_solving(plan, how, ""),
        "fit": _fit(plan, how) if plan.recipe.reconstruction.reconstruct else 0,
        "logits": _logits(plan, how, tokens),
        "whole model": _whole(plan, how) if plan.recipe.calibration.written else 0,
        "shard": min(written, SHARD_BYTES),
    }
    if how.measured:
        found |= dict.fromkeys(("text", "hidden states", "forward pass"), 0)
    return found


def _solving(plan: "Plan", how: ComputeConfig, kind: str) -> dict[str, int]:
    """Selection and compensation of the widest site of a kind; "" for any.

    The Grams of sites that follow wait beside its own.
    """
    kinds = [site.kind for site in plan.model.layout.kinds]
    left = kinds[kinds.index(kind) :] if kind in kinds else kinds
    blocks = plan.model.layout.blocks
    grams = max(sum(s.columns**2 for s in b.sites if s.kind in left) for b in blocks)
    sites = [site for site in plan.model.layout.sites if kind in ("", site.kind)]
    widest = max(sites, key=lambda site: site.columns)
    method, wide = plan.recipe.method.name, torch.float64.itemsize
    matrices = SOLVER_MATRICES.get(method, LIGHT)
    if plan.recipe.pruning.selection == "obs":
        matrices = max(matrices, ELIMINATION)
    if not (plan.recipe.reconstruction.propagate or any(map(plan.widths.removes_from, sites))):
        matrices = 0.0  # all units stay, and nothing is solved
    solve = how.solve.itemsize if method in ITERATIVE else wide
    entries = int(matrices * widest.columns**2)
    return {
        # And the sum of both where windows that judge are fitted on in the end.
        "Grams": (_kinds_of_windows(plan) + plan.judges_are_fitted) * grams * wide,
        "weight": plan.model.shapes[widest.weight].numel() * (how.stored.itemsize + wide),
        "solver": entries * solve,
        "decomposition": entries * (wide - solve),
    }


def _kinds_of_windows(plan: "Plan") -> int:
    """Number of Grams of one site: of the windows fitted on, and of those held out."""
    return 2 if plan.recipe.calibration.held_out else 1


def statistics_per_block(plan: "Plan") -> int:
    """Bytes of one block's Grams in float64, held-out ones included."""
    kinds = _kinds_of_windows(plan)
    blocks = plan.model.layout.blocks
    squares = max(sum(site.columns**2 for site in block.sites) for block in blocks)
    return kinds * squares * torch.float64.itemsize


def _batch(plan: "Plan") -> int:
    return batch_size(plan.seq_len) * plan.seq_len


def _waiting(plan: "Plan", tokens: int) -> int:
    """Of how many tokens hidden states wait at once, those of several models each counted."""
    beside = _streams(plan) * tokens
    if plan.recipe.pruning.allocation != "error":
        return beside
    tried = min(tokens, max(TRIED, plan.seq_len))
    return max(beside, tokens + 2 * len(plan.model.layout.sites) * tried)


def _streams(plan: "Plan") -> int:
    """How many sets of hidden states there are at once: the dense model's before a block, and,
    where the pruned one runs beside it, behind each of its parts, and the pruned one's own.
    """
    beside = 1 + len(plan.model.layout.kinds)
    return 1 + beside if plan.recipe.reconstruction.sequential else 1


def _fit(plan: "Plan", how: ComputeConfig) -> int:
    """The fullest fit: what autograd keeps of a batch, and vectors of what is fitted."""
    return max(_fit_of(plan, how, site) for site in plan.model.layout.kinds)


def _fit_of(plan: "Plan", how: ComputeConfig, site: Site) -> int:
    itemsize, hidden = how.forward.itemsize, plan.dense.hidden
    windows = plan.recipe.calibration.windows
    tokens = plan.seq_len * batch_size(plan.seq_len, windows)
    kept = plan.widths.of(site)
    inputs = [int(plan.model.shapes[part.tensor][1]) for part in site.fitted]
    rows = [(part.stop - part.start) // site.units * kept for part in site.fitted]
    consumer = plan.pruned_shapes[site.weight]
    fitted = consumer.numel() + sum(m * n for m, n in zip(rows, inputs, strict=True))
    wide = max(4, itemsize)
    # Eigenvectors and a denominator for every matrix but the last, which has an inverse.
    precondition = wide * (
        sum(3 * n * n + m * n for m, n in zip(rows, inputs, strict=True))
        + 3 * int(consumer[1]) ** 2
    )
    if site.value is not None:
        active = (8 * hidden + 6 * site.columns) * itemsize
        maps = 0
        if itemsize < wide:  # no difference quotient, and no fused attention, in narrow dtypes
            heads = plan.dense.kv_heads * plan.dense.group
            maps = MAPS * tokens * plan.seq_len * heads * itemsize
        return VECTORS * fitted * wide + precondition + tokens * active + maps
    width = int(consumer[1])
    active = DUALS * (6 * hidden + 5 * width) * itemsize + 4 * hidden * wide
    return VECTORS * fitted * wide + precondition + tokens * active


def _logits(plan: "Plan", how: ComputeConfig, tokens: int) -> int:
    """The head, and of two models what it makes of a run of tokens."""
    head = plan.model.shapes[plan.model.layout.embedding].numel()
    logits = min(LOGITS_PER_PASS, tokens * plan.model.vocabulary)
    return head * how.forward.itemsize + LOGIT_COPIES * 4 * logits


def _whole(plan: "Plan", how: ComputeConfig) -> int:
    """A model that writes: all weights, and the windows that it writes at once."""
    rows = min(how.at_once, plan.recipe.calibration.written)
    return plan.parameters_before * how.forward.itemsize + rows * written_window(plan, how)


def written_window(plan: "Plan", how: ComputeConfig) -> int:
    """Bytes of one window that the model writes."""
    return window_bytes(plan.dense, plan.model.vocabulary, plan.seq_len, how.forward.itemsize)


def _text(plan: "Plan") -> int:
    """What tokenising a text takes."""
    calibration = plan.recipe.calibration
    source = calibration.source
    if not isinstance(source, str | Path) or calibration.own:
        return 0
    path = Path(source)
    size = path.stat().st_size if path.is_file() else NAMED_TEXT
    if path.suffix in TOKEN_SUFFIXES:
        return 2 * size if path.is_file() else 0
    return BYTES_PER_CHARACTER * min(size, LONG_TEXT)
