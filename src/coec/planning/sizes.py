"""Sizes that a plan comes to: budgets, widths as a shape, and what cannot be."""

from coec.allocation import Widths
from coec.errors import OptionError
from coec.models.architectures import Architecture
from coec.models.description import Description
from coec.models.shape import Shape
from coec.planning.recipe import Recipe
from coec.settings import Pruning


def budget_of(model: Description, pruning: Pruning) -> int:
    """The most parameters that may be left; raises OptionError where these are no fewer."""
    before = model.parameters
    asked = pruning.budget_parameters
    assert asked is not None
    budget = int(asked * before) if asked < 1 else int(asked)
    if budget >= before:
        raise OptionError(
            f"budget_parameters = {budget:,} is no less than the model's {before:,}: nothing would "
            "go; allow fewer"
        )
    return budget


def goal_of(model: Description, pruning: Pruning) -> int | None:
    """How many parameters must go; None where sparsity says what does."""
    if pruning.budget_parameters is None:
        return None
    return model.parameters - budget_of(model, pruning)


def several_widths(model: Description, widths: Widths, recipe: Recipe) -> OptionError:
    """The error where widths differ by block and nobody said that they may."""
    kinds = {name: set(widths.everywhere(name)) for _, name in widths.kept}
    name, found = next((name, found) for name, found in kinds.items() if len(found) > 1)
    source = "" if recipe.kept is None else f" in '{recipe.kept.source}'"
    code = ", or set non_uniform to write code beside the weights"
    return OptionError(
        f"the widths of {name}{source} differ by block ({min(found):,} to {max(found):,}), which "
        "no stock format holds: keep as many units in every block"
        + ("" if model.architecture.blocks.experts else code)
    )


def pruned_sizes(model: Description, widths: Widths) -> Shape:
    """The sizes of these widths; those of a kind that a block lacks are the widest of the others.

    Raises:
        OptionError: experts of one block keep different numbers of channels.
    """
    kept: dict[tuple[int, str], set[int]] = {}
    for site in model.layout.sites:
        kept.setdefault((site.block, site.kind), set()).add(widths.of(site))
    if several := next((found for found in kept.values() if len(found) > 1), None):
        raise OptionError(
            f"experts of one block keep {min(several):,} to {max(several):,} channels, which no "
            "format holds: keep as many in every expert"
        )
    counted = {p.name: p.counted_by for p in model.architecture.blocks.sites}
    widest = {counted[kind]: max(found) for (_, kind), found in sorted(kept.items(), key=_least)}
    units = [
        widest | {counted[kind]: max(found) for (at, kind), found in kept.items() if at == block}
        for block in range(model.shape.layers)
    ]
    return model.shape.with_blocks(units)


def _least(item: tuple[tuple[int, str], set[int]]) -> int:
    return min(item[1])


def check_whole(architecture: Architecture, recipe: Recipe) -> None:
    """Raises OptionError where attention is to lose units and cannot."""
    asked = recipe.pruning.attention_sparsity
    if architecture.attention_kept and asked:
        reason = architecture.attention_kept
        raise OptionError(
            f"attention of {architecture.model_type} keeps all KV groups ({reason}), "
            f"got attention_sparsity = {asked:g}: leave it out"
        )


def check_experts(architecture: Architecture, recipe: Recipe) -> None:
    """Raises OptionError where experts would get widths of their own by block."""
    if architecture.blocks.experts and recipe.pruning.non_uniform:
        raise OptionError(
            f"non_uniform is not built for models of experts ({architecture.model_type}): leave it "
            "out"
        )
    if architecture.blocks.experts and recipe.method.name == "auto":
        raise OptionError(
            "compensation = auto judges by held-out tokens, of which a router may send an expert "
            "none: use another compensation, say ridge-to-slice"
        )
