"""The allocating stage: what the units of every site are worth, from a dense pass of its own.

Widths that differ by block depend on all blocks at once, and a block can be solved only when its
widths are known: its statistics are measured twice, so that those of one block alone are ever in
memory.
"""

import functools

import torch
from torch import Tensor

from coec.allocation import Worths, parameters
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
from coec.selection import error_saved, standardised
from coec.streaming.dense_stream import Measured
from coec.streaming.measure import DensePass, Source
from coec.streaming.sensitivity import Repaired, Sensitivity

PIECE = "importances"
LEAST = 1e-4
"""Of the mean cost of pruning a site: what a site counts at least. Where pruning costs nothing that
can be measured, its curve alone says how few units will do."""


def importances(
    done: Journal,
    dense: Dense,
    source: Source,
    plan: Plan,
    device: torch.device,
    progress: Progress | None = None,
) -> Worths:
    """What every unit is worth, of the sites whose units nobody names; kept in the journal.

    Args:
        done: holds them when they are known.
        dense: the model.
        source: whose windows have been made.
        plan: of uniform widths; says by what units are compared.
        device: where to compute.
        progress: called with (phase, finished blocks, blocks).

    Raises:
        NumericalError: statistics, weights or predictions are not finite.
    """
    if PIECE not in done:
        by_error = plan.recipe.pruning.allocation == "error"
        sensitivity = _sensitivity(dense, source, device) if by_error else None
        found: dict[str, Tensor] = {}
        for measured in source.blocks((), progress):
            found |= {
                site.key: _worth(measured, site, plan, device)
                for site in measured.block.sites
                if plan.recipe.kept is None or site.key not in plan.recipe.kept.units
            }
            if sensitivity is not None:
                repaired = _repaired(measured, plan, device)
                sensitivity.advance(measured.block, measured.tensors, repaired)
            if progress:
                progress("allocating", measured.index + 1, len(dense.layout.blocks))
        if sensitivity is not None:
            found = _weighed(found, sensitivity.costs(), plan)
        path = done.work / f"{PIECE}.safetensors"
        made_of = dense.digests_of(dense.layout.blocks)
        done.put(PIECE, path, functools.partial(write_tensors, found), made_of=made_of)
    return read_tensors(done.path(PIECE))


def check_leader(source: Source) -> None:
    """Raises OptionError where importances would be measured by a process without a device for it."""
    if at_hand(source.device) != source.device:
        raise OptionError(
            "widths by block are decided by the process that leads, which has no GPU: run the "
            "command on a node that has one, or set allocation=uniform or device=cpu"
        )


def _sensitivity(dense: Dense, source: Source, device: torch.device) -> Sensitivity:
    assert isinstance(source, DensePass)  # statistics are refused before
    fit, _ = source.parts()
    return Sensitivity(dense, fit, device=device, dtype=source.dtype)


def _worth(measured: Measured, site: Site, plan: Plan, device: torch.device) -> Tensor:
    """Of the units of one site, that of the last one to stay first."""
    gram, weight = measured.grams[site.name], measured.tensors[site.weight].to(device)
    if plan.judges_are_fitted and site.name in measured.holdout:
        gram = gram + measured.holdout[site.name]
    with naming(site.consumer):
        gram.check_finite()
        if plan.recipe.pruning.allocation == "adaptive":
            return standardised(weight, gram, site.units)
        return error_saved(weight, gram, site.units, plan.widths.of(site))


def _repaired(measured: Measured, plan: Plan, device: torch.device) -> dict[str, Repaired]:
    """The consumers of a block as the uniform plan would have them, in the dense shape."""
    found = {}
    for site in measured.block.sites:
        statistics = SiteStatistics(measured.grams[site.name], measured.holdout.get(site.name))
        cut, _ = solve_site(
            site, measured.tensors, statistics, plan, device, measured.tensors[site.weight].dtype
        )
        if cut.result is not None:
            found[site.key] = _in_place(cut, measured.tensors)
    return found


def _in_place(cut: Cut, tensors: dict[str, Tensor]) -> Repaired:
    """A repaired consumer, its columns where they were."""
    assert cut.result is not None
    old, bias = tensors[cut.site.weight], tensors.get(cut.site.bias)
    weight = torch.zeros(old.shape, dtype=cut.result.weight.dtype)
    kept = cut.site.kept_columns(cut.units).indices.cpu()
    weight[:, kept] = cut.result.weight.cpu()
    if cut.result.bias is not None:
        bias = with_bias(cut.result.bias.cpu(), bias)
    return Repaired(weight, bias)


def _weighed(curves: Worths, costs: dict[str, float], plan: Plan) -> dict[str, Tensor]:
    """The curves, each of the height that was measured at the uniform width, per parameter."""
    known = {key: cost for key, cost in costs.items() if key in curves}
    # A difference of few tokens may be negative; where none costs anything, all heights are alike.
    least = LEAST * sum(map(abs, known.values())) / max(len(known), 1) or 1.0
    sites = {site.key: site for site in plan.model.layout.sites}
    weighed = {}
    for key, curve in curves.items():
        height = max(costs.get(key, 0.0), least) / parameters(sites[key], plan.model.shapes)
        weighed[key] = torch.cat([curve[:1], curve[1:] * height])  # the first stays in any case
    return weighed
