"""Widths as values, and what they come to."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.models.layout import Layout, Site


@dataclass(frozen=True)
class Widths:
    """How many units every site keeps.

    Attributes:
        kept: by the index of the block and the name of the site.
    """

    kept: Mapping[tuple[int, str], int]

    def of(self, site: Site) -> int:
        """How many units a site keeps."""
        return self.kept[site.block, site.name]

    def removes_from(self, site: Site) -> bool:
        """Whether anything goes at a site."""
        return self.of(site) < site.units

    def everywhere(self, name: str) -> tuple[int, ...]:
        """The widths of a kind of site, one for each block."""
        return tuple(kept for (_, kind), kept in sorted(self.kept.items()) if kind == name)

    def removed(self, layout: Layout, shapes: Mapping[str, torch.Size]) -> int:
        """How many parameters of the dense model go."""
        return sum((s.units - self.of(s)) * parameters(s, shapes) for s in layout.sites)


def parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (one.stop - one.start) // site.units * shapes[one.tensor][1:].numel()
        for one in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]
