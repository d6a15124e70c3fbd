"""What a plan has to say: what has no effect, and what a width costs elsewhere."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from coec.allocation import MOST_ADDED, MULTIPLES, OF_EXPERTS
from coec.compensation.shrinkage import enough, few
from coec.models.fallbacks import fallbacks
from coec.models.layout import Site
from coec.selection import kept_count

if TYPE_CHECKING:
    from coec.planning.plan import Plan


def notes_of(plan: "Plan") -> tuple[str, ...]:
    """What has no effect, and what a width costs elsewhere."""
    kinds, pruning, kept = plan.model.layout.kinds, plan.recipe.pruning, plan.recipe.kept
    named = kept.units if kept is not None else {}
    asked = [
        (site, share, kept_count(site.units, share) == site.units)
        for site in kinds
        if (share := pruning.removed(site.kind)) and site.key not in named
    ]
    unmoved = (
        f"nothing is removed at {site.kind}: {share:.4g} of {site.units} {site.unit}s is less "
        "than one"
        for site, share, too_little in asked
        if too_little
    )
    rounded = (
        f"nothing is removed at {site.kind}: multiple_of = {pruning.multiple_of} rounds up to all "
        f"{site.units:,} {site.unit}s"
        for site, _, too_little in asked
        if site.value is None
        and pruning.multiple_of != "1"
        and not (too_little or any(map(plan.widths.removes_from, _alike(plan, site))))
    )
    unaligned = (
        f"multiple_of = auto leaves {site.kind} at {width:,} {site.unit}s: the next multiple of "
        f"{MULTIPLES[-1]} adds more than {MOST_ADDED:.0%}"
        for site, _, _ in asked
        if pruning.multiple is None and site.value is None
        for width in sorted({plan.widths.of(one) for one in _alike(plan, site)})[:1]
        if width % MULTIPLES[-1]
    )
    costs = (
        fallbacks(site, width, plan.model.shapes[site.weight][0], blocks)
        for site in kinds
        for width, blocks in Counter(map(plan.widths.of, _alike(plan, site))).most_common(1)
    )
    whole = plan.model.architecture.attention_kept
    experts = next((site for site in kinds if site.routed), None)
    undecided = (
        f"allocation = {pruning.allocation} decides the widths of every block from the "
        "calibration text; these are uniform ones of as many parameters"
    )
    return (
        *plan.remarks,
        *([] if plan.decided else [undecided]),
        *_few_tokens(plan),
        *(_of_experts(plan, experts) if experts else ()),
        *((f"attention keeps all KV groups: {whole}",) if whole else ()),
        *_of_kept(plan),
        *unmoved,
        *rounded,
        *unaligned,
        *(c for c in costs if c),
    )


def _of_experts(plan: "Plan", site: Site) -> tuple[str, ...]:
    """What the width of experts means for who runs them all at once."""
    width = plan.widths.of(site)
    if width % OF_EXPERTS:
        return (
            f"experts keep {width:,} {site.unit}s, no multiple of {OF_EXPERTS}: transformers "
            'runs them in narrow dtypes with experts_implementation="eager" only',
        )
    if width == kept_count(site.units, plan.recipe.pruning.removed(site.kind)):
        return ()
    return (
        f"experts keep {width:,} {site.unit}s, a multiple of {OF_EXPERTS}, as transformers "
        "wants that runs them all at once",
    )


def _alike(plan: "Plan", site: Site) -> list[Site]:
    """The sites of its kind."""
    return [one for one in plan.model.layout.sites if one.kind == site.kind]


def _of_kept(plan: "Plan") -> tuple[str, ...]:
    """What kept units that were given leave without effect."""
    kept, sites = plan.recipe.kept, plan.model.layout.sites
    if kept is None:
        return ()
    if kept.covers(plan.model.layout):
        return (
            f"every site keeps the units of '{kept.source}': sparsity, multiple_of, allocation, "
            "selection and kv_groups have no effect",
        )
    return (
        f"{len(kept.units)} of {len(sites)} sites keep the units of '{kept.source}', the "
        "others are selected from",
    )


def _few_tokens(plan: "Plan") -> Iterator[str]:
    """Yield what few calibration tokens will mean."""
    calibration = plan.recipe.calibration
    widest = max(site.columns for site in plan.model.layout.sites)
    fitted = 1.0 if plan.judges_are_fitted else 1.0 - calibration.held_out
    tokens = fitted * calibration.windows * plan.seq_len
    judged = plan.recipe.pruning.compensation not in ("none", "auto")
    if judged and calibration.guard and few(tokens, widest):
        by = "by held-out error" if calibration.held_out else "as no window judges them"
        yield (
            f"few tokens: {tokens:,.0f} for up to {widest:,} columns; repairs are drawn back "
            f"towards the slice, {by}; "
            f"{enough(calibration.windows, tokens, widest)} windows would do"
        )
