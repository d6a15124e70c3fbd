"""Widths: the units that every site keeps, the same in every block (METHODS §§1, 8); rounding."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from coec.errors import OptionError
from coec.methods.selection import kept_count
from coec.models.description import Description
from coec.models.layout import BlockLayout, Layout, Site
from coec.planning.kept import KeptUnits

MULTIPLES = (256, 128, 64, 32)
"""`multiple_of = auto` chooses from these: blocks of K-quants, tensor cores and Q8_0."""
OF_EXPERTS = 8
"""Divisor of the channels that experts keep: transformers runs all experts at once, which takes
rows of a multiple of 16 bytes and fails on others."""
MOST_ADDED = 0.03
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

    def removed(self, costs: "Costs", dropped: Collection[int] = ()) -> int:
        """Return how much of the dense model's size is removed; all of the `dropped` blocks."""
        removed = 0.0
        for block in costs.model.layout.blocks:
            if block.index in dropped:
                removed += costs.block(block)
                continue
            for site in block.sites:
                # A token passes the same number of experts, however many stay.
                kept = self.of(site) if self.stays(site) or costs.active else 0
                removed += (site.units - kept) * costs.unit(site) * costs.passed(site)
            if self.experts is None:
                continue
            # An expert's rows of the router go with it.
            for rows in block.router:
                row = costs.model.shapes[rows.tensor].numel() // rows.stop
                removed += (rows.stop - self.experts) * row
        return round(removed)


@dataclass(frozen=True)
class Costs:
    """Size of units and blocks: parameters, and the keys and values of `context` tokens.

    If `active`, only the parameters that one token passes count. The vocabulary has so many `rows`
    more than the dense one, a negative number if it is cut.
    """

    model: Description
    context: int = 0
    active: bool = False
    rows: int = 0

    @property
    def whole(self) -> int:
        """The size of the dense model, with the vocabulary of the result."""
        row = self.model.vocabulary_parameters // self.model.vocabulary
        count = self.count(self.model.shapes, self.model.shape.experts)
        return count + self.rows * row + self.context * self.model.cached()

    def count(self, shapes: Mapping[str, torch.Size], experts: int) -> int:
        """Return the parameters of tensors that count, of a model with so many experts."""
        total = sum(shape.numel() for shape in shapes.values())
        if not self.active or not experts:
            return total
        inside = sum(shape.numel() for name, shape in shapes.items() if ".experts." in name)
        return total - inside + inside * self.model.chosen // experts

    def passed(self, site: Site) -> float:
        """Return the share of a site's units that count: of experts, if `active`, the chosen."""
        experts = self.model.shape.experts
        return self.model.chosen / experts if self.active and site.routed and experts else 1.0

    def unit(self, site: Site) -> int:
        """The size of one unit."""
        cached = self.model.cached_by_unit(site)
        return parameters(site, self.model.shapes) + self.context * cached

    def block(self, block: BlockLayout) -> int:
        """The size of a whole block."""
        shapes = {n: size for n, size in self.model.shapes.items() if n.startswith(block.prefix)}
        inside = self.count(shapes, self.model.shape.experts)
        return inside + self.context * self.model.cached([block.index])


def parameters_inside(block: BlockLayout, shapes: Mapping[str, torch.Size]) -> int:
    """Return the parameters of a whole block."""
    return sum(size.numel() for name, size in shapes.items() if name.startswith(block.prefix))


def parameters(site: Site, shapes: Mapping[str, torch.Size]) -> int:
    """Return the parameters of one unit: rows of its producers, columns of its consumer."""
    rows = sum(
        rows.count // site.units * shapes[rows.tensor][1:].numel() for rows in site.producers
    )
    return rows + site.columns_per_unit * shapes[site.weight][0]


@dataclass(frozen=True)
class Rounding:
    """To what numbers of units are rounded.

    Attributes:
        multiple: of channels; None chooses the largest of MULTIPLES that adds little.
        gpus: number over which servers shall be able to divide every layer.
    """

    multiple: int | None
    gpus: int = 1

    def up(self, site: Site, kept: int) -> int:
        """Round a number of units up, at most to what can be divided of all.

        KV groups stay as they are counted, query heads with the same number in each group, unless
        several GPUs are to divide them. Raises OptionError where no number can be divided.
        """
        if site.value is not None:
            first, step = _up(kept, site.ranges), site.ranges
            upward, downward = range(first, site.units + 1, step), range(first - step, 0, -step)
            for count in itertools.chain(upward, downward):
                if self._divides_heads(site, count):
                    return count
            raise OptionError(
                f"tensor_parallel = {self.gpus} divides no number of {site.unit}s up to "
                f"{site.units}: take a divisor of that"
            )
        least = _of_site(site, self.gpus)
        whole = site.units if site.units % self.gpus == 0 else site.units // least * least
        if kept >= whole:
            return whole
        if self.multiple is not None:
            return min(_up(kept, _of_site(site, math.lcm(self.multiple, self.gpus))), whole)
        most = min(kept * (1 + MOST_ADDED), whole)
        rounded = (_up(kept, _of_site(site, n * self.gpus)) for n in MULTIPLES)
        return next((n for n in rounded if n <= most), min(_up(kept, least), whole))

    def _divides_heads(self, site: Site, count: int) -> bool:
        """Tell whether the query heads can be divided, and KV heads divided or repeated, evenly."""
        kv_heads = site.groups or count
        heads = count if site.groups else count * site.group
        evenly = kv_heads % self.gpus == 0 or self.gpus % kv_heads == 0
        return heads % self.gpus == 0 and evenly


def _of_site(site: Site, multiple: int) -> int:
    return math.lcm(multiple, OF_EXPERTS) if site.as_experts else multiple


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


_STEPS = 10_000
"""Fractions that are tried for a number of parameters are whole multiples of one over this."""


@dataclass(frozen=True)
class Shares:
    """Fractions of units that are removed.

    Attributes:
        mlp: of MLP channels, including channels of experts.
        attention: of units of attention.
        experts: of whole experts.
        rounding: to what numbers of units are rounded.
        expert_groups: number of groups of experts, each of which keeps the same number.
    """

    mlp: float
    attention: float
    experts: float
    rounding: Rounding
    expert_groups: int = 1

    def of(self, site: Site) -> float:
        """Return the fraction that is removed at a site."""
        return self.mlp if site.value is None else self.attention


def uniform(
    layout: Layout, shares: Shares, kept: KeptUnits | None = None, *, elsewhere: bool = False
) -> Widths:
    """`⌈(1 − ρ) n⌉` units of every site and experts of every block, channels rounded up.

    Args:
        layout: where units are.
        shares: the fractions that are removed.
        kept: the units of sites that the user names; these sites keep the same number.
        elsewhere: something else than units is removed, so that no unit need be.

    Raises:
        OptionError: nothing is removed anywhere.
    """
    counts = {}
    for site in layout.sites:
        named = None if kept is None else kept.count(site)
        counts[site.block, site.name] = _count(site, shares) if named is None else named
    experts, groups = layout.experts, shares.expert_groups
    if shares.experts:  # of every group that a router chooses among
        experts = groups * kept_count(experts // groups, shares.experts)
    widths = Widths(counts, experts if experts < layout.experts else None)
    if elsewhere or widths.experts or any(map(widths.removes_from, layout.sites)):
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
    costs: Costs,
    shares: Shares,
    goal: int,
    *,
    attention: bool,
    kept: KeptUnits | None = None,
    dropped: Collection[int] = (),
) -> Shares | None:
    """Return the smallest common fraction that removes `goal` of the size; None if none does.

    Args:
        costs: the sizes of units and blocks.
        shares: of attention, if it has its own, and of experts.
        goal: size to remove.
        attention: remove the same fraction of attention.
        kept: the units of sites that the user names.
        dropped: blocks that are left out, whose size counts as removed.
    """

    def at(step: int) -> Shares:
        share = step / _STEPS
        return replace(shares, mlp=share, attention=share if attention else shares.attention)

    def removed(step: int) -> int:
        widths = uniform(costs.model.layout, at(step), kept, elsewhere=True)
        return widths.removed(costs, dropped)

    # The removed count never falls as the fraction rises: bisection finds the first sufficient one.
    steps = range(1, _STEPS)
    first = bisect_left(steps, goal, key=removed)
    return at(steps[first]) if first < len(steps) else None


def _count(site: Site, shares: Shares) -> int:
    """Return how many units of a site are kept by its fraction, rounded."""
    if not (removed := shares.of(site)):
        return site.units
    by_fraction = site.ranges * kept_count(site.units // site.ranges, removed)
    return shares.rounding.up(site, by_fraction)
