"""How many units every site keeps (METHODS §§1, 8): uniform over blocks so far."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.errors import OptionError
from coec.models.layout import Layout, Site
from coec.selection import kept_count


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

    def everywhere(self, name: str) -> int:
        """The one width of a kind of site.

        Raises:
            OptionError: it differs from block to block, which no stock format holds.
        """
        widths = {kept for (_, kind), kept in self.kept.items() if kind == name}
        if len(widths) != 1:
            raise OptionError(
                f"the widths of {name} differ by block ({min(widths)} to {max(widths)}): no stock "
                "format holds that; keep as many units in every block"
            )
        return widths.pop()


def uniform(layout: Layout, sparsity: float) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site.

    Raises:
        OptionError: nothing goes anywhere.
    """
    widths = Widths({(s.block, s.name): kept_count(s.units, sparsity) for s in layout.sites})
    if not any(widths.removes_from(site) for site in layout.kinds):
        counts = " and ".join(f"{site.units:,} {site.unit}s" for site in layout.kinds)
        most = max(site.units for site in layout.kinds)
        least = f"{math.ceil(10**6 / most) / 10**6:g}"
        advice = (
            f"the smallest that removes something is {least}"
            if most > 1
            else "this model cannot be pruned"
        )
        raise OptionError(f"sparsity {sparsity:g} removes nothing from {counts}: {advice}")
    return widths


def whole_attention(layout: Layout, shapes: Mapping[str, torch.Size], sparsity: float) -> Widths:
    """All units behind attention stay; the other sites give as many parameters as `uniform` takes.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        sparsity: the fraction that `uniform` removes.

    Raises:
        OptionError: the other sites have too few.
    """
    widths = uniform(layout, sparsity)
    kept: dict[tuple[int, str], int] = {}
    for block in layout.blocks:
        spared = 0
        for site in block.sites:
            if site.value is not None:
                spared += (site.units - widths.of(site)) * _parameters(site, shapes)
                kept[site.block, site.name] = site.units
        paying = [site for site in block.sites if site.value is None]
        for site in paying:
            less = math.ceil(spared / len(paying) / _parameters(site, shapes))
            if less >= widths.of(site):
                raise OptionError(
                    f"sparsity {sparsity:g} with kv_groups = all leaves no {site.unit}s: remove "
                    "less, or keep kv_groups = uniform"
                )
            kept[site.block, site.name] = widths.of(site) - less
    return Widths(kept)


def _parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (one.stop - one.start) // site.units * shapes[one.tensor][1:].numel()
        for one in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]
