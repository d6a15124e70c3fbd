"""The same widths in every block (METHODS §§1, 8), by fractions or for a number of parameters."""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from coec.allocation.kept import KeptUnits
from coec.allocation.widths import Rounding, Widths
from coec.errors import OptionError
from coec.models.layout import Layout, Site
from coec.selection import kept_count

_STEPS = 10_000
"""Fractions that are tried for a number of parameters are whole multiples of one over this."""


@dataclass(frozen=True)
class Shares:
    """Fractions of units that are removed.

    Attributes:
        mlp: of MLP channels, those of experts included.
        attention: of units of attention.
        experts: of whole experts.
        rounding: to what numbers of units are rounded.
    """

    mlp: float
    attention: float
    experts: float
    rounding: Rounding

    def of(self, site: Site) -> float:
        """Return the fraction that is removed at a site."""
        return self.mlp if site.value is None else self.attention


def uniform(
    layout: Layout, shares: Shares, kept: KeptUnits | None = None, *, fewer_blocks: bool = False
) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site and experts of every block, channels rounded up.

    Args:
        layout: where units are.
        shares: the fractions that are removed.
        kept: the units of sites that the user names; these sites keep the same number.
        fewer_blocks: whole blocks are removed, so that nothing else need be.

    Raises:
        OptionError: nothing is removed anywhere.
    """
    counts = {}
    for site in layout.sites:
        named = None if kept is None else kept.units.get(site.key)
        counts[site.block, site.name] = _count(site, shares) if named is None else len(named)
    experts = kept_count(layout.experts, shares.experts) if shares.experts else layout.experts
    widths = Widths(counts, experts if experts < layout.experts else None)
    if fewer_blocks or widths.experts or any(map(widths.removes_from, layout.sites)):
        return widths
    if kept is not None and kept.covers(layout):
        raise OptionError(f"'{kept.source}' keeps every unit of every site: nothing is removed")
    raise OptionError(
        "nothing is removed: "
        + ", ".join(
            f"{shares.of(site):g} of {site.units:,} {site.unit}s, rounded, is none"
            for site in layout.kinds
        )
        + ": raise sparsity, or take a smaller multiple_of"
    )


def shares_for(
    layout: Layout,
    shapes: Mapping[str, torch.Size],
    shares: Shares,
    goal: int,
    *,
    attention: bool,
    kept: KeptUnits | None = None,
    dropped: Collection[int] = (),
) -> Shares | None:
    """Return the smallest common fraction that removes `goal` parameters; None if none does.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        shares: of attention, if it has its own, and of experts.
        goal: how many parameters must go.
        attention: remove the same fraction of attention.
        kept: the units of sites that the user names.
        dropped: blocks that are left out, whose parameters count as removed.
    """

    def at(step: int) -> Shares:
        share = step / _STEPS
        return replace(shares, mlp=share, attention=share if attention else shares.attention)

    def removed(step: int) -> int:
        return uniform(layout, at(step), kept, fewer_blocks=True).removed(layout, shapes, dropped)

    # What goes never falls as the fraction rises: bisection finds the first that is enough.
    steps = range(1, _STEPS)
    first = bisect_left(steps, goal, key=removed)
    return at(steps[first]) if first < len(steps) else None


def _count(site: Site, shares: Shares) -> int:
    """Return how many units of a site are kept by its fraction, rounded."""
    if not (removed := shares.of(site)):
        return site.units
    by_fraction = site.ranges * kept_count(site.units // site.ranges, removed)
    return shares.rounding.up(site, by_fraction)
