"""The allocating stage: what the units of every site are worth, from a dense pass of its own.

Widths that differ by block depend on all blocks at once, and a block can be solved only when its
widths are known: its statistics are measured twice, so that those of one block alone are ever in
memory.
"""

import functools

import torch
from torch import Tensor

from coec.allocation import Worths
from coec.calibration.measure import Source
from coec.calibration.stream import Measured
from coec.events import Progress
from coec.execution.journal import Journal
from coec.models.files import read_tensors, write_tensors
from coec.models.layout import Site
from coec.planning import Plan
from coec.selection import error_saved, standardised
from coec.solving import naming


def worths(
    done: Journal,
    source: Source,
    plan: Plan,
    device: torch.device,
    progress: Progress | None = None,
) -> Worths:
    """What every unit is worth, of the sites whose units nobody names; kept in the journal.

    Args:
        done: holds the blocks that are finished.
        source: whose windows have been made.
        plan: says by what they are compared.
        device: where to compute.
        progress: called with (phase, finished blocks, blocks).

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    layout, named = plan.model.layout, plan.recipe.kept
    pieces = {block.index: f"worth of block {block.index}" for block in layout.blocks}
    finished = {index for index, piece in pieces.items() if piece in done}
    for measured in source.blocks(finished, progress):
        found = {
            site.key: _worth(measured, site, plan, device)
            for site in measured.block.sites
            if named is None or site.key not in named.units
        }
        done.put(
            pieces[measured.index],
            done.work / f"worth-{measured.index:05}.safetensors",
            functools.partial(write_tensors, found),
        )
        if progress:
            progress("allocating", measured.index + 1, len(layout.blocks))
    return {
        key: worth
        for piece in pieces.values()
        for key, worth in read_tensors(done.path(piece)).items()
    }


def _worth(measured: Measured, site: Site, plan: Plan, device: torch.device) -> Tensor:
    """Of the units of one site, that of the last one to stay first."""
    gram, weight = measured.grams.pop(site.name), measured.tensors[site.weight].to(device)
    with naming(site.consumer):
        gram.check_finite()
        compare = standardised if plan.recipe.repair.allocation == "adaptive" else error_saved
        return compare(weight, gram, site.units)
