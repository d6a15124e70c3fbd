"""The plan: how many units stay and in which format, decided from the configuration alone."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from coec.allocation.by_importance import Importances, by_importance
from coec.allocation.uniform import shares_for, uniform, whole_attention
from coec.allocation.widths import Rounding, Widths, parameters_inside
from coec.calibration.windows import DEFAULT_SEQ_LEN, resolve_seq_len
from coec.errors import OptionError
from coec.models.depth import renumbered
from coec.models.description import Description
from coec.models.formats import OutputFormat, choose_format
from coec.models.layout import QUANTISED_COLUMNS, Layout, Shape, Site
from coec.models.non_uniform import FILE as CODE
from coec.planning.notes import notes_of
from coec.planning.recipe import Recipe
from coec.planning.resolve import parameter_budget, resolve
from coec.settings import Reconstruction
from coec.settings.parts import AttentionUnits
from coec.streaming.statistics import Statistics

TRIED_TOKENS = 8192
"""Tokens on which candidates are compared, besides those of the validation windows."""
TRIED_SHARE, TRIED_BLOCKS = 0.25, 4
"""Share of the blocks that are pruned where candidates are compared, and the fewest of them."""
_PLURALS = {"expert": "experts"}
"""What records call a kind of site of which a block has several."""
_HEADS = {"kv_groups": "kv_heads", "query_heads": "heads"}
"""What records call sizes that pruning changes, and the fields of a shape that hold them."""


@dataclass(frozen=True)
class Plan:
    """Plan of one pruning run.

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
        dropped: blocks that are left out; until they are `chosen`, as many of the last but one.
            `output` and `pruned_shapes` still have all blocks.
        sparsity: fraction that goes where no kind of site has its own; a budget decides it.
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
    dropped: tuple[int, ...] = ()
    chosen: bool = True
    sparsity: float = 0.0

    @classmethod
    def of(cls, model: Description, recipe: Recipe, statistics: Statistics | None = None) -> "Plan":
        """Decide widths and output format; the first of several candidates.

        Args:
            model: the dense model.
            recipe: the settings, as the user gave them or resolved already.
            statistics: sums that take the place of a calibration text.

        Raises:
            ModelError: the model cannot be pruned.
            OptionError: the recipe does not fit the model, or no format holds the result.
        """
        return next(iter(cls.candidates(model, recipe, statistics).values()))

    @classmethod
    def candidates(
        cls, model: Description, recipe: Recipe, statistics: Statistics | None = None
    ) -> dict[str, "Plan"]:
        """Plans among which validation windows choose, by name; mostly there is one.

        Raises:
            ModelError, OptionError: as in `of`.
        """
        if recipe.pruning.attention_units == "auto":
            return cls._by_units(model, recipe, statistics)
        model = model.counted_in(recipe.pruning.attention_units)
        recipe = resolve(recipe, model, statistics)
        # A rule that cannot be planned is left out and named, unless none can.
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
    def _by_units(
        cls, model: Description, recipe: Recipe, statistics: Statistics | None
    ) -> dict[str, "Plan"]:
        """Plan with whole KV groups, or with query heads where these are served better.

        They are where no group would go, or where a server can divide those that stay over fewer
        GPUs than the dense model's. Units that a folder names are counted as it counts them.
        """
        recipe = recipe.opened()

        def planned(units: AttentionUnits) -> dict[str, Plan]:
            pruning = replace(recipe.pruning, attention_units=units)
            return cls.candidates(model, replace(recipe, pruning=pruning), statistics)

        if recipe.kept is not None and (counted := recipe.kept.attention_units):
            return planned(counted)
        groups = planned("groups")
        plan = next(iter(groups.values()))
        before, after = (replace(size, ffn=0, expert_ffn=0) for size in (plan.dense, plan.pruned))
        if after.kv_heads < before.kv_heads and set(before.gpus()) <= set(after.gpus()):
            return groups
        try:
            heads = planned("heads")
        except OptionError:  # every group has one head
            return groups
        fewer = next(iter(heads.values())).pruned.group < before.group
        return heads if fewer else groups

    @classmethod
    def _by_rule(
        cls,
        model: Description,
        recipe: Recipe,
        rule: str,
        dropped: tuple[int, ...] | None = None,
    ) -> "Plan":
        """Plan by one rule for KV groups, within the budget where there is one.

        Until it is known which blocks are left out, as many of the last but one are.
        """
        pruning, kept = recipe.pruning, recipe.kept
        budget, last = parameter_budget(model, pruning), model.shape.layers - 1
        chosen = dropped is not None or not pruning.drop_blocks
        if dropped is None:
            dropped = tuple(range(last - pruning.drop_blocks, last))
        removed = 0 if budget is None else model.parameters - budget
        inside = sum(parameters_inside(model.layout.blocks[n], model.shapes) for n in dropped)
        if budget is not None and not chosen and removed <= inside:
            raise OptionError(
                f"drop_blocks = {pruning.drop_blocks} alone leaves fewer parameters than "
                f"{pruning.budget}: leave out one of the two"
            )
        shared = recipe.allocation.importance is not None
        later = shared and not (kept and kept.covers(model.layout))
        # Parameters to remove → shares of units → widths → format, until the format's own fit too
        while True:
            if budget is not None:
                pruning = shares_for(
                    model.layout, model.shapes, recipe.pruning, removed, kept, dropped
                )
            if rule == "all":
                widths = whole_attention(model.layout, model.shapes, pruning, kept)
            else:
                widths = uniform(model.layout, pruning, kept)
            plan = cls._of(model, recipe, widths, listed=later)
            plan = replace(
                plan, decided=not later, dropped=dropped, chosen=chosen, sparsity=pruning.sparsity
            )
            every = plan.parameters_after
            if budget is None or every <= budget:
                return plan
            # The format adds parameters, such as biases of a compensation: remove as many more.
            removed += every - (model.parameters - removed)

    def without(self, blocks: tuple[int, ...], rule: str) -> "Plan":
        """Return the plan by a rule that leaves these blocks out, within the same budget."""
        if self.recipe.pruning.budget is None:
            return replace(self, dropped=blocks, chosen=True)
        plan = Plan._by_rule(self.model, self.recipe, rule, blocks)
        return replace(plan, remarks=self.remarks)

    @classmethod
    def _of(
        cls, model: Description, recipe: Recipe, widths: Widths, *, listed: bool = False
    ) -> "Plan":
        """Choose the format of these widths; `listed` asks for one that lists them by block."""
        # Widths → sizes by block → sites that get a bias → the format that holds both
        pruned = _pruned_sizes(model, widths)
        _check_uniform(model, recipe, widths, pruned)
        if listed:
            pruned = pruned.listed()
        adds_everywhere = listed or recipe.reconstruction.propagate
        biased = frozenset(
            site.kind
            for site in model.layout.sites
            if site.bias in model.shapes
            or (recipe.method.adds_bias and (adds_everywhere or widths.removes_from(site)))
        )
        around = model.around
        output = choose_format(
            model.config, pruned, biased=biased, target=recipe.pruning.target,
            relabel=around is None, fewer_blocks=recipe.pruning.drop_blocks > 0,
        )  # fmt: skip
        seq_len = resolve_seq_len(recipe.calibration.seq_len, model.positions, DEFAULT_SEQ_LEN)
        shapes = Description.of(output.config).shapes
        if around is not None:
            around.check(around.with_sizes(model.config, output.config), shapes)
        _check_divides(pruned, recipe.pruning.tensor_parallel)
        return cls(model, recipe, widths, pruned, output, shapes, seq_len)

    def allocated(self, importances: Importances) -> "Plan":
        """Decide the widths by importances, with at most as many parameters as this plan has.

        Args:
            importances: one for every unit of every site whose units are not given.
        """
        pruning = self.recipe.pruning
        shared = [site for site in self.shared if site.key in importances]
        importances = {site.key: importances[site.key] for site in shared}
        cut = {site.kind for site in shared if self.widths.removes_from(site)}
        uncut = {site.kind for site in shared} - cut
        widths = by_importance(
            self.model,
            self.widths,
            importances,
            Rounding.of(pruning),
            pruning.own_shares.union(uncut),
            self._unused_budget(),
        )
        try:
            plan = Plan._of(self.model, self.recipe, widths)
        except OptionError:  # the widths came out alike, and no stock format holds just these
            plan = Plan._of(self.model, self.recipe, widths, listed=True)
        return replace(
            plan,
            remarks=self.remarks,
            dropped=self.dropped,
            sparsity=self.sparsity,
            chosen=self.chosen,
        )

    @property
    def shared(self) -> tuple[Site, ...]:
        """Sites whose units are distributed over the blocks, where their widths differ."""
        listed = () if self.recipe.kept is None else self.recipe.kept.units
        alike = self.recipe.pruning.target == "vllm"  # which has as many heads in every block
        return tuple(
            site
            for site in self.model.layout.sites
            if site.key not in listed
            and site.block not in self.dropped
            and not (alike and site.value is not None)
        )

    def _unused_budget(self) -> int:
        """Parameters that the budget leaves unused; 0 where the format adds to the model."""
        budget = parameter_budget(self.model, self.recipe.pruning)
        removed = self.widths.removed(self.model.layout, self.model.shapes, self.dropped)
        # A format that adds biases or such takes what is left itself.
        unlike = self.parameters_after != self.parameters_before - removed
        if budget is None or unlike:
            return 0
        return budget - self.parameters_after

    def briefly(self) -> "Plan":
        """Leave out training and most text: closed forms show which of several candidates leads."""
        full = self.recipe.reconstruction
        weights = full.token_weights if full.propagate else "equal"
        brief = Reconstruction(
            preset=full.preset, propagate=full.propagate, token_weights=weights,
            kv_groups=full.kv_groups,
        )  # fmt: skip
        calibration = self.recipe.calibration
        samples = min(calibration.samples, max(2, TRIED_TOKENS // self.seq_len))
        few = replace(calibration, samples=samples)
        return replace(self, recipe=replace(self.recipe, reconstruction=brief, calibration=few))

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
        return sum(
            shape.numel()
            for name, shape in self.pruned_shapes.items()
            if renumbered(name, self.dropped) is not None
        )

    @property
    def tokens(self) -> int:
        """Tokens of all calibration windows."""
        return self.recipe.calibration.samples * self.seq_len

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings without effect, and on what a width costs in other programs."""
        pruning = replace(self.recipe.pruning, sparsity=self.sparsity)
        recipe = replace(self.recipe, pruning=pruning)
        notes = notes_of(self.model, recipe, self.widths, self.seq_len, self.decided)
        return (*self.remarks, *notes)

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
            "tensor_parallel": {
                "gpus": self.pruned.gpus(),
                "gpus_int4": self.pruned.gpus(columns=QUANTISED_COLUMNS),
            },
            "layers": self.dense.layers,
            "dropped_blocks": list(self.dropped) if self.chosen else None,
            "inside": self.model.around.name if self.model.around else None,
            "widths": {
                name: {
                    "before": _by_block(self.dense, size),
                    "after": _by_block(self.pruned, size, self.dropped),
                }
                for name, size in self._size_names().items()
            },
            "parameters": {"before": before, "after": after},
            "removed": {**removed, "parameters": (before - after) / before},
            "kept": None if self.recipe.kept is None else self.recipe.kept.record(),
            "notes": list(self.notes),
            "seq_len": self.seq_len,
        }

    def _removed(self, site_kind: str) -> float:
        sites = [
            site
            for site in self.model.layout.sites
            if site.kind == site_kind and site.block not in self.dropped
        ]
        before = sum(site.units for site in sites)
        return (before - sum(map(self.widths.of, filter(self.widths.stays, sites)))) / before

    def _size_names(self) -> dict[str, str]:
        """Fields of a shape that pruning changes, by the names that records have for them."""
        fields = {
            pattern.name: pattern.counted_by for pattern in self.model.architecture.blocks.sites
        }
        channels = [site.kind for site in self.model.layout.kinds if site.value is None]
        sizes = {_PLURALS.get(name, name): fields[name] for name in channels}
        whole_experts = {"whole_experts": "experts"} if self.model.layout.experts else {}
        return sizes | whole_experts | _HEADS


def tried_blocks(layers: int) -> list[int]:
    """Return the indices of the blocks that are pruned to compare candidates, evenly spaced."""
    count = min(layers, max(TRIED_BLOCKS, math.ceil(TRIED_SHARE * layers)))
    return [number * layers // count for number in range(count)]


def _rules(layout: Layout, recipe: Recipe) -> tuple[str, ...]:
    """Names of the rules for the number of KV groups, of which validation windows choose one."""
    rule, kept = recipe.reconstruction.kv_groups, recipe.kept
    groups_given = kept is not None and any(s.key in kept.units for s in layout.sites if s.value)
    if groups_given and rule != "all":
        return ("kept",)  # the user gave the groups: there is nothing to choose
    if rule != "held-out":
        return (rule,)
    # Where blocks share groups by what these cost, that starts at `uniform` (docs/lab/LOG.md).
    by_cost = recipe.allocation.runs_models and recipe.pruning.target != "vllm"
    return ("uniform",) if by_cost else ("uniform", "all")


def _by_block(shape: Shape, size: str, dropped: Collection[int] = ()) -> int | list[int]:
    """A size in every block that is not dropped: one number where all are alike."""
    stay = (index for index in range(shape.layers) if index not in dropped)
    sizes = [getattr(shape.at(index), size) for index in stay]
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _check_uniform(model: Description, recipe: Recipe, widths: Widths, pruned: Shape) -> None:
    """Raise OptionError where widths differ by block without `non_uniform`."""
    if pruned.uniform or recipe.pruning.non_uniform:
        return
    by_site = {name: set(widths.everywhere(name)) for _, name in widths.kept}
    name, counts = next((name, counts) for name, counts in by_site.items() if len(counts) > 1)
    source = "" if recipe.kept is None else f" in '{recipe.kept.source}'"
    if recipe.kept is not None and not recipe.kept.covers(model.layout):
        source = f", in '{recipe.kept.source}' and by fractions elsewhere,"
    code = ", or set non_uniform to write code beside the weights"
    raise OptionError(
        f"the widths of {name}{source} differ by block ({min(counts):,} to {max(counts):,}), which "
        "no stock format holds: keep as many units in every block"
        + ("" if model.architecture.blocks.experts else code)
    )


def _check_divides(pruned: Shape, gpus: int) -> None:
    """Raise OptionError where widths that somebody named cannot be divided over so many GPUs."""
    if gpus not in (possible := pruned.gpus()):
        raise OptionError(
            f"these widths cannot be divided over tensor_parallel = {gpus} GPUs, but over "
            f"{', '.join(map(str, possible))}: take one of these, or leave out what keeps them "
            "(kept, attention_sparsity = 0, mlp_sparsity = 0)"
        )


def _pruned_sizes(model: Description, widths: Widths) -> Shape:
    """Sizes that follow from widths; a kind of site that a block lacks gets its widest elsewhere.

    Raises OptionError where experts of one block keep different numbers of channels.
    """
    size_names = {pattern.name: pattern.counted_by for pattern in model.architecture.blocks.sites}
    # Sites of a block that share a size, as its experts do, must keep alike.
    kept: dict[tuple[int, str], set[int]] = {}
    for site in model.layout.sites:
        name = "group" if site.groups else size_names[site.kind]
        kept.setdefault((site.block, name), set()).add(widths.of(site) // site.ranges)
    widest: dict[str, int] = {}
    by_block: list[dict[str, int]] = [{} for _ in range(model.shape.layers)]
    for (block, name), counts in kept.items():
        if len(counts) > 1:
            raise OptionError(
                f"experts of one block keep {min(counts):,} to {max(counts):,} channels, which no "
                "format holds: keep as many in every expert"
            )
        width = max(counts)
        by_block[block][name] = width
        widest[name] = max(width, widest.get(name, 0))
    pruned = model.shape.with_blocks([widest | sizes for sizes in by_block])
    return pruned if widths.experts is None else replace(pruned, experts=widths.experts)
