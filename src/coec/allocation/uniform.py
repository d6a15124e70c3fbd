"""The same widths in every block (METHODS §§1, 8), by fractions or for a number of parameters."""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from coec.allocation.kept import KeptUnits
from coec.allocation.widths import OF_EXPERTS, Rounding, Widths, parameters
from coec.errors import OptionError
from coec.models.layout import Layout, Site
from coec.selection import kept_count
from coec.settings import Pruning

_STEPS = 10_000
"""Fractions that are tried for a number of parameters are whole multiples of one over this."""


def uniform(layout: Layout, pruning: Pruning, named_units: KeptUnits | None = None) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site and experts of every block, channels rounded up.

    Args:
        layout: where units are.
        pruning: the fractions that go, and to what channels are rounded.
        named_units: the units of sites that the user names, which keep as many as these.

    Raises:
        OptionError: nothing goes anywhere.
    """
    kept = {}
    for site in layout.sites:
        count = _counted(site, pruning)
        named_count = None if named_units is None else named_units.units.get(site.key)
        kept[site.block, site.name] = count if named_count is None else len(named_count)
    widths = Widths(kept, _expert_count(layout, pruning))
    removes = any(widths.removes_from(site) for site in layout.sites) or pruning.drop_blocks
    if widths.experts is None and not removes:
        raise _nothing_goes(layout, pruning, named_units)
    return widths


def shares_for(
    layout: Layout,
    shapes: Mapping[str, torch.Size],
    pruning: Pruning,
    goal: int,
    named_units: KeptUnits | None = None,
    dropped: Collection[int] = (),
) -> Pruning:
    """Return the settings with the smallest common fraction that removes `goal` parameters.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        pruning: says which kinds of sites have fractions of their own, and what channels are
            rounded to.
        goal: how many parameters must go.
        named_units: the units of sites that the user names.
        dropped: blocks that are left out, whose parameters count as removed.

    Raises:
        OptionError: fewer than that go, however large the fraction.
    """

    def removed(step: int) -> int:
        try:
            widths = uniform(layout, replace(pruning, sparsity=step / _STEPS), named_units)
        except OptionError:  # nothing goes
            return 0
        return widths.removed(layout, shapes, dropped)

    if removed(_STEPS - 1) < goal:
        parameters_left = sum(size.numel() for size in shapes.values()) - removed(_STEPS - 1)
        rounded = _rounded(pruning)
        raise OptionError(
            f"{pruning.budget}{rounded} cannot be met: "
            f"{parameters_left:,} parameters are left however much is removed; allow more"
            + (", or take a smaller multiple" if rounded else "")
        )
    # What goes never falls as the fraction rises: bisection finds the first that is enough.
    steps = range(1, _STEPS)
    first = bisect_left(steps, goal, key=removed)
    return replace(pruning, sparsity=steps[first] / _STEPS)


def _rounded(pruning: Pruning) -> str:
    """Return the setting that rounds channels, in words; "" for `auto`, which adds little."""
    return "" if pruning.multiple in (1, None) else f" with multiple_of = {pruning.multiple_of}"


def _nothing_goes(layout: Layout, pruning: Pruning, named_units: KeptUnits | None) -> OptionError:
    counts = " and ".join(f"{site.units:,} {site.unit}s" for site in layout.kinds)
    shares_by_kind = {site.kind: pruning.removed(site.kind) for site in layout.kinds}
    shares = ", ".join(f"{share:g} of {name}" for name, share in shares_by_kind.items())
    if pruning.expert_sparsity:
        shares += f", {pruning.expert_sparsity:g} of {layout.experts} experts"
    if named_units is not None:
        elsewhere = f", and removing {shares} takes none elsewhere"
        if named_units.covers(layout):
            elsewhere = ""
        return OptionError(
            f"'{named_units.source}' keeps every unit of the sites that it names{elsewhere}: "
            "nothing would go"
        )
    own_shares = (pruning.attention_sparsity, pruning.mlp_sparsity) != (None, None)
    rounded = _rounded(pruning)
    if own_shares or rounded:
        return OptionError(
            f"removing {shares}{rounded} takes nothing from {counts}: remove more"
            + (", or take a smaller multiple" if rounded else "")
        )
    advice = "this model cannot be pruned"
    if shares_that_remove := [
        1 - fewer / site.units for site in layout.kinds if (fewer := _next_fewer(site))
    ]:
        # Rounded up at the sixth digit, so that the number named does remove a unit.
        smallest = math.ceil(10**6 * min(shares_that_remove) - 1e-6) / 10**6
        advice = f"the smallest that removes something is {smallest:g}"
        if any(site.as_experts for site in layout.kinds):
            advice += f" (channels of experts go by {OF_EXPERTS})"
    [sparsity] = set(shares_by_kind.values())
    return OptionError(f"sparsity {sparsity:g} removes nothing from {counts}: {advice}")


def _next_fewer(site: Site) -> int:
    """Return the largest number of units, less than all, that a site may keep; 0 for none."""
    if site.value is not None:
        return site.units - site.ranges
    return Rounding(1).down(site, site.units - 1)


def whole_attention(
    layout: Layout,
    shapes: Mapping[str, torch.Size],
    pruning: Pruning,
    named_units: KeptUnits | None = None,
) -> Widths:
    """Return widths that keep all of attention and remove as many parameters as `uniform` does.

    Channels are rounded down here, so that the result is never the larger of the two.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        pruning: the fractions that `uniform` removes, and to what channels are rounded.
        named_units: the units of sites that the user names.

    Raises:
        OptionError: the other sites have too few, or what is given says otherwise.
    """
    widths = uniform(layout, pruning, named_units)
    kept: dict[tuple[int, str], int] = dict(widths.kept)
    for block in layout.blocks:
        spared = 0
        for site in block.sites:
            if site.value is not None:
                _check_whole(site, widths, named_units)
                # Parameters that `uniform` would take from attention, block by block
                taken = site.units - _counted(site, pruning)
                spared += taken * parameters(site, shapes)
                kept[site.block, site.name] = site.units
        paying = [s for s in block.sites if s.value is None and not _names(named_units, s)]
        if spared and not paying and not all(_names(named_units, site) for site in block.sites):
            assert named_units is not None
            raise OptionError(
                f"kv_groups = all keeps KV groups at the cost of other units, which "
                f"'{named_units.source}' names in block {block.index}: leave one of the two out"
            )
        # The block's other sites pay in equal parts; those of experts that go do not count.
        payers = sum(map(widths.stays, paying))
        for site in paying:
            less = math.ceil(spared / payers / parameters(site, shapes))
            if less >= widths.of(site):
                wanted_share = pruning.budget or f"sparsity {pruning.sparsity:g}"
                raise OptionError(
                    f"{wanted_share} with kv_groups = all leaves no {site.unit}s: "
                    "remove less, or keep kv_groups = uniform"
                )
            count = widths.of(site)
            if less:
                count = Rounding.of(pruning).down(site, count - less)
            if not count:
                raise OptionError(
                    f"kv_groups = all leaves fewer {site.unit}s than multiple_of = "
                    f"{pruning.multiple_of}: take a smaller multiple, or keep kv_groups = uniform"
                )
            kept[site.block, site.name] = count
    return Widths(kept, widths.experts)


def _expert_count(layout: Layout, pruning: Pruning) -> int | None:
    """Return how many experts stay in a block; None where all do."""
    if not (layout.experts and pruning.expert_sparsity):
        return None
    count = kept_count(layout.experts, pruning.expert_sparsity)
    return count if count < layout.experts else None


def _counted(site: Site, pruning: Pruning) -> int:
    """Return how many units of a site stay by its fraction, rounded; all where nothing is to go."""
    if not (removed := pruning.removed(site.kind)):
        return site.units
    by_fraction = site.ranges * kept_count(site.units // site.ranges, removed)
    return Rounding.of(pruning).up(site, by_fraction)


def _names(named_units: KeptUnits | None, site: Site) -> bool:
    return named_units is not None and site.key in named_units.units


def _check_whole(site: Site, widths: Widths, named_units: KeptUnits | None) -> None:
    """Raises OptionError where less than all of a site was given."""
    if named_units is not None and _names(named_units, site) and widths.removes_from(site):
        raise OptionError(
            f"kv_groups = all keeps every {site.unit}, '{named_units.source}' {widths.of(site)} of "
            f"{site.units} in {site.key}: leave one of the two out"
        )
