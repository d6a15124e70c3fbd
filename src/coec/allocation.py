"""How many units every site keeps (METHODS §§1, 8): uniform over blocks so far.

Channels are rounded up where that is asked for: what reads a width in blocks, as quantisers and
tensor cores do, falls back to something larger or slower where the last block is not full.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.errors import OptionError
from coec.models.layout import Layout, Site
from coec.selection import kept_count
from coec.settings import Repair

MULTIPLES = (256, 128, 64, 32)
"""Among which `align = auto` chooses: blocks of K-quants, tiles of tensor cores, blocks of Q8_0."""
MOST_ADDED = 0.02
"""Of the kept channels, that it may add."""


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


def uniform(layout: Layout, repair: Repair) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site, channels rounded up to a multiple.

    Raises:
        OptionError: nothing goes anywhere.
    """
    kept = {}
    for site in layout.sites:
        removed = repair.removed(site.name)
        count = kept_count(site.units, removed) if removed else site.units
        kept[site.block, site.name] = _aligned(site, count, repair.multiple)
    widths = Widths(kept)
    if not any(widths.removes_from(site) for site in layout.kinds):
        raise _nothing_goes(layout, repair)
    return widths


def _nothing_goes(layout: Layout, repair: Repair) -> OptionError:
    counts = " and ".join(f"{site.units:,} {site.unit}s" for site in layout.kinds)
    asked = {site.name: repair.removed(site.name) for site in layout.kinds}
    if len(set(asked.values())) > 1 or repair.align != "1":
        shares = ", ".join(f"{share:g} of {name}" for name, share in asked.items())
        return OptionError(
            f"removing {shares} with align = {repair.align} removes nothing from {counts}: remove "
            "more, or align to a smaller multiple"
        )
    most = max(site.units for site in layout.kinds)
    least = f"{math.ceil(10**6 / most) / 10**6:g}"
    advice = (
        f"the smallest that removes something is {least}"
        if most > 1
        else "this model cannot be pruned"
    )
    [sparsity] = set(asked.values())
    return OptionError(f"sparsity {sparsity:g} removes nothing from {counts}: {advice}")


def whole_attention(layout: Layout, shapes: Mapping[str, torch.Size], repair: Repair) -> Widths:
    """All units behind attention stay; the other sites give as many parameters as `uniform` takes.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        repair: the fractions that `uniform` removes, and to what channels are rounded.

    Raises:
        OptionError: the other sites have too few.
    """
    widths = uniform(layout, repair)
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
                    f"sparsity {repair.sparsity:g} with kv_groups = all leaves no {site.unit}s: "
                    "remove less, or keep kv_groups = uniform"
                )
            left = widths.of(site) - less
            kept[site.block, site.name] = _aligned(site, left, repair.multiple) if less else left
    return Widths(kept)


def _aligned(site: Site, kept: int, multiple: int | None) -> int:
    """The next multiple, at most all; None chooses it. KV groups stay as they are counted."""
    if site.value is not None or kept == site.units:
        return kept
    if multiple is None:
        fits = (n for n in MULTIPLES if _up(kept, n) <= min(kept * (1 + MOST_ADDED), site.units))
        multiple = next(fits, 1)
    return min(_up(kept, multiple), site.units)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (one.stop - one.start) // site.units * shapes[one.tensor][1:].numel()
        for one in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]
