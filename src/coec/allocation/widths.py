"""Widths as values, and what they come to."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.models.layout import Layout, Site


@dataclass(frozen=True)
class Widths:
    """Number of units that every site keeps.

    Attributes:
        kept: by the index of the block and the name of the site.
    """

    kept: Mapping[tuple[int, str], int]

    def of(self, site: Site) -> int:
        """Return how many units a site keeps."""
        return self.kept[site.block, site.name]

    def removes_from(self, site: Site) -> bool:
        """Return whether anything is removed at a site."""
        return self.of(site) < site.units

    def everywhere(self, name: str) -> tuple[int, ...]:
        """The widths of a kind of site, one for each block."""
        return tuple(
            kept for (_, site_kind), kept in sorted(self.kept.items()) if site_kind == name
        )

    def removed(self, layout: Layout, shapes: Mapping[str, torch.Size]) -> int:
        """Return how many parameters of the dense model are removed."""
        return sum((s.units - self.of(s)) * parameters(s, shapes) for s in layout.sites)


def parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Return the parameters of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (rows.stop - rows.start) // site.units * shapes[rows.tensor][1:].numel()
        for rows in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]
