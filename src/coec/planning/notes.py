"""Notes of a plan: settings without effect, and what a width costs in other programs."""

from collections import Counter
from collections.abc import Iterator

from coec.allocation import MOST_ADDED, MULTIPLES, OF_EXPERTS
from coec.compensation.shrinkage import enough, few
from coec.models.formats import quantised_cost
from coec.models.layout import Site
from coec.planning.sizes import PlanSizes
from coec.selection import kept_count


def notes_of(plan: PlanSizes) -> tuple[str, ...]:
    """List all notes of a plan, one sentence each."""
    return (*plan.remarks, *_calibration(plan), *_architecture(plan), *_given(plan), *_widths(plan))


def _calibration(plan: PlanSizes) -> Iterator[str]:
    """Yield what the calibration text decides, and what few tokens mean."""
    pruning, calibration = plan.recipe.pruning, plan.recipe.calibration
    if not plan.decided:
        yield (
            f"allocation = {pruning.allocation} decides the widths of every block from the "
            "calibration text; these are uniform ones of as many parameters"
        )
    widest = max(site.columns for site in plan.model.layout.sites)
    fitted = 1.0 if plan.judges_are_fitted else 1.0 - calibration.held_out
    tokens = fitted * calibration.windows * plan.seq_len
    judged = pruning.compensation not in ("none", "auto")
    if judged and calibration.guard and few(tokens, widest):
        by = "by held-out error" if calibration.held_out else "as no window judges them"
        yield (
            f"few tokens: {tokens:,.0f} for up to {widest:,} columns; repairs are drawn back "
            f"towards the slice, {by}; "
            f"{enough(calibration.windows, tokens, widest)} windows would do"
        )


def _architecture(plan: PlanSizes) -> Iterator[str]:
    """Yield what the width of experts means for transformers, and why attention stays whole."""
    for site in plan.model.layout.kinds:
        width = plan.widths.of(site)
        if not site.routed:
            continue
        if width % OF_EXPERTS:
            yield (
                f"experts keep {width:,} {site.unit}s, no multiple of {OF_EXPERTS}: transformers "
                'runs them in narrow dtypes with experts_implementation="eager" only'
            )
        elif width != kept_count(site.units, plan.recipe.pruning.removed(site.kind)):
            yield (
                f"experts keep {width:,} {site.unit}s, a multiple of {OF_EXPERTS}, as "
                "transformers needs it to run them all at once"
            )
    if reason := plan.model.architecture.attention_kept:
        yield f"attention keeps all KV groups: {reason}"


def _given(plan: PlanSizes) -> Iterator[str]:
    """Yield what units that the user gave leave without effect."""
    kept, sites = plan.recipe.kept, plan.model.layout.sites
    if kept is None:
        return
    if kept.covers(plan.model.layout):
        yield (
            f"every site keeps the units of '{kept.source}': sparsity, multiple_of, allocation, "
            "selection and kv_groups have no effect"
        )
    else:
        yield (
            f"{len(kept.units)} of {len(sites)} sites keep the units of '{kept.source}', the "
            "others are selected from"
        )


def _widths(plan: PlanSizes) -> Iterator[str]:
    """Yield where nothing is removed, and where a width fits no block of quantisers or GPUs."""
    pruning, kept = plan.recipe.pruning, plan.recipe.kept
    for site in plan.model.layout.kinds:
        sparsity = pruning.removed(site.kind)
        if not sparsity or (kept is not None and site.key in kept.units):
            continue
        widths = [plan.widths.of(alike) for alike in _alike(plan, site)]
        if kept_count(site.units, sparsity) == site.units:
            yield (
                f"nothing is removed at {site.kind}: {sparsity:.4g} of {site.units} {site.unit}s "
                "is less than one"
            )
        elif site.value is None and pruning.multiple_of != "1" and min(widths) == site.units:
            yield (
                f"nothing is removed at {site.kind}: multiple_of = {pruning.multiple_of} rounds "
                f"up to all {site.units:,} {site.unit}s"
            )
        if pruning.multiple is None and site.value is None and min(widths) % MULTIPLES[-1]:
            yield (
                f"multiple_of = auto leaves {site.kind} at {min(widths):,} {site.unit}s: the next "
                f"multiple of {MULTIPLES[-1]} adds more than {MOST_ADDED:.0%}"
            )
    for site in plan.model.layout.kinds:
        usual, blocks = Counter(map(plan.widths.of, _alike(plan, site))).most_common(1)[0]
        if cost := quantised_cost(site, usual, plan.model.shapes[site.weight][0], blocks):
            yield cost


def _alike(plan: PlanSizes, site: Site) -> list[Site]:
    """Sites of the same kind."""
    return [alike for alike in plan.model.layout.sites if alike.kind == site.kind]
