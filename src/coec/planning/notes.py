"""Notes of a plan: settings without effect, and what a width costs in other programs."""

import math
from collections import Counter
from collections.abc import Iterator

from coec.allocation.kept import KeptUnits
from coec.allocation.uniform import Shares
from coec.allocation.widths import OF_EXPERTS, Widths, parameters
from coec.config.recipe import Recipe
from coec.models.description import Description
from coec.models.formats import stand_in
from coec.models.layout import Site
from coec.selection import kept_count

PLENTY = 64
"""Tokens for every fitted column up to which a doubling of the text took 2 to 5 % off the error of
a real model's consumer on other windows (docs/lab/LOG.md)."""


def notes_of(
    model: Description,
    recipe: Recipe,
    kept: KeptUnits | None,
    shares: Shares,
    widths: Widths,
    tokens: int,
) -> Iterator[str]:
    """Yield the notes on a plan, one sentence each; the arguments are fields of the plan."""
    if recipe.propagate and (adds := model.architecture.adds):
        name = model.architecture.model_type
        yield f"compensations are for the dense model's inputs: blocks of {name} add {adds}"
    if reason := model.architecture.attention_kept:
        yield f"attention is kept whole: {reason}"
    if kept is not None:
        sites = "every site keeps" if kept.covers(model.layout) else f"{len(kept.units)} sites keep"
        yield f"{sites} the units of '{kept.source}'"
    if recipe.expert_sparsity and widths.experts is None:
        yield f"no whole expert is removed: {recipe.expert_sparsity:g} of them is less than one"
    if widths.experts is not None:
        yield "nothing compensates the loss of whole experts, and the errors of sites leave it out"
    for site in model.layout.kinds:
        counts = Counter(widths.of(s) for s in model.layout.sites if s.kind == site.kind)
        usual, blocks = counts.most_common(1)[0]
        if site.routed and usual % OF_EXPERTS:
            yield (
                f"experts keep {usual:,} {site.unit}s, no multiple of {OF_EXPERTS}: transformers "
                'runs them in narrow dtypes with experts_implementation="eager" only'
            )
        if cost := stand_in(site, usual):
            yield cost
        if kept is None or site.key not in kept.units:
            of_unit = blocks * parameters(site, model.shapes) if len(counts) == 1 else 0
            yield from _rounding(site, shares.of(site), max(counts), of_unit)
    widest = max(site.columns for site in model.layout.sites)
    if recipe.compensation != "none" and tokens < PLENTY * widest:
        windows = math.ceil(recipe.samples * PLENTY * widest / tokens)
        yield (
            f"{tokens:,} tokens for up to {widest:,} columns: more text lowers the error still; "
            f"{windows} windows give {PLENTY} for each"
        )


def _rounding(site: Site, share: float, width: int, of_unit: int) -> Iterator[str]:
    """Yield what rounding does to a width; `of_unit` parameters has a unit in all blocks."""
    if not share:
        return
    per_range, units = site.units // site.ranges, f"{site.unit}s"
    by_fraction = site.ranges * kept_count(per_range, share)
    if width == site.units:
        rounded = "tensor_parallel" if site.value is not None else "multiple_of"
        why = "is less than one" if by_fraction == site.units else f"is rounded up by {rounded}"
        yield f"nothing is removed at {site.kind}: {share:.4g} of {per_range:,} {units} {why}"
    elif site.value is None and of_unit and width > by_fraction:
        more = (width - by_fraction) * of_unit / 1e6
        yield (
            f"{by_fraction:,} {units} are rounded up to {width:,}: {more:,.2f}M parameters more "
            "(multiple_of)"
        )
