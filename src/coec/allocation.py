"""How many units every site keeps (METHODS §§1, 8): uniform over blocks so far."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.errors import OptionError
from coec.kept import KeptUnits
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


def uniform(layout: Layout, sparsity: float, kept: KeptUnits | None = None) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site, but of those as many as are kept that somebody names.

    Raises:
        OptionError: nothing goes anywhere.
    """
    widths = Widths({(s.block, s.name): _kept(s, sparsity, kept) for s in layout.sites})
    if not any(widths.removes_from(site) for site in layout.sites):
        raise _nothing_removed(layout, sparsity, kept)
    return widths


def _nothing_removed(layout: Layout, sparsity: float, kept: KeptUnits | None) -> OptionError:
    if kept is not None:
        rest = "" if kept.covers(layout) else f", and sparsity {sparsity:g} removes none elsewhere"
        return OptionError(
            f"'{kept.source}' keeps every unit of the sites that it names{rest}: nothing would go"
        )
    counts = " and ".join(f"{site.units:,} {site.unit}s" for site in layout.kinds)
    most = max(site.units for site in layout.kinds)
    least = f"{math.ceil(10**6 / most) / 10**6:g}"
    advice = (
        f"the smallest that removes something is {least}"
        if most > 1
        else "this model cannot be pruned"
    )
    return OptionError(f"sparsity {sparsity:g} removes nothing from {counts}: {advice}")


def whole_attention(
    layout: Layout,
    shapes: Mapping[str, torch.Size],
    sparsity: float,
    given: KeptUnits | None = None,
) -> Widths:
    """All units behind attention stay; the other sites give as many parameters as `uniform` takes.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        sparsity: the fraction that `uniform` removes.
        given: the units of sites that somebody names.

    Raises:
        OptionError: the other sites have too few, or what is given says otherwise.
    """
    widths = uniform(layout, sparsity, given)
    kept: dict[tuple[int, str], int] = dict(widths.kept)
    for block in layout.blocks:
        spared = 0
        for site in block.sites:
            if site.value is not None:
                _check_whole(site, widths, given)
                spared += (site.units - kept_count(site.units, sparsity)) * _parameters(
                    site, shapes
                )
                kept[site.block, site.name] = site.units
        paying = [s for s in block.sites if s.value is None and not _names(given, s)]
        if spared and not paying and not all(_names(given, site) for site in block.sites):
            assert given is not None
            raise OptionError(
                f"kv_groups = all keeps KV groups at the cost of other units, which "
                f"'{given.source}' names in block {block.index}: leave one of the two out"
            )
        for site in paying:
            less = math.ceil(spared / len(paying) / _parameters(site, shapes))
            if less >= widths.of(site):
                raise OptionError(
                    f"sparsity {sparsity:g} with kv_groups = all leaves no {site.unit}s: remove "
                    "less, or keep kv_groups = uniform"
                )
            kept[site.block, site.name] = widths.of(site) - less
    return Widths(kept)


def _names(given: KeptUnits | None, site: Site) -> bool:
    return given is not None and site.key in given.units


def _kept(site: Site, sparsity: float, given: KeptUnits | None) -> int:
    if given is not None and site.key in given.units:
        return len(given.units[site.key])
    return kept_count(site.units, sparsity)


def _check_whole(site: Site, widths: Widths, given: KeptUnits | None) -> None:
    """Raises OptionError where less than all of a site was given."""
    if given is not None and site.key in given.units and widths.removes_from(site):
        raise OptionError(
            f"kv_groups = all keeps every {site.unit}, '{given.source}' {widths.of(site)} of "
            f"{site.units} in {site.key}: leave one of the two out"
        )


def _parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (one.stop - one.start) // site.units * shapes[one.tensor][1:].numel()
        for one in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]
