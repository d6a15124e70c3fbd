"""The plan: how many units stay and in which format, decided from the configuration alone."""

from dataclasses import dataclass, replace

from coec.allocation import Importances, Widths, by_importance, shares_for, uniform, whole_attention
from coec.calibration.windows import DEFAULT_SEQ_LEN, resolve_seq_len, with_judges
from coec.errors import OptionError
from coec.models.description import Description
from coec.models.formats import choose_format
from coec.models.layout import Layout, Shape
from coec.models.non_uniform import FILE as CODE
from coec.planning.compute import ComputeConfig
from coec.planning.forecast import Forecast
from coec.planning.machines import Machine
from coec.planning.notes import notes_of
from coec.planning.recipe import Recipe
from coec.planning.sizes import (
    PlanSizes,
    check_recipe,
    check_uniform,
    parameter_budget,
    pruned_sizes,
)

_PLURALS = {"expert": "experts"}
"""What records call a kind of site of which a block has several."""
_HEADS = {"kv_groups": "kv_heads", "query_heads": "heads"}
"""What records call sizes that pruning changes, and the fields of a shape that hold them."""
_BRIEF_ITERATIONS = 3
"""Conjugate-gradient iterations of the one step that a candidate is tried with (docs/LOG.md)."""


@dataclass(frozen=True)
class Plan(PlanSizes):
    """Plan of one pruning run."""

    @classmethod
    def of(cls, model: Description, recipe: Recipe) -> "Plan":
        """Decide widths and output format; the first of several candidates.

        Raises:
            ModelError: the model cannot be pruned.
            OptionError: the recipe does not fit the model, or no format holds the result.
        """
        return next(iter(cls.candidates(model, recipe).values()))

    @classmethod
    def candidates(cls, model: Description, recipe: Recipe) -> dict[str, "Plan"]:
        """Plans among which held-out windows choose, by name; mostly there is one.

        Raises:
            ModelError, OptionError: as in `of`.
        """
        recipe = recipe.opened()
        recipe = replace(recipe, calibration=with_judges(recipe.calibration, model))
        if recipe.kept is not None:
            recipe.kept.check(model.layout)
        check_recipe(model, recipe)
        plans: dict[str, Plan] = {}
        refused: dict[str, OptionError] = {}
        for rule in _rules(model.layout, recipe):
            try:
                plans[rule] = cls._by_rule(model, recipe, rule)
            except OptionError as error:
                refused[rule] = error
        if not plans:
            raise next(iter(refused.values()))
        remarks = tuple(f"kv_groups = {n} was not tried: {error}" for n, error in refused.items())
        plans = {rule: replace(plan, remarks=remarks) for rule, plan in plans.items()}
        # Where a rule removes no group, two plans are the same: the first of them stays.
        first = {plan.pruned: rule for rule, plan in reversed(plans.items())}
        return {rule: plan for rule, plan in plans.items() if rule in first.values()}

    @classmethod
    def _by_rule(cls, model: Description, recipe: Recipe, rule: str) -> "Plan":
        """Plan by one rule for KV groups, within the budget where there is one."""
        pruning, kept = recipe.pruning, recipe.kept
        budget = parameter_budget(model, pruning)
        removed = 0 if budget is None else model.parameters - budget
        later = pruning.allocation != "uniform" and not (kept and kept.covers(model.layout))
        while True:
            if budget is not None:
                pruning = shares_for(model.layout, model.shapes, recipe.pruning, removed, kept)
            if rule == "all":
                widths = whole_attention(model.layout, model.shapes, pruning, kept)
            else:
                widths = uniform(model.layout, pruning, kept)
            plan = replace(cls._of(model, recipe, widths, listed=later), decided=not later)
            if budget is None or plan.parameters_after <= budget:
                return plan
            # The format adds parameters, such as biases of a compensation: remove as many more.
            removed += plan.parameters_after - (model.parameters - removed)

    @classmethod
    def _of(
        cls, model: Description, recipe: Recipe, widths: Widths, *, listed: bool = False
    ) -> "Plan":
        """Choose the format of these widths.

        Args:
            model: the dense model.
            recipe: the settings.
            widths: number of units that stay.
            listed: use a format that lists widths by block, even where all are alike.
        """
        pruned = pruned_sizes(model, widths)
        check_uniform(model, recipe, widths, pruned)
        if listed:
            pruned = pruned.listed()
        adds_everywhere = listed or recipe.reconstruction.propagate
        biased = frozenset(
            site.kind
            for site in model.layout.sites
            if site.bias in model.shapes
            or (recipe.method.adds_bias and (adds_everywhere or widths.removes_from(site)))
        )
        output = choose_format(model.config, pruned, biased=biased, target=recipe.pruning.target)
        seq_len = resolve_seq_len(recipe.calibration.seq_len, model.positions, DEFAULT_SEQ_LEN)
        shapes = Description.of(output.config).shapes
        return cls(model, recipe, widths, pruned, output, shapes, seq_len)

    def allocated(self, importances: Importances) -> "Plan":
        """Decide the widths by importances, with at most as many parameters as this plan has.

        Args:
            importances: one for every unit of every site whose units are not given.
        """
        layout, pruning = self.model.layout, self.recipe.pruning
        shared = [site for site in layout.sites if site.key in importances]
        cut = {site.kind for site in shared if self.widths.removes_from(site)}
        uncut = {site.kind for site in shared} - cut
        widths = by_importance(
            layout,
            self.model.shapes,
            self.widths,
            importances,
            pruning.multiple,
            pruning.own_shares.union(uncut),
            self._unused_budget(),
        )
        try:
            plan = Plan._of(self.model, self.recipe, widths)
        except OptionError:  # the widths came out alike, and no stock format holds just these
            plan = Plan._of(self.model, self.recipe, widths, listed=True)
        return replace(plan, remarks=self.remarks)

    def _unused_budget(self) -> int:
        """Parameters that the budget leaves unused; 0 where the format adds to the model."""
        budget = parameter_budget(self.model, self.recipe.pruning)
        if budget is None:
            return 0
        removed = self.widths.removed(self.model.layout, self.model.shapes)
        adds = self.parameters_after != self.parameters_before - removed
        return 0 if adds else budget - self.parameters_after

    def briefly(self) -> "Plan":
        """Shorten the reconstruction to what shows which of several candidates is best."""
        full = self.recipe.reconstruction
        if not full.reconstruct:
            return self
        iterations = min(full.cg_iterations, _BRIEF_ITERATIONS)
        brief = replace(full, reconstruct=1, cg_iterations=iterations)
        return replace(self, recipe=replace(self.recipe, reconstruction=brief))

    @property
    def alternatives(self) -> dict[str, "Plan"]:
        """The candidates besides this one, among which held-out windows choose."""
        plans = Plan.candidates(self.model, self.recipe)
        return {rule: plan for rule, plan in plans.items() if plan.pruned != self.pruned}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings without effect, and on what a width costs in other programs."""
        return notes_of(self)

    def forecast(self, compute: ComputeConfig, machine: Machine | None = None) -> Forecast:
        """Estimate memory, operations and disk of every phase, and times by a machine's rates.

        Where there are several candidates, each is fitted briefly, and one of them then in full.

        Args:
            compute: device and dtypes of the run (`ComputeConfig.of`).
            machine: the measured machine (`coec.planning.measuring.this_machine`) or a GPU by its
                data sheet (`coec.planning.machines.machine_named`); None for no times.
        """
        plans: list[PlanSizes] = []
        if self.recipe.reconstruction.sequential:
            candidates = Plan.candidates(self.model, self.recipe).values()
            plans = [plan.briefly() for plan in candidates] if len(candidates) > 1 else []
        return Forecast.of(self, compute, machine, plans)

    def record(self) -> dict[str, object]:
        """Account that `--dry-run --json` prints and the report keeps."""
        before, after = self.parameters_before, self.parameters_after
        removed = {site.kind: self._removed(site.kind) for site in self.model.layout.kinds}
        return {
            "model_type": self.model.architecture.model_type,
            "output_model_type": self.output.model_type,
            "relabelled": self.output.relabelled,
            "code": None if self.output.code is None else CODE,
            "loads_in": self.output.loads_in,
            "layers": self.dense.layers,
            "widths": {
                name: {"before": _by_block(self.dense, size), "after": _by_block(self.pruned, size)}
                for name, size in self._size_names().items()
            },
            "parameters": {"before": before, "after": after},
            "removed": {**removed, "parameters": (before - after) / before},
            "kept": None if self.recipe.kept is None else self.recipe.kept.record(),
            "notes": list(self.notes),
            "seq_len": self.seq_len,
        }

    def _removed(self, site_kind: str) -> float:
        """Fraction of a kind's units that is removed."""
        sites = [site for site in self.model.layout.sites if site.kind == site_kind]
        before = sum(site.units for site in sites)
        return (before - sum(map(self.widths.of, sites))) / before

    def _size_names(self) -> dict[str, str]:
        """Fields of a shape that pruning changes, by the names that records have for them."""
        fields = {
            pattern.name: pattern.counted_by for pattern in self.model.architecture.blocks.sites
        }
        channels = [site.kind for site in self.model.layout.kinds if site.value is None]
        return {_PLURALS.get(name, name): fields[name] for name in channels} | _HEADS


def _rules(layout: Layout, recipe: Recipe) -> tuple[str, ...]:
    """Names of the rules for the number of KV groups, of which held-out windows choose one."""
    rule, kept = recipe.reconstruction.kv_groups, recipe.kept
    groups_given = kept is not None and any(s.key in kept.units for s in layout.sites if s.value)
    if groups_given and rule != "all":
        return ("kept",)  # the user gave the groups: there is nothing to choose
    return ("uniform", "all") if rule == "held-out" else (rule,)


def _by_block(shape: Shape, size: str) -> int | list[int]:
    """A size in every block: one number where all are alike."""
    sizes = [getattr(shape.at(index), size) for index in range(shape.layers)]
    return sizes[0] if len(set(sizes)) == 1 else sizes
