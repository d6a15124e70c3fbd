"""How many units every site keeps (METHODS §1): uniform over blocks so far."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
