"""Notes of a plan: settings without effect, and what a width costs in other programs."""

from collections import Counter
from collections.abc import Iterator

from coec.allocation.widths import OF_EXPERTS, Widths, parameters
from coec.compensation.shrinkage import PLENTY, enough, few
from coec.models.description import Description
from coec.models.formats import stand_in
from coec.models.layout import Site
from coec.planning.recipe import Recipe
from coec.selection import kept_count
from coec.settings import PRESETS, Pruning


def notes_of(
    model: Description, recipe: Recipe, widths: Widths, seq_len: int, decided: bool
) -> Iterator[str]:
    """Yield all notes of a plan, one sentence each."""
    yield from _calibration(model, recipe, seq_len, decided)
    if why := recipe.reconstruction.left_out:
        fits = "reconstruct" in PRESETS[recipe.reconstruction.preset].settings
        yield (
            f"blocks are not trained, and only {recipe.method.name} compensates: {why}"
            if fits and not recipe.reconstruction.reconstruct
            else f"compensations are for the dense model's inputs, not the pruned one's: {why}"
        )
    # Experts: widths that transformers runs all at once, and those that it does not
    for site in model.layout.kinds:
        width = widths.of(site)
        if site.routed and width % OF_EXPERTS:
            yield (
                f"experts keep {width:,} {site.unit}s, no multiple of {OF_EXPERTS}: transformers "
                'runs them in narrow dtypes with experts_implementation="eager" only'
            )
        elif (
            site.routed
            and (share := recipe.pruning.removed(site.kind))
            and width != kept_count(site.units, share)
        ):
            yield (
                f"experts keep {width:,} {site.unit}s, a multiple of {OF_EXPERTS}, as "
                "transformers needs it to run them all at once"
            )
    if reason := model.architecture.attention_kept:
        yield f"attention keeps all KV groups: {reason}"
    if (kept := recipe.kept) is not None and kept.covers(model.layout):
        yield (
            f"every site keeps the units of '{kept.source}': sparsity, multiple_of, allocation, "
            "selection and kv_groups have no effect"
        )
    elif kept is not None:
        yield (
            f"{len(kept.units)} of {len(model.layout.sites)} sites keep the units of "
            f"'{kept.source}', the others are selected from"
        )
    yield from _widths(model, recipe, widths)
    yield from _more_text(model, recipe, seq_len)


def _calibration(model: Description, recipe: Recipe, seq_len: int, decided: bool) -> Iterator[str]:
    """Yield what the calibration text decides, and what few tokens mean."""
    pruning, calibration = recipe.pruning, recipe.calibration
    if not decided:
        yield (
            f"allocation = {pruning.allocation} decides the widths of every block from the "
            "calibration text; these are uniform ones of as many parameters"
        )
    if calibration.samples == 1 and recipe.reconstruction.sequential:
        yield "one window leaves none for validation: training is measured on its own window"
    tokens, widest = _fitted_on(model, recipe, seq_len)
    if pruning.compensation != "none" and calibration.guard and few(tokens, widest):
        by = "" if calibration.validation else ", without validation windows"
        yield (
            f"only {tokens:,.0f} tokens for {widest:,} columns: compensations are shrunk towards "
            f"plain slicing{by}; use {enough(calibration.samples, tokens, widest)} windows or more"
        )


def _more_text(model: Description, recipe: Recipe, seq_len: int) -> Iterator[str]:
    """Yield how much more text would gain something, where compensations are taken as they are."""
    calibration, (tokens, widest) = recipe.calibration, _fitted_on(model, recipe, seq_len)
    drawn_back = calibration.guard and few(tokens, widest)
    if recipe.pruning.compensation != "none" and tokens < PLENTY * widest and not drawn_back:
        yield (
            f"{tokens:,.0f} tokens for up to {widest:,} columns: more text lowers the error still; "
            f"{enough(calibration.samples, tokens, widest, PLENTY)} windows give {PLENTY} for each"
        )


def _fitted_on(model: Description, recipe: Recipe, seq_len: int) -> tuple[float, int]:
    """Number of tokens that compensations are fitted on, and columns of the widest consumer."""
    calibration = recipe.calibration
    fitted = 1.0 if recipe.fits_validation else 1.0 - calibration.validation
    widest = max(site.columns for site in model.layout.sites)
    return fitted * calibration.samples * seq_len, widest


def _widths(model: Description, recipe: Recipe, widths: Widths) -> Iterator[str]:
    """Yield where nothing is removed, and where a width fits no block of quantisers or GPUs."""
    pruning, kept = recipe.pruning, recipe.kept
    if pruning.expert_sparsity and widths.experts is None:
        yield (
            f"no whole expert is removed: {pruning.expert_sparsity:.4g} of {model.layout.experts} "
            "is less than one"
        )
    if widths.experts is not None:
        yield "nothing compensates the loss of whole experts, and the errors of sites leave it out"
    # Each kind of site by its usual width: what quantisers add, and where nothing goes
    costs: list[str] = []
    for site in model.layout.kinds:
        counts = Counter(
            widths.of(alike) for alike in model.layout.sites if alike.kind == site.kind
        )
        usual, blocks = counts.most_common(1)[0]
        if cost := stand_in(site, usual):
            costs.append(cost)
        sparsity = pruning.removed(site.kind)
        if not sparsity or (kept is not None and site.key in kept.units):
            continue
        each = site.units // site.ranges
        if kept_count(each, sparsity) == each:
            group = " of a KV group" if site.groups else ""
            yield (
                f"nothing is removed at {site.kind}: {sparsity:.4g} of {each} {site.unit}s{group} "
                "is less than one"
            )
        elif (
            site.value is not None
            and pruning.tensor_parallel > 1
            and min(counts) == site.units
            and recipe.reconstruction.kv_groups != "all"
        ):
            yield (
                f"nothing is removed at {site.kind}: tensor_parallel = {pruning.tensor_parallel} "
                f"divides no fewer of {site.units} {site.unit}s"
                + ("" if site.groups else "; attention_units = heads may remove some of every one")
            )
        elif site.value is None and pruning.multiple_of != "1" and min(counts) == site.units:
            yield (
                f"nothing is removed at {site.kind}: multiple_of = {pruning.multiple_of} rounds "
                f"up to all {site.units:,} {site.unit}s"
            )
        # Shared experts go by the routed ones' multiple, which has a note of its own.
        elif site.value is None and not site.as_experts and len(counts) == 1:
            yield from _rounding(model, pruning, site, usual, blocks)
    yield from costs


def _rounding(
    model: Description, pruning: Pruning, site: Site, width: int, blocks: int
) -> Iterator[str]:
    """Yield what rounding the channels of every block up to `width` costs and saves."""
    by_fraction = kept_count(site.units, pruning.removed(site.kind))
    several = pruning.tensor_parallel > 1
    if (pruning.multiple == 1 and not several) or width <= by_fraction:
        return
    more = blocks * (width - by_fraction) * parameters(site, model.shapes)
    yield (
        f"multiple_of = {pruning.multiple_of} rounds {by_fraction:,} {site.unit}s up to {width:,}"
        + f", which {pruning.tensor_parallel} GPUs divide" * several
        + f": {more / 1e6:,.1f}M parameters more"
    )
