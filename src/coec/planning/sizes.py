"""Sizes of the pruned model, and the format that holds them."""

from dataclasses import dataclass

import torch

from coec.allocation import Widths
from coec.errors import OptionError
from coec.models.description import Description
from coec.models.formats import OutputFormat
from coec.models.layout import Shape
from coec.planning.recipe import Recipe
from coec.settings import Pruning


@dataclass(frozen=True)
class PlanSizes:
    """Sizes and formats of one pruning run.

    Attributes:
        model: the dense model as its configuration describes it.
        recipe: the settings.
        widths: number of units that every site keeps.
        pruned: the sizes afterwards.
        output: the format of the result.
        pruned_shapes: every tensor that the result stores.
        seq_len: tokens of a calibration window.
        remarks: why other plans cannot be made.
        decided: False where the widths wait for statistics; until then they are uniform ones with
            the same number of parameters.
    """

    model: Description
    recipe: Recipe
    widths: Widths
    pruned: Shape
    output: OutputFormat
    pruned_shapes: dict[str, torch.Size]
    seq_len: int
    remarks: tuple[str, ...] = ()
    decided: bool = True

    @property
    def dense(self) -> Shape:
        """The sizes before."""
        return self.model.shape

    @property
    def parameters_before(self) -> int:
        """Parameters of the dense model, tied ones once."""
        return self.model.parameters

    @property
    def parameters_after(self) -> int:
        """Parameters of the pruned model, tied ones once."""
        return sum(shape.numel() for shape in self.pruned_shapes.values())

    @property
    def tokens(self) -> int:
        """Tokens of all calibration windows."""
        return self.recipe.calibration.windows * self.seq_len

    @property
    def judges_are_fitted(self) -> bool:
        """True where the windows that judge the compensations are fitted on in the end.

        False where the user holds them out, and where they judge the reconstruction too.
        """
        return bool(self.recipe.calibration.judging) and not self.recipe.reconstruction.sequential


def parameter_budget(model: Description, pruning: Pruning) -> int | None:
    """Largest number of parameters that may be left; None where sparsity decides.

    Raises:
        OptionError: the budget is no less than the model has.
    """
    if pruning.budget_parameters is None:
        return None
    before, budget = model.parameters, pruning.budget_parameters
    budget = int(budget * before) if budget < 1 else int(budget)
    if budget >= before:
        raise OptionError(
            f"budget_parameters = {budget:,} is no less than the model's {before:,}: nothing would "
            "go; allow fewer"
        )
    return budget


def check_uniform(model: Description, recipe: Recipe, widths: Widths, pruned: Shape) -> None:
    """Raises OptionError where widths differ by block without `non_uniform`."""
    if pruned.uniform or recipe.pruning.non_uniform:
        return
    by_site = {name: set(widths.everywhere(name)) for _, name in widths.kept}
    name, counts = next((name, counts) for name, counts in by_site.items() if len(counts) > 1)
    source = "" if recipe.kept is None else f" in '{recipe.kept.source}'"
    code = ", or set non_uniform to write code beside the weights"
    raise OptionError(
        f"the widths of {name}{source} differ by block ({min(counts):,} to {max(counts):,}), which "
        "no stock format holds: keep as many units in every block"
        + ("" if model.architecture.blocks.experts else code)
    )


def pruned_sizes(model: Description, widths: Widths) -> Shape:
    """Sizes that follow from widths; a kind of site that a block lacks gets its widest elsewhere.

    Raises:
        OptionError: experts of one block keep different numbers of channels.
    """
    kept: dict[tuple[int, str], set[int]] = {}
    for site in model.layout.sites:
        kept.setdefault((site.block, site.kind), set()).add(widths.of(site))
    for counts in kept.values():
        if len(counts) > 1:
            raise OptionError(
                f"experts of one block keep {min(counts):,} to {max(counts):,} channels, which no "
                "format holds: keep as many in every expert"
            )
    size_names = {pattern.name: pattern.counted_by for pattern in model.architecture.blocks.sites}
    widest: dict[str, int] = {}
    by_block: list[dict[str, int]] = [{} for _ in range(model.shape.layers)]
    for (block, site_kind), counts in kept.items():
        name, width = size_names[site_kind], max(counts)
        by_block[block][name] = width
        widest[name] = max(width, widest.get(name, 0))
    return model.shape.with_blocks([widest | sizes for sizes in by_block])


def check_recipe(model: Description, recipe: Recipe) -> None:
    """Raises OptionError for settings that the architecture does not allow."""
    architecture, pruning = model.architecture, recipe.pruning
    setting = recipe.reconstruction.sequential
    if setting and (addition := architecture.adds):
        raise OptionError(
            f"{setting} needs blocks that add what attention and the MLP return, one after the "
            f"other; those of {architecture.model_type} add {addition}: leave it out "
            "(preset = fast does)"
        )
    if architecture.attention_kept and (sparsity := pruning.attention_sparsity):
        raise OptionError(
            f"attention of {architecture.model_type} keeps all KV groups "
            f"({architecture.attention_kept}), got attention_sparsity = {sparsity:g}: leave it out"
        )
    if architecture.blocks.experts and pruning.non_uniform:
        raise OptionError(
            f"non_uniform is not built for models of experts ({architecture.model_type}): leave it "
            "out"
        )
    if architecture.blocks.experts and recipe.method.name == "auto":
        raise OptionError(
            "compensation = auto judges by held-out tokens, of which a router may send an expert "
            "none: use another compensation, say ridge-to-slice"
        )
