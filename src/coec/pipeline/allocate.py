"""Measure how important the units of every site are, in a dense pass before the blocks are solved.

Widths that differ by block depend on all blocks at once, and a block can be solved only when its
widths are known. So its statistics are measured twice, and those of one block alone are ever in
memory.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from coec.allocation.by_importance import Importances
from coec.allocation.widths import parameters
from coec.devices import at_hand
from coec.errors import OptionError
from coec.events import Progress
from coec.execution.journal import Journal
from coec.models.dense import Dense
from coec.models.files import read_tensors, write_tensors
from coec.models.layout import Site
from coec.models.surgery import Cut, with_bias
from coec.pipeline.solve import SiteStatistics, naming, solve_site
from coec.planning import Plan
from coec.planning.run import Run
from coec.streaming.dense_stream import Measured
from coec.streaming.passes import BlockSource
from coec.streaming.sensitivity import CompensatedConsumer, Sensitivity
from coec.types import KeptSet

_PIECE = "importances"
_LEAST = 1e-4
"""Lower bound on the cost of pruning a site, as a share of the mean. Where pruning costs nothing
that can be measured, the shape of a site's curve alone says how few units will do."""


def measure_importances(
    journal: Journal,
    dense: Dense,
    source: BlockSource,
    run: Run,
    progress: Progress | None = None,
) -> Importances:
    """Return the importance of every unit at the sites whose units nobody names.

    The journal keeps them once they are known; the plan's uniform widths say how they compare.

    Raises:
        NumericalError: statistics, weights or predictions are not finite.
    """
    if _PIECE not in journal:
        plan, sensitivity = run.plan, None
        shared = {site.key for site in plan.shared}
        if run.recipe.allocation.runs_models:
            fit, _ = source.windows_of_text()
            sensitivity = Sensitivity(dense, fit, device=run.device, dtype=run.forward)
        # Every block: statistics → importances → pruned consumers → all models advance
        importances: dict[str, Tensor] = {}
        for measured in source.blocks((), progress):
            block, tensors = measured.block, measured.tensors
            units: dict[str, KeptSet | None] = {}
            for site in block.sites:
                if site.key in shared:
                    importances[site.key], units[site.key] = _importance(measured, site, run)
            if sensitivity is not None:
                gone = measured.index in plan.dropped
                compensated = {} if gone else _compensated(measured, units, run)
                sensitivity.advance(block, tensors, compensated)
            if progress:
                progress("allocating", measured.index + 1, len(dense.layout.blocks))
        # Curves of all sites → heights, measured on the way back through the blocks
        if sensitivity is not None:
            importances = _scaled(importances, sensitivity.costs(progress), plan)
        path = journal.work / f"{_PIECE}.safetensors"
        made_of = dense.digests_of(dense.layout.blocks)
        journal.put(_PIECE, path, functools.partial(write_tensors, importances), made_of=made_of)
    return read_tensors(journal.path(_PIECE))


def check_leader(device: torch.device) -> None:
    """Raise OptionError where the process that leads a cluster would measure without its device."""
    if at_hand(device) != device:
        raise OptionError(
            "widths by block, and blocks to leave out, are decided by the process that leads, "
            "which has no GPU: run the command on a node that has one, or set allocation=uniform "
            "and no drop_blocks, or device=cpu"
        )


def _importance(measured: Measured, site: Site, run: Run) -> tuple[Tensor, KeptSet | None]:
    """Return the importances of one site's units, that of the last one to be removed first.

    Where they come from a path of removals, also the units that it leaves at the uniform width.
    """
    gram, weight = measured.grams[site.name], measured.tensors[site.weight].to(run.device)
    if run.recipe.fits_validation and site.name in measured.holdout:
        gram = gram + measured.holdout[site.name]
    with naming(site.consumer):
        gram.check_finite()
        importance = run.recipe.allocation.importance
        assert importance is not None  # or the widths were decided before
        return importance(weight, gram, site.units, run.plan.widths.of(site), site.ranges)


def _compensated(
    measured: Measured, units: Mapping[str, KeptSet | None], run: Run
) -> dict[str, CompensatedConsumer]:
    """Return the consumers of a block as the uniform plan has them, in the dense shape.

    `units` are those that stay, by `Site.key`, where nobody named them.
    """
    consumers = {}
    for site in measured.block.sites:
        statistics = SiteStatistics(measured.grams[site.name], measured.holdout.get(site.name))
        written = measured.tensors[site.weight].dtype
        cut, _ = solve_site(
            site, measured.tensors, statistics, run, written, units=units.get(site.key)
        )
        if cut.result is not None:
            consumers[site.key] = _in_dense_shape(cut, measured.tensors)
    return consumers


def _in_dense_shape(cut: Cut, tensors: dict[str, Tensor]) -> CompensatedConsumer:
    """Return a compensated consumer with its columns where they were."""
    assert cut.result is not None
    old, bias = tensors[cut.site.weight], tensors.get(cut.site.bias)
    weight = torch.zeros(old.shape, dtype=cut.result.weight.dtype)
    kept = cut.site.kept_columns(cut.units).indices.cpu()
    # m×k → m×d, dropped columns 0: it can then stand in the dense model.
    weight[:, kept] = cut.result.weight.cpu()
    if cut.result.bias is not None:
        bias = with_bias(cut.result.bias.cpu(), bias)
    return CompensatedConsumer(weight, bias)


def _scaled(curves: Importances, costs: dict[str, float], plan: Plan) -> dict[str, Tensor]:
    """Return the curves, each of the height measured at the uniform width, per parameter."""
    measured_costs = {key: cost for key, cost in costs.items() if key in curves}
    # A difference of few tokens may be negative; where none costs anything, all heights are alike.
    floor = _LEAST * sum(map(abs, measured_costs.values())) / max(len(measured_costs), 1) or 1.0
    sites = {site.key: site for site in plan.model.layout.sites}
    scaled = {}
    for key, curve in curves.items():
        # Nats at the uniform width over a unit's parameters: what a parameter there is worth.
        height = max(costs.get(key, 0.0), floor) / parameters(sites[key], plan.model.shapes)
        scaled[key] = torch.cat([curve[:1], curve[1:] * height])  # the first stays in any case
    return scaled
