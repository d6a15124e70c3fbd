"""The plan: what pruning will do, from the configuration alone, in seconds."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from coec.allocation import (
    Importances,
    Widths,
    by_importance,
    shares_for,
    uniform,
    whole_attention,
)
from coec.calibration.windows import DEFAULT_SEQ_LEN, resolve_seq_len, with_judges
from coec.errors import OptionError
from coec.models.description import Description
from coec.models.formats import OutputFormat, choose_format
from coec.models.layout import Layout
from coec.models.non_uniform import FILE as CODE
from coec.models.shape import Shape
from coec.planning.forecast import Forecast
from coec.planning.how import ComputeConfig
from coec.planning.machines import Machine
from coec.planning.notes import notes_of
from coec.planning.recipe import Recipe
from coec.planning.sizes import (
    budget_of,
    check_experts,
    check_whole,
    goal_of,
    pruned_sizes,
    several_widths,
)

CHANNELS = {"expert": "experts"}
"""What records call a kind of site of which a block has several."""
WIDTHS = {"kv_groups": "kv_heads", "query_heads": "heads"}
"""What records call sizes that pruning changes, and the fields of a shape that hold them."""
BRIEF_ITERATIONS = 3
"""Of conjugate gradients in the one step that a candidate is tried with (docs/LOG.md)."""


@dataclass(frozen=True)
class Plan:
    """Sizes and formats of one pruning run.

    Attributes:
        model: the dense model as its configuration describes it.
        recipe: what was asked for.
        widths: how many units every site keeps.
        pruned: the sizes afterwards.
        output: the format the result is written in.
        pruned_shapes: every tensor that the result stores.
        seq_len: tokens of a calibration window.
        remarks: on other plans that cannot be made.
        decided: whether the widths are; those of an allocation that needs statistics are uniform
            ones until then, of as many parameters.
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

    @classmethod
    def candidates(cls, model: Description, recipe: Recipe) -> dict[str, "Plan"]:
        """The plans among which held-out windows choose, by name; mostly there is one.

        Raises:
            ModelError, OptionError: as `of`.
        """
        recipe = recipe.opened()
        recipe = replace(recipe, calibration=with_judges(recipe.calibration, model))
        if recipe.kept is not None:
            recipe.kept.check(model.layout)
        if (setting := recipe.reconstruction.sequential) and (adds := model.architecture.adds):
            raise OptionError(
                f"{setting} needs blocks that add what attention and the MLP return, one after the "
                f"other; those of {model.architecture.model_type} add {adds}: leave it out "
                "(preset = fast does)"
            )
        check_whole(model.architecture, recipe)
        check_experts(model.architecture, recipe)
        names = _rules(model.layout, recipe)
        plans: dict[str, Plan] = {}
        refused: dict[str, OptionError] = {}
        for name in names:
            try:
                plans[name] = cls._with(model, recipe, name)
            except OptionError as error:
                refused[name] = error
        if not plans:
            raise next(iter(refused.values()))
        remarks = tuple(f"kv_groups = {n} was not tried: {error}" for n, error in refused.items())
        plans = {name: replace(plan, remarks=remarks) for name, plan in plans.items()}
        # Where the rule removes no group there is nothing to choose.
        distinct = {plan.pruned: name for name, plan in reversed(plans.items())}
        return {name: plan for name, plan in plans.items() if name in distinct.values()}

    @property
    def judges_are_fitted(self) -> bool:
        """True where windows that judge repairs are fitted on in the end.

        Not where they were held out for good, or judge what follows on the repairs too.
        """
        return bool(self.recipe.calibration.judging) and not self.recipe.reconstruction.sequential

    def briefly(self) -> "Plan":
        """The same with little reconstruction: enough to see which of several candidates leads."""
        how = self.recipe.reconstruction
        if not how.reconstruct:
            return self
        brief = replace(how, reconstruct=1, cg_iterations=min(how.cg_iterations, BRIEF_ITERATIONS))
        return replace(self, recipe=replace(self.recipe, reconstruction=brief))

    @classmethod
    def of(cls, model: Description, recipe: Recipe) -> "Plan":
        """Decides widths and output format; of several candidates this is the first.

        Raises:
            ModelError: the model cannot be pruned.
            OptionError: the recipe does not fit the model, or no format holds the result.
        """
        return next(iter(cls.candidates(model, recipe).values()))

    @classmethod
    def _with(cls, model: Description, recipe: Recipe, kv_groups: str) -> "Plan":
        """The plan by one rule for KV groups, within the budget where there is one."""
        pruning, kept = recipe.pruning, recipe.kept
        goal = goal_of(model, pruning)
        while True:
            if goal is not None:
                pruning = shares_for(model.layout, model.shapes, recipe.pruning, goal, kept)
            widths = (
                whole_attention(model.layout, model.shapes, pruning, kept)
                if kv_groups == "all"
                else uniform(model.layout, pruning, kept)
            )
            named = kept is not None and kept.covers(model.layout)
            later = pruning.allocation != "uniform" and not named
            plan = replace(cls._of(model, recipe, widths, listed=later), decided=not later)
            over = plan.parameters_after - (plan.parameters_before - (goal or 0))
            if goal is None or over <= 0 or plan.parameters_after <= budget_of(model, pruning):
                return plan
            goal += over  # what the format adds, such as biases of a repair

    @classmethod
    def _of(
        cls, model: Description, recipe: Recipe, widths: Widths, *, listed: bool = False
    ) -> "Plan":
        """The plan of these widths, its format chosen.

        Args:
            model: the dense one.
            recipe: what is asked for.
            widths: how many units stay.
            listed: whether the format is one that lists widths by block, even where all are alike.
        """
        pruned = pruned_sizes(model, widths)
        if not (pruned.uniform or recipe.pruning.non_uniform):
            raise several_widths(model, widths, recipe)
        if listed:
            pruned = pruned.listed()
        biased = frozenset(
            site.kind
            for site in model.layout.sites
            if site.bias in model.shapes
            or (
                recipe.method.adds_bias
                and (listed or widths.removes_from(site) or recipe.reconstruction.propagate)
            )
        )
        output = choose_format(model.config, pruned, biased=biased, target=recipe.pruning.target)
        return cls(
            model,
            recipe,
            widths,
            pruned,
            output,
            Description.of(output.config).shapes,
            resolve_seq_len(recipe.calibration.seq_len, model.positions, DEFAULT_SEQ_LEN),
        )

    def allocated(self, importances: Importances) -> "Plan":
        """The plan whose widths are decided, of as many parameters as this one, at most.

        Args:
            importances: of every site whose units nobody names.
        """
        layout, pruning = self.model.layout, self.recipe.pruning
        shared = [site for site in layout.sites if site.key in importances]
        cut = {site.kind for site in shared if self.widths.removes_from(site)}
        whole = {site.kind for site in shared} - cut
        widths = by_importance(
            layout,
            self.model.shapes,
            self.widths,
            importances,
            pruning.multiple,
            pruning.own_shares.union(whole),
            0 if pruning.budget_parameters is None else self._spare,
        )
        try:
            made = Plan._of(self.model, self.recipe, widths)
        except OptionError:  # they came out alike, and no stock format holds just these
            made = Plan._of(self.model, self.recipe, widths, listed=True)
        return replace(made, remarks=self.remarks)

    @property
    def _spare(self) -> int:
        """What a budget leaves unused; nothing where the repair adds to what is counted."""
        left = budget_of(self.model, self.recipe.pruning) - self.parameters_after
        added = self.parameters_after - self.parameters_before
        added += self.widths.removed(self.model.layout, self.model.shapes)
        return 0 if added else left

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
    def notes(self) -> tuple[str, ...]:
        """What has no effect, and what a width costs elsewhere."""
        return notes_of(self)

    def forecast(self, how: ComputeConfig, machine: Machine | None = None) -> Forecast:
        """Memory, operations and disk of every phase, and times by the rates of a machine.

        Where there are several candidates, each is fitted briefly, and one of them then in full.

        Args:
            how: where and in what it is done (`ComputeConfig.of`).
            machine: measured (`coec.planning.measuring.here`) or known by its data sheet
                (`coec.planning.machines.named`); None for no times.
        """
        return Forecast.of(self, how, machine)

    def record(self) -> dict[str, Any]:
        """What `--dry-run --json` prints and the report keeps."""
        return {
            "model_type": self.model.architecture.model_type,
            "output_model_type": self.output.model_type,
            "relabelled": self.output.relabelled,
            "code": None if self.output.code is None else CODE,
            "loads_in": self.output.loads_in,
            "layers": self.dense.layers,
            "widths": {
                **self._channels(),
                **{
                    name: {
                        "before": _of_blocks(self.dense, size),
                        "after": _of_blocks(self.pruned, size),
                    }
                    for name, size in WIDTHS.items()
                },
            },
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "removed": {
                **{s.kind: self._share_of(s.kind) for s in self.model.layout.kinds},
                "parameters": _share(self.parameters_before, self.parameters_after),
            },
            "kept": None if self.recipe.kept is None else self.recipe.kept.record(),
            "notes": list(self.notes),
            "seq_len": self.seq_len,
        }

    def _share_of(self, kind: str) -> float:
        """The fraction of a kind's units that goes."""
        sites = [site for site in self.model.layout.sites if site.kind == kind]
        return _share(sum(s.units for s in sites), sum(self.widths.of(s) for s in sites))

    def _channels(self) -> dict[str, dict[str, int | list[int]]]:
        """Channels of an MLP, or of every expert; of both where a model has both."""
        counted = {p.name: p.counted_by for p in self.model.architecture.blocks.sites}
        kinds = [site.kind for site in self.model.layout.kinds if site.value is None]
        return {
            CHANNELS.get(kind, kind): {
                "before": _of_blocks(self.dense, counted[kind]),
                "after": _of_blocks(self.pruned, counted[kind]),
            }
            for kind in kinds
        }

    @property
    def alternatives(self) -> dict[str, "Plan"]:
        """The candidates besides this one, among which held-out windows choose."""
        found = Plan.candidates(self.model, self.recipe)
        return {name: plan for name, plan in found.items() if plan.pruned != self.pruned}


def _rules(layout: Layout, recipe: Recipe) -> tuple[str, ...]:
    """How many KV groups stay: the names of the rules, of which held-out windows choose one."""
    asked, kept = recipe.reconstruction.kv_groups, recipe.kept
    given = kept is not None and any(s.key in kept.units for s in layout.sites if s.value)
    if given and asked != "all":
        return ("kept",)  # there is nothing to choose
    return ("uniform", "all") if asked == "held-out" else (asked,)


def _of_blocks(shape: Shape, size: str) -> int | list[int]:
    """A size of every block: one number where all are alike."""
    found = [getattr(shape.at(index), size) for index in range(shape.layers)]
    return found[0] if len(set(found)) == 1 else found


def _share(before: int, after: int) -> float:
    """The fraction that went."""
    return (before - after) / before
