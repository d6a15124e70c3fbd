"""Phases of a run: what each holds in memory, and how many operations it takes.

A multiplication and an addition are two operations. They are counted to leading order, for a rough
total of time: nothing is decided by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.models.description import Description
from coec.models.layout import Site
from coec.planning.memory import ComputeConfig, placed, purposes_of, tried_tokens
from coec.planning.plan import Plan
from coec.streaming.windows import MEASURED_TOKENS

_PROCESS = ("program", "text")
_STREAM = (*_PROCESS, "block's weights", "hidden states", "forward pass", "statistics")
_SOLVE = (*_PROCESS, "hidden states", "Grams", "weight", "solver", "decomposition")
_FIT = (*_PROCESS, "block's weights", "hidden states", "fit")
_ALLOCATE = (
    *_PROCESS, "block's weights", "states of allocation", "copies", "forward pass", "statistics",
    "consumers", "Grams", "weight", "solver", "decomposition", "logits",
)  # fmt: skip
_CHOOSE = (*_PROCESS, "block's weights", "states without a block", "logits")
_PREDICT = (*_PROCESS, "hidden states", "logits")
_DESCENT = 1600
"""Operations of a descent of COEC over b²k: about 25 steps, as small trained models take."""


@dataclass(frozen=True)
class Phase:
    """Phase of a run: its name in plans, bytes of memory by purpose, floating-point operations.

    All memory is the host's where that computes.
    """

    name: str
    device: dict[str, int]
    host: dict[str, int]
    operations: float


def phases_of(plan: Plan, compute: ComputeConfig) -> list[Phase]:
    """List the phases of a run, in order; brief trials of candidates are left out."""
    phases: list[Phase] = []

    def add(name: str, purposes: tuple[str, ...], operations: float = 0.0) -> None:
        site_kind = name.removeprefix("solving ") if purposes == _SOLVE else ""
        sizes = purposes_of(plan, compute, site_kind)
        memory = placed({purpose: sizes[purpose] for purpose in purposes}, compute)
        phases.append(Phase(name, *memory, operations))

    calibration, settings = plan.recipe.calibration, plan.recipe.reconstruction
    solved = {site.kind: _solving(plan, site.kind) for site in plan.model.layout.kinds}
    add("checking", _PROCESS)
    if calibration.bos == "auto" and not (calibration.own or compute.measured):
        # Where the tokenizer has a start, which no config says.
        measuring = _forward(plan, 2 * MEASURED_TOKENS) + _head(plan, 2 * MEASURED_TOKENS)
        add("measuring bos", (*_PROCESS, "block's weights", "logits"), measuring)
    if calibration.own and not compute.measured:
        sampling = _forward(plan, plan.tokens) + _head(plan, plan.tokens)
        add("sampling text", (*_PROCESS, "whole model"), sampling)
    if dropped := plan.recipe.pruning.drop_blocks:  # through half of the blocks on the average
        layers, tokens = plan.dense.layers, tried_tokens(plan)
        each = _forward(plan, tokens) / 2 + _head(plan, tokens)
        add("choosing blocks", _CHOOSE, dropped * layers * each)
    # Widths by block need a dense pass of their own, and every block solved once.
    if not plan.decided:
        allocating = _dense_pass(plan) + sum(solved.values())
        if plan.recipe.allocation.runs_models:  # the derivatives of two models count twice
            tokens = tried_tokens(plan)
            allocating += 9 * _forward(plan, tokens) + 12 * _head(plan, tokens)
        add("allocating", _ALLOCATE, allocating)
    # Both models side by side; or the dense one alone, whose sums serve all solves
    if settings.sequential:
        # What is trained is run again behind it; what is not stands behind its attention already.
        again = 0.5 if settings.propagate and settings.reconstruct else 0.0
        pruned = (1 + again) * _forward(plan, plan.tokens, pruned=True)
        stream = _STREAM if compute.states_on_device else (*_STREAM, "copies")
        add("passes", stream, _dense_pass(plan) + _forward(plan, plan.tokens) + pruned)
    else:
        calibrating = 0.0 if compute.measured else _dense_pass(plan)
        add("calibrating", (*_STREAM, "copies"), calibrating)
    for site_kind, operations in solved.items():
        add(f"solving {site_kind}", _SOLVE, operations)
    if settings.reconstruct:
        training = 3 * settings.reconstruct * _forward(plan, plan.tokens, pruned=True)
        add("training blocks", _FIT, training)
    if passes := settings.reconstruct and settings.prediction_passes:
        last = 3 * _forward(plan, plan.tokens, pruned=True) / plan.dense.layers
        predictions = passes * (last + 4 * _head(plan, plan.tokens))
        add("training on predictions", (*_FIT, "logits"), predictions)
    if settings.sequential and calibration.validation:
        add("predicting", _PREDICT, 4 * _head(plan, plan.tokens * calibration.validation))
    add("writing", (*_PROCESS, "shard"))
    return phases


def weights_met(model: Description, shapes: Mapping[str, torch.Size]) -> float:
    """Number of weights in all blocks that multiply a token; of experts those that it goes to."""
    return sum(
        _share(model, site) * sum(shapes[name].numel() for name in site.tensors if name in shapes)
        for site in model.layout.sites
    )


def _share(model: Description, site: Site) -> float:
    """Fraction of the tokens that come to a site."""
    routed = site.routed and model.shape.experts
    return float(model.config["num_experts_per_tok"]) / model.shape.experts if routed else 1.0


def _forward(plan: Plan, tokens: float, *, pruned: bool = False) -> float:
    """Run all blocks: two for each weight and token, and the attention maps."""
    shapes = plan.pruned_shapes if pruned else plan.model.shapes
    attention = sum(
        (plan.widths.of(site) if pruned else site.units) * site.columns_per_unit
        for site in plan.model.layout.sites
        if site.value is not None
    )
    return (2 * weights_met(plan.model, shapes) + 4 * plan.seq_len * attention) * tokens


def _head(plan: Plan, tokens: float) -> float:
    """Compute the logits of one model."""
    return 2 * plan.dense.hidden * plan.model.vocabulary * tokens


def _dense_pass(plan: Plan) -> float:
    """Run the dense model over all windows, and sum the Grams of every site."""
    grams = sum(_share(plan.model, site) * site.columns**2 for site in plan.model.layout.sites)
    return _forward(plan, plan.tokens) + 2 * grams * plan.tokens


def _solving(plan: Plan, site_kind: str) -> float:
    """Choose units and compensate at all sites of one kind, of m outputs and k of d inputs.

    Scores, errors and a closed form take 14md² + 6mk² + k³, `obs` md² + 2d³, and COEC the
    eigenpairs of d×d and k×k and its descent.
    """
    total, recipe = 0.0, plan.recipe
    for site in filter(plan.widths.stays, plan.model.layout.sites):
        if site.kind != site_kind:
            continue
        m, d = int(plan.model.shapes[site.weight][0]), site.columns
        k = plan.widths.of(site) * site.columns_per_unit
        total += 14 * m * d**2 + 6 * m * k**2 + k**3
        if recipe.pruning.selection == "obs" and recipe.kept is None:
            total += m * d**2 + 2 * d**3
        if recipe.method.name == "coec":
            total += 14 / 3 * (d**3 + k**3) + _DESCENT * min(m, k) ** 2 * k
    return total
