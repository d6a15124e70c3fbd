"""Widths by block: units are kept where they are worth most (METHODS §10)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.methods.elimination import removal_path
from coec.models.layout import Site
from coec.planning.widths import Costs, Rounding, Widths
from coec.types import Gram, KeptSet

Importances = Mapping[str, Float[Tensor, " units"]]
"""Importances of a site's units, by `Site.key`; first that of the unit which goes last."""


def by_importance(
    costs: Costs,
    start: Widths,
    importances: Importances,
    rounding: Rounding,
    apart: frozenset[str] = frozenset(),
    spare: int = 0,
) -> Widths:
    """Return the widths that keep the most important units, within the size of `start`.

    All units are ranked, and one place in the ranking separates kept units from removed units.
    Every site keeps at least one. The size that remains after that place is spent on the next
    units that fit.

    Args:
        costs: the sizes of the dense model's units.
        start: widths whose size is shared out.
        importances: of the sites that share it; the other sites keep their widths.
        rounding: to what numbers of units widths are rounded up.
        apart: kinds of sites that share their own size only.
        spare: additional size that may stay, at the other kinds.
    """
    kept = dict(start.kept)
    pools: dict[str, list[Site]] = {}
    for site in costs.model.layout.sites:
        if site.key in importances:
            pools.setdefault(site.kind if site.kind in apart else "", []).append(site)
    # Kinds of sites in `apart` share their own size; all others one budget, with `spare`.
    for name, sites in pools.items():
        prices = [costs.unit(site) for site in sites]
        budget = sum(price * start.of(site) for price, site in zip(prices, sites, strict=True))
        pool = _Pool(sites, prices, budget if name else budget + spare, rounding)
        counts = pool.counts([importances[site.key] for site in sites])
        kept |= {(site.block, site.name): n for site, n in zip(sites, counts, strict=True)}
    return Widths(kept)


@dataclass(frozen=True)
class _Pool:
    """Sites that share out a size.

    Attributes:
        sites: the sites.
        costs: the size of one unit of each.
        budget: the size that all units that stay may have.
        rounding: as in `by_importance`.
    """

    sites: Sequence[Site]
    costs: Sequence[int]
    budget: int
    rounding: Rounding

    def counts(self, importances: Sequence[Float[Tensor, " units"]]) -> list[int]:
        """Return how many units of each site stay."""
        owners = torch.cat([torch.full((len(w),), n) for n, w in enumerate(importances)])
        # Among equal units, units of the first site stay, so that the order is always the same.
        order = torch.cat(list(importances)).argsort(descending=True, stable=True)
        ranked = owners[order]
        # Binary search for the longest ranking that fits: its cost grows with its length.
        low, high = 0, len(ranked)
        while low < high:
            middle = (low + high + 1) // 2
            if self._spent(self._first(ranked[:middle])) <= self.budget:
                low = middle
            else:
                high = middle - 1
        counts = self._first(ranked[:low])
        # Sites all of whose units come later: each keeps one unit, which is paid for already.
        absent = set(range(len(self.sites))) - set(ranked[:low].unique().tolist())
        self._fill(counts, ranked[low:].tolist(), absent)
        return [self._width(n, count) for n, count in enumerate(counts)]

    def _first(self, ranked: Tensor) -> list[int]:
        """Count these units by the site that they belong to; one at least for each site."""
        counted = torch.bincount(ranked, minlength=len(self.sites))
        return [max(1, count) for count in counted.tolist()]

    def _fill(self, counts: list[int], following: Sequence[int], paid: set[int]) -> None:
        """Take further units that fit, in their order; a site of which one does not fit is done.

        Args:
            counts: how many stay already; changed.
            following: the sites of the units that follow in the ranking.
            paid: sites whose first unit is among those, and stays already.
        """
        remaining, open_sites = self.budget - self._spent(counts), set(range(len(self.sites)))
        low = min(self.costs)
        for n in following:
            if remaining < low or not open_sites:
                return
            if n in paid:
                paid.remove(n)
                continue
            if n not in open_sites or counts[n] == self.sites[n].units:
                continue
            # Where widths are rounded, most units are free, and one pays for the whole step.
            price = (self._width(n, counts[n] + 1) - self._width(n, counts[n])) * self.costs[n]
            if price > remaining:
                open_sites.remove(n)
            else:
                counts[n] += 1
                remaining -= price

    def _spent(self, counts: Sequence[int]) -> int:
        return sum(self._width(n, count) * self.costs[n] for n, count in enumerate(counts))

    def _width(self, n: int, count: int) -> int:
        return self.rounding.up(self.sites[n], count)


def by_error(
    weight: Float[Tensor, "m d"], gram: Gram, units: int, keep: int, ranges: int
) -> tuple[Float[Tensor, " u"], KeptSet]:
    """Return by how much the error falls for each unit, and the units at the uniform width."""
    # Gram → removals down to the last units → shape of the curve, and the units kept at `keep`
    path = removal_path(weight, gram.xx, units, ranges, ranges=ranges)
    gone = {unit for unit, _ in path[: units - keep]}
    staying = torch.tensor([unit for unit in range(units) if unit not in gone])
    return error_saved([cost for _, cost in path], keep, ranges), KeptSet(staying, units)


def error_saved(costs: Sequence[float], keep: int, last: int = 1) -> Float[Tensor, " u"]:
    """Return by how much every unit that stays lowers the output error, the best unit first.

    The unit is the error at the width `keep`; where that is 0, a unit is worth 0 too, or ∞ if its
    own removal costs anything. Where a removal costs less than one before it, those between count
    at their mean cost: the path is replaced by its convex hull. The last units, which always stay,
    are worth ∞. float64, on the CPU.

    Args:
        costs: of every removal down to the last units, as `removal_path` returns them.
        keep: how many units are left when the error is 1.
        last: how many always stay.
    """
    # Costs in the order of removal → their convex hull → shares of the error at `keep` units
    rising = torch.tensor(_rising(costs), dtype=torch.float64)
    error = float(rising[: len(costs) + last - keep].sum())
    # Over an error of 0 anything is ∞; 0 over it counts as 0.
    # Removal order is worst unit first; reversed, the last unit to go is the best.
    saved = (rising / error if error > 0 else torch.where(rising > 0, torch.inf, 0.0)).flip(0)
    return torch.cat([torch.full((last,), torch.inf, dtype=torch.float64), saved])


def _rising(costs: Sequence[float]) -> list[float]:
    """The slopes of the convex hull below the sums of costs: isotonic regression, by pooling."""
    runs: list[tuple[float, int]] = []
    for cost in costs:
        total, count = cost, 1
        # Pool adjacent violators: a run whose mean is no less than the next one's joins it. The
        # means are compared by products, so that nothing is divided.
        while runs and runs[-1][0] * count >= total * runs[-1][1]:
            before, number = runs.pop()
            total, count = total + before, count + number
        runs.append((total, count))
    return [total / count for total, count in runs for _ in range(count)]
