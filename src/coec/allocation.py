"""How many units every site keeps (METHODS §§1, 8): uniform over blocks so far.

Channels are rounded up where that is asked for: what reads a width in blocks, as quantisers and
tensor cores do, falls back to something larger or slower where the last block is not full.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coec.errors import OptionError
from coec.kept import KeptUnits
from coec.models.layout import Layout, Site
from coec.selection import kept_count
from coec.settings import Repair

MULTIPLES = (256, 128, 64, 32)
"""Among which `align = auto` chooses: blocks of K-quants, tiles of tensor cores, blocks of Q8_0."""
OF_EXPERTS = 8
"""What divides the channels that experts keep: transformers runs all experts at once, which takes
rows of a multiple of 16 bytes and fails on others."""
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
        sites = self.kept.items()
        widths = {kept for (_, site), kept in sites if site.partition(".")[0] == name}
        if len(widths) != 1:
            raise OptionError(
                f"the widths of {name} differ by block ({min(widths)} to {max(widths)}): no stock "
                "format holds that; keep as many units in every block"
            )
        return widths.pop()


def uniform(layout: Layout, repair: Repair, given: KeptUnits | None = None) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site, channels rounded up to a multiple.

    Args:
        layout: where units are.
        repair: the fractions that go, and to what channels are rounded.
        given: the units of sites that somebody names, which keep as many as these.

    Raises:
        OptionError: nothing goes anywhere.
    """
    kept = {}
    for site in layout.sites:
        count = _aligned(site, _by_rule(site, repair), repair.multiple)
        named = None if given is None else given.units.get(site.key)
        kept[site.block, site.name] = count if named is None else len(named)
    widths = Widths(kept)
    if not any(widths.removes_from(site) for site in layout.sites):
        raise _nothing_goes(layout, repair, given)
    return widths


def _nothing_goes(layout: Layout, repair: Repair, given: KeptUnits | None) -> OptionError:
    counts = " and ".join(f"{site.units:,} {site.unit}s" for site in layout.kinds)
    asked = {site.kind: repair.removed(site.kind) for site in layout.kinds}
    shares = ", ".join(f"{share:g} of {name}" for name, share in asked.items())
    if given is not None:
        rest = "" if given.covers(layout) else f", and removing {shares} takes none elsewhere"
        return OptionError(
            f"'{given.source}' keeps every unit of the sites that it names{rest}: nothing would go"
        )
    own = (repair.attention_sparsity, repair.mlp_sparsity) != (None, None)
    if own or repair.align != "1":
        aligned = "" if repair.align == "1" else f" with align = {repair.align}"
        return OptionError(
            f"removing {shares}{aligned} takes nothing from {counts}: remove more"
            + (", or align to a smaller multiple" if aligned else "")
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


def whole_attention(
    layout: Layout,
    shapes: Mapping[str, torch.Size],
    repair: Repair,
    given: KeptUnits | None = None,
) -> Widths:
    """All units behind attention stay; the other sites give as many parameters as `uniform` takes.

    Channels are rounded down here, so that the result is never the larger of the two.

    Args:
        layout: where units are.
        shapes: of the dense model's tensors, by name.
        repair: the fractions that `uniform` removes, and to what channels are rounded.
        given: the units of sites that somebody names.

    Raises:
        OptionError: the other sites have too few, or what is given says otherwise.
    """
    widths = uniform(layout, repair, given)
    kept: dict[tuple[int, str], int] = dict(widths.kept)
    for block in layout.blocks:
        spared = 0
        for site in block.sites:
            if site.value is not None:
                _check_whole(site, widths, given)
                spared += (site.units - _by_rule(site, repair)) * _parameters(site, shapes)
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
                    f"sparsity {repair.sparsity:g} with kv_groups = all leaves no {site.unit}s: "
                    "remove less, or keep kv_groups = uniform"
                )
            left = widths.of(site)
            if less:
                left = _down(left - less, repair.multiple)
                left = left // OF_EXPERTS * OF_EXPERTS if site.routed else left
            if not left:
                raise OptionError(
                    f"kv_groups = all leaves fewer {site.unit}s than align = {repair.align}: align "
                    "to a smaller multiple, or keep kv_groups = uniform"
                )
            kept[site.block, site.name] = left
    return Widths(kept)


def _by_rule(site: Site, repair: Repair) -> int:
    """How many units of a site stay by its fraction alone."""
    removed = repair.removed(site.kind)
    return kept_count(site.units, removed) if removed else site.units


def _names(given: KeptUnits | None, site: Site) -> bool:
    return given is not None and site.key in given.units


def _check_whole(site: Site, widths: Widths, given: KeptUnits | None) -> None:
    """Raises OptionError where less than all of a site was given."""
    if given is not None and _names(given, site) and widths.removes_from(site):
        raise OptionError(
            f"kv_groups = all keeps every {site.unit}, '{given.source}' {widths.of(site)} of "
            f"{site.units} in {site.key}: leave one of the two out"
        )


def _aligned(site: Site, kept: int, multiple: int | None) -> int:
    """The next multiple, at most all; None chooses it. KV groups stay as they are counted."""
    if site.value is not None or kept == site.units:
        return kept
    if multiple is None:
        fits = (n for n in MULTIPLES if _up(kept, n) <= min(kept * (1 + MOST_ADDED), site.units))
        multiple = next(fits, 1)
    if site.routed:
        multiple = math.lcm(multiple, OF_EXPERTS)
    return min(_up(kept, multiple), site.units)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _down(count: int, multiple: int | None) -> int:
    """The multiple before, or the number itself; None chooses it."""
    if multiple is None:
        fits = (n for n in MULTIPLES if count // n * n >= count * (1 - MOST_ADDED))
        multiple = next(fits, 1)
    return count // multiple * multiple


def _parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        (one.stop - one.start) // site.units * shapes[one.tensor][1:].numel()
        for one in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]
