"""A recipe resolved for a model and what calibrates it: the one place where a preset yields.

A default of a preset is left out where the model, the text or the dtype does not allow it, and the
plan says why. A setting that the user gave is never left out: it is refused.
"""

from dataclasses import replace

from coec.calibration.windows import few_tokens, source_digest, window_length, with_validation
from coec.devices import DTYPES, stored_dtype
from coec.errors import OptionError
from coec.models.description import Description
from coec.planning.recipe import Recipe
from coec.selection import kept_count
from coec.settings import Calibration, Pruning, Reconstruction
from coec.settings.fields import without_effect
from coec.settings.parts import memory_size
from coec.settings.presets import YIELDING
from coec.streaming.statistics import Statistics

_OFF = {
    name: value
    for name, value in Reconstruction().record().items()
    if name not in ("preset", "kv_groups")
}
"""Settings of the fits to the dense model, at the values that leave them out."""


def resolve(recipe: Recipe, model: Description, statistics: Statistics | None = None) -> Recipe:
    """Return the recipe that is carried out; one that is resolved already stays as it is.

    Its kept units are read, so that a file that changes later changes nothing.

    Args:
        recipe: the settings.
        model: the dense model.
        statistics: sums that take the place of a text.

    Raises:
        OptionError: the recipe does not fit the model or the statistics.
    """
    if statistics is not None:
        recipe = with_statistics(recipe, model, statistics)
    recipe = recipe.opened()
    # What a preset brought yields to the dtype, the model and the length of the text, in turn.
    if recipe.calibration.forward_dtype == "float16" and recipe.reconstruction.reconstruct:
        recipe = _without_fits(recipe, "sums over tokens overflow in forward_dtype = float16")
    if addition := model.architecture.adds:
        recipe = _without_propagation(
            recipe, f"blocks of {model.architecture.model_type} add {addition}"
        )
    if recipe.reconstruction.preset == "fast" and few_tokens(recipe.calibration, model):
        recipe = _without_fits(recipe, "tokens are few")
    # Validation windows, where tokens are few; the dtype of sums, where blocks are trained
    calibration = with_validation(recipe.calibration, model)
    calibration = replace(calibration, summed=bool(recipe.reconstruction.reconstruct))
    recipe = replace(recipe, calibration=calibration)
    if recipe.kept is not None:
        recipe.kept.check(model.layout)
    _check_model(recipe, model)
    return recipe


def with_statistics(recipe: Recipe, model: Description, statistics: Statistics) -> Recipe:
    """Return the recipe with the calibration that statistics were made with.

    A preset that yields leaves out what needs the text itself.

    Raises:
        OptionError: other settings need the text, or were given otherwise than they were collected.
    """
    why = "statistics hold sums only, and no text"
    recipe = _without_fits(recipe, why)
    settings = recipe.reconstruction
    yields = settings.preset in YIELDING and "allocation" not in recipe.given
    if yields and recipe.allocation.runs_models:
        why = f"{settings.left_out or why}; widths are uniform therefore"
        pruning = replace(recipe.pruning, allocation="uniform")
        recipe = replace(recipe, pruning=pruning, reconstruction=replace(settings, left_out=why))
    _check_needs_no_text(recipe)
    # What was given must be what was collected with; a text counts by its content.
    calibration, given = recipe.calibration, recipe.given
    agreed = {n: v for n, v in calibration.record().items() if n in given and v is not None}
    if "calibration" in agreed:
        agreed["calibration"] = source_digest(calibration.source)
    if "seq_len" in agreed:
        agreed["seq_len"] = window_length(calibration, model)
    statistics.check(agreed)
    collected = Calibration.of(statistics.settings)
    guard_share = statistics.made_with["judging"]
    return replace(recipe, calibration=replace(collected, guard_share=guard_share))


def _without_fits(recipe: Recipe, why: str) -> Recipe:
    """Return the recipe without fits if a preset that yields brought them, else the recipe.

    `why` says why the pruned model cannot be run beside the dense one.
    """
    settings = recipe.reconstruction
    if settings.preset not in YIELDING or _given_fits(recipe) or not settings.sequential:
        return recipe
    fitless = Reconstruction(preset=settings.preset, kv_groups=settings.kv_groups, left_out=why)
    return replace(recipe, reconstruction=fitless)


def _without_propagation(recipe: Recipe, why: str) -> Recipe:
    """Return the recipe whose closed forms take the dense model's inputs, if a preset yields.

    Training goes on. `why` says why a block's parts cannot be told apart.
    """
    settings = recipe.reconstruction
    if not settings.reconstruct:
        return _without_fits(recipe, why)
    if settings.preset not in YIELDING or "propagate" in recipe.given:
        return recipe
    settings = replace(settings, propagate=False, left_out=why)
    return replace(recipe, reconstruction=settings)


def _given_fits(recipe: Recipe) -> list[str]:
    """Names of fits that the user gave, and that are not off."""
    settings = recipe.reconstruction.record()
    return [name for name, off in _OFF.items() if name in recipe.given and settings[name] != off]


def _check_needs_no_text(recipe: Recipe) -> None:
    """Raise OptionError where statistics do not do, because the text itself is needed."""
    if name := recipe.needs_text:
        fits = _given_fits(recipe)
        if recipe.reconstruction.preset in YIELDING and fits:
            name = fits[0]
        elif name.split()[0] not in recipe.given:
            name = f"preset = {recipe.reconstruction.preset}"
        raise OptionError(
            f"{name} runs the pruned model over the text, of which statistics hold sums only: "
            f"leave out the statistics, or {name}"
        )
    if recipe.runtime.executor == "ray":
        raise OptionError(
            "executor = ray has no effect with statistics, which are read by one process: "
            "leave it out, or calibrate on the text"
        )


def _check_model(recipe: Recipe, model: Description) -> None:
    architecture, pruning = model.architecture, recipe.pruning
    if (addition := architecture.adds) and recipe.reconstruction.propagate:
        raise OptionError(
            "propagate needs blocks that add what attention and the MLP return, one after the "
            f"other; those of {architecture.model_type} add {addition}: set propagate = false, or "
            "leave it out with preset = balanced"
        )
    if "context" in recipe.given and pruning.budget_memory is None:
        raise without_effect("context", "no budget_memory")
    if architecture.attention_kept and (sparsity := pruning.attention_sparsity):
        raise OptionError(
            f"attention of {architecture.model_type} keeps all KV groups "
            f"({architecture.attention_kept}), got attention_sparsity = {sparsity:g}: leave it out"
        )
    if model.around is not None and pruning.non_uniform:
        raise OptionError(
            f"non_uniform is not built for language models inside others ({model.around.name}): "
            "leave it out"
        )
    if pruning.drop_blocks:
        _check_depth(recipe, model)
    if pruning.attention_units == "heads":
        _check_heads(recipe, model)
    if architecture.blocks.experts and pruning.non_uniform:
        raise OptionError(
            f"non_uniform is not built for models of experts ({architecture.model_type}): leave it "
            "out"
        )
    if pruning.expert_sparsity:
        _check_experts(model, pruning.expert_sparsity)


def parameter_budget(model: Description, pruning: Pruning) -> int | None:
    """Return the largest number of parameters that may be left; None where sparsity decides.

    Of a budget of memory that is what it has room for beside what is around a language model, and
    the keys and values of the dense model's blocks; all in the dtype that is written.

    Raises:
        OptionError: nothing would go, or nothing can be left.
    """
    if pruning.budget_memory is not None:
        return _within_memory(model, pruning)
    if pruning.budget_parameters is None:
        return None
    before, budget = model.parameters, pruning.budget_parameters
    budget = int(budget * before) if budget < 1 else int(budget)
    if budget >= before:
        inside = " as a language model alone" if model.around else ""
        raise OptionError(
            f"budget_parameters = {budget:,} is no less than the {before:,} that the model "
            f"has{inside}: nothing would go; allow fewer"
        )
    return budget


def _within_memory(model: Description, pruning: Pruning) -> int:
    assert pruning.budget_memory is not None
    dtype = DTYPES[pruning.dtype] if pruning.dtype else stored_dtype(model.config)
    cached = model.cached(pruning.drop_blocks) * pruning.context
    around = 0 if model.around is None else model.around.outside()
    left = memory_size(pruning.budget_memory) // dtype.itemsize - cached - around
    if left < 1:
        rest = f", and {around:,} parameters around the language model" if around else ""
        raise OptionError(
            f"budget_memory = {pruning.budget_memory} has no room beside the keys and values of "
            f"context = {pruning.context:,} tokens ({cached * dtype.itemsize / 1e6:,.1f} MB)"
            f"{rest}: allow more, or fewer tokens"
        )
    if left >= model.parameters:
        raise OptionError(
            f"budget_memory = {pruning.budget_memory} holds the whole model and the keys and "
            f"values of context = {pruning.context:,} tokens: nothing would go; allow less"
        )
    return left


def _check_depth(recipe: Recipe, model: Description) -> None:
    """Raise OptionError where whole blocks cannot be left out."""
    count, layers = recipe.pruning.drop_blocks, model.shape.layers
    if count > layers - 2:
        raise OptionError(
            f"drop_blocks = {count} leaves no block between the first and the last, which stay: "
            f"this model has {layers} blocks" + f", drop at most {layers - 2}" * (layers > 2)
        )
    settings = recipe.reconstruction
    if not (settings.propagate or settings.reconstruct):
        why = settings.left_out
        adds = model.architecture.adds
        advice = "set propagate or reconstruct (preset = balanced does)"
        if adds:
            advice = "set reconstruct (preset = balanced does)"
        if why and not (adds and adds in why):
            advice = "change that, or leave drop_blocks out"
        raise OptionError(
            "drop_blocks needs blocks that are solved on the states of the pruned model"
            + (f", which are left out here ({why})" if why else "")
            + f": {advice}"
        )


def _check_heads(recipe: Recipe, model: Description) -> None:
    """Raise OptionError where no KV group has a query head to spare, or none is to go."""
    idle = "attention_sparsity = 0" if recipe.pruning.attention_sparsity == 0 else None
    idle = "kv_groups = all" if recipe.reconstruction.kv_groups == "all" else idle
    if idle:
        raise without_effect("attention_units = heads", idle)
    if model.architecture.attention_kept:
        raise without_effect(
            "attention_units = heads",
            f"{model.architecture.model_type}, whose attention stays whole",
        )
    if min(model.shape.at(block).group for block in range(model.shape.layers)) == 1:
        raise OptionError(
            "attention_units = heads leaves every KV group a query head at least, and this model "
            "has one in each: leave it out"
        )


def _check_experts(model: Description, sparsity: float) -> None:
    """Raise OptionError where whole experts cannot go, or too few would stay."""
    count = model.layout.experts
    if not count:
        raise OptionError(
            f"expert_sparsity removes whole experts, and this {model.architecture.model_type} has "
            "none: leave it out"
        )
    if reason := model.architecture.experts_kept:
        raise OptionError(
            f"{model.architecture.model_type} keeps all experts ({reason}), got expert_sparsity = "
            f"{sparsity:g}: leave it out"
        )
    chosen, remaining = int(model.config["num_experts_per_tok"]), kept_count(count, sparsity)
    if remaining < chosen:
        raise OptionError(
            f"expert_sparsity = {sparsity:g} leaves {remaining} of {count} experts, and every "
            f"token goes to {chosen} (num_experts_per_tok): remove fewer"
        )
