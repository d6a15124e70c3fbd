"""Widths: the units that every site keeps, what that removes, and to what they are rounded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.models.layout import Layout, Site

MULTIPLES = (256, 128, 64, 32)
"""`multiple_of = auto` chooses from these: blocks of K-quants, tensor cores and Q8_0."""
OF_EXPERTS = 8
"""Divisor of the channels that experts keep: transformers runs all experts at once, which takes
rows of a multiple of 16 bytes and fails on others."""
MOST_ADDED = 0.02
"""Share of the kept channels that `auto` may add."""


@dataclass(frozen=True)
class Widths:
    """Number of units that every site keeps.

    Attributes:
        kept: by the index of the block and the name of the site.
        experts: number of experts that every block with experts keeps; None where all stay.
    """

    kept: Mapping[tuple[int, str], int]
    experts: int | None = None

    def of(self, site: Site) -> int:
        """Return how many units a site keeps."""
        return self.kept[site.block, site.name]

    def removes_from(self, site: Site) -> bool:
        """Return whether anything is removed at a site."""
        return self.of(site) < site.units

    def stays(self, site: Site) -> bool:
        """Return whether a site stays, as if the last experts went; scores decide which do."""
        return self.experts is None or site.expert is None or site.expert < self.experts

    def everywhere(self, name: str) -> tuple[int, ...]:
        """The widths of a kind of site, one for each block."""
        return tuple(kept for (_, site), kept in sorted(self.kept.items()) if site == name)

    def removed(self, layout: Layout, shapes: Mapping[str, torch.Size]) -> int:
        """Return how many parameters of the dense model are removed."""
        removed = 0
        for site in layout.sites:
            kept = self.of(site) if self.stays(site) else 0
            removed += (site.units - kept) * parameters(site, shapes)
        # An expert's row of the router goes with it.
        for block in layout.blocks:
            if self.experts is not None and (router := block.router) is not None:
                removed += (router.stop - self.experts) * shapes[router.tensor][1]
        return removed


def parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Return the parameters of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (rows.stop - rows.start) // site.units * shapes[rows.tensor][1:].numel()
        for rows in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]


def aligned(site: Site, kept: int, multiple: int | None) -> int:
    """Round a number of channels up to a multiple, at most all; None chooses the multiple.

    KV groups stay as they are counted, query heads as many in each group.
    """
    if site.value is not None or kept == site.units:
        return _up(kept, site.ranges)
    if multiple is None:
        fits = (n for n in MULTIPLES if _up(kept, n) <= min(kept * (1 + MOST_ADDED), site.units))
        multiple = next(fits, 1)
    return min(_up(kept, _of_site(site, multiple)), site.units)


def aligned_down(site: Site, count: int, multiple: int | None) -> int:
    """Round a number down to a multiple, as `aligned` rounds up; None chooses the multiple."""
    if multiple is None:
        fits = (n for n in MULTIPLES if count // n * n >= count * (1 - MOST_ADDED))
        multiple = next(fits, 1)
    multiple = _of_site(site, multiple)
    return count // multiple * multiple


def _of_site(site: Site, multiple: int) -> int:
    return math.lcm(multiple, OF_EXPERTS) if site.as_experts else multiple


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
