"""The plan: how many units stay, in which format, where and in which dtypes it is computed."""

from dataclasses import replace

import torch

from coec.config import without_effect
from coec.config.recipe import Recipe, memory_size, parameter_count
from coec.devices import (
    DTYPES,
    choose_device,
    choose_forward_dtype,
    choose_solve_dtype,
    stored_dtype,
)
from coec.errors import OptionError
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.formats import OutputFormat, choose_format
from coec.models.layout import Shape
from coec.planning.by_importance import Importances, by_importance
from coec.planning.checks import check_dropped, check_model, check_widths
from coec.planning.decisions import Decisions
from coec.planning.kept import IDLE, KeptUnits
from coec.planning.widths import Rounding, Shares, Widths, shares_for, uniform
from coec.text.windows import DEFAULT_SEQ_LEN, resolve_seq_len


class Plan(Decisions):
    """Plan of one pruning run, which is decided before any work."""

    @classmethod
    def of(cls, model: Description, recipe: Recipe) -> "Plan":
        """Decide widths, output format, device and dtypes.

        Args:
            model: the dense model, opened or described.
            recipe: the settings.

        Raises:
            ModelError: the model cannot be pruned.
            OptionError: the recipe does not fit the model, or no format holds the result.
        """
        kept = None if recipe.kept is None else KeptUnits.named(recipe.kept, model)
        given = "attention_units" in recipe.model_fields_set and recipe.attention_units != "auto"
        if kept is not None and kept.attention_units and not given:
            return cls._counted(model.counted_in(kept.attention_units), recipe, kept)
        if recipe.attention_units != "auto":
            return cls._counted(model.counted_in(recipe.attention_units), recipe, kept)
        # Query heads if no whole group would be removed, or if fewer groups could not be divided
        # over the numbers of GPUs that divide the dense model's
        groups = cls._counted(model.counted_in("groups"), recipe, kept)
        before, after = (replace(s, ffn=0, expert_ffn=0) for s in (groups.dense, groups.pruned))
        if after.kv_heads < before.kv_heads and set(before.gpus()) <= set(after.gpus()):
            return groups
        try:
            heads = cls._counted(model.counted_in("heads"), recipe, kept)
        except OptionError:  # every group has one head
            return groups
        return heads if heads.pruned.group < before.group else groups

    @classmethod
    def _counted(cls, model: Description, recipe: Recipe, kept: KeptUnits | None) -> "Plan":
        """Plan for a model whose units of attention are decided."""
        covered = kept is not None and kept.covers(model.layout)
        if kept is not None:
            kept.check(model.layout)
            for name in IDLE if covered else ():
                if name in recipe.model_fields_set:
                    named = f"with '{kept.source}', which names units of every site"
                    raise without_effect(name, named)
        device = choose_device(recipe.device)
        stored = model.dtype if isinstance(model, Dense) else stored_dtype(model.config)
        dropped = () if kept is None else kept.dropped
        if recipe.drop_blocks:
            if kept is not None and dropped:
                leaving = f"with '{kept.source}', which leaves out blocks"
                raise without_effect("drop_blocks", leaving)
            last = model.shape.layers - 1
            dropped = tuple(range(last - recipe.drop_blocks, last))
        attention = recipe.attention_sparsity
        shares = Shares(
            recipe.sparsity, recipe.sparsity if attention is None else attention,
            recipe.expert_sparsity, Rounding(recipe.multiple, recipe.tensor_parallel),
            model.shape.expert_groups,
        )  # fmt: skip
        forward = choose_forward_dtype(
            recipe.forward_dtype, stored, device, summed=recipe.reconstruct > 0
        )
        check_model(model, recipe, forward)
        plan = cls(
            model=model,
            recipe=recipe,
            kept=kept,
            shares=shares,
            widths=Widths({}),
            pruned=model.shape,
            output=OutputFormat(model.config, None, {}, None),
            pruned_shapes=model.shapes,
            seq_len=resolve_seq_len(recipe.seq_len, model.positions, DEFAULT_SEQ_LEN),
            device=device,
            home=device,
            stored=stored,
            forward=forward,
            solve=choose_solve_dtype(device),
            written=DTYPES[recipe.dtype] if recipe.dtype else stored,
            decided=not recipe.by_block or covered,
            dropped=dropped,
            chosen=not recipe.drop_blocks,
        )
        plan = plan._within_budget()
        if kept is not None and covered and recipe.by_block and plan.pruned.uniform:
            alike = f"with '{kept.source}', whose widths are alike by block"
            raise without_effect("by_block", alike)
        return plan

    def _within_budget(self) -> "Plan":
        """Return the plan with widths and format, within the budget if there is one."""
        budget, layout, costs = self.budget, self.model.layout, self.costs
        elsewhere = bool(self.dropped) or self.vocabulary != self.model.vocabulary
        if budget is None:
            return self._with(uniform(layout, self.shares, self.kept, elsewhere=elsewhere))
        removed, said = costs.whole - budget, " = ".join(self.recipe.limit or ())
        inside = sum(costs.block(layout.blocks[n]) for n in self.dropped)
        if not self.chosen and removed <= inside:
            raise OptionError(
                f"drop_blocks = {len(self.dropped)} alone leaves fewer parameters than {said}: "
                "leave out one of the two"
            )
        given = "attention_sparsity" in self.recipe.model_fields_set
        # Attention stays whole if the budget can be met so → the same fraction of both
        alike = self.recipe.attention_sparsity is None
        ways = [alike] if given or alike else [False, True]
        plan = self
        while True:
            # Parameters to remove → shares of units → widths → format, until its own fit too
            tried = ((way, shares_for(
                costs, self.shares, removed, attention=way, kept=self.kept, dropped=self.dropped,
            )) for way in ways)  # fmt: skip
            way, shares = next(((w, s) for w, s in tried if s is not None), (None, None))
            if shares is None:
                vocabulary = self.model.vocabulary_parameters / self.model.parameters
                raise OptionError(
                    f"{said} cannot be met, however much is removed "
                    f"(embedding and head, which stay, are {vocabulary:.0%} of the parameters): "
                    "allow more, or take a smaller multiple_of"
                )
            widths = uniform(layout, shares, self.kept, elsewhere=elsewhere)
            plan = replace(self, shares=shares)._with(widths)
            if way and len(ways) > 1:
                remark = f"attention loses units too: {said} cannot be met "
                plan = replace(plan, remarks=(remark + "by MLP channels alone",))
            if plan.size_after <= budget:
                return plan
            # The format adds parameters, such as biases of a compensation: remove that number too.
            removed += plan.size_after - (costs.whole - removed)

    def _with(self, widths: Widths, *, listed: bool = False) -> "Plan":
        """Return the plan with these widths, in a format that holds them; `listed` asks for one
        that lists them by block.
        """
        # Widths → sizes by block → sites that get a bias → the format that holds both
        model, recipe = self.model, self.recipe
        pruned = _pruned_sizes(model, widths)
        _check_uniform(self, widths, pruned)
        listed = listed or not self.decided
        if listed:
            pruned = pruned.listed()
        adds_everywhere = listed or self.propagates
        biased = frozenset(
            site.kind
            for site in model.layout.sites
            if (site.bias in model.shapes and not model.architecture.inferred)
            or (self.method.adds_bias and (adds_everywhere or widths.removes_from(site)))
        )
        around = model.around
        output = choose_format(
            model.config, pruned, model.architecture, biased=biased, target=recipe.target,
            relabel=around is None, fewer_blocks=bool(self.dropped),
        )  # fmt: skip
        built = Description.of(output.config, model.architecture)
        if model.architecture.inferred:
            check_widths(model, widths, built.shapes)
            if self.dropped:
                check_dropped(model, output.config, built.shapes, self.dropped)
        by_token = {n: (self.vocabulary, *built.shapes[n][1:]) for n in model.by_token}
        shapes = built.shapes | {name: torch.Size(shape) for name, shape in by_token.items()}
        if around is not None:
            running = {name: t.shape for name, t in built.skeleton().state_dict().items()}
            around.check(around.with_sizes(model.config, output.config), running)
        if recipe.tensor_parallel not in (possible := pruned.gpus()):
            given = [n for n in ("kept", "attention_sparsity") if n in recipe.model_fields_set]
            raise OptionError(
                f"these widths cannot be divided over tensor_parallel = {recipe.tensor_parallel} "
                f"GPUs, but over {', '.join(map(str, possible))}: take one of these"
                + (f", or leave out {' and '.join(given)}" if given else "")
            )
        return replace(self, widths=widths, pruned=pruned, output=output, pruned_shapes=shapes)

    def without(self, blocks: tuple[int, ...]) -> "Plan":
        """Return the plan that leaves these blocks out, within the same budget."""
        return replace(self, dropped=blocks, chosen=True)._within_budget()

    def with_widths(self, importances: Importances) -> "Plan":
        """Decide the widths by importances, with at most the size that this plan has.

        Args:
            importances: one for every unit of every site in `shared`.
        """
        cut = {site.kind for site in self.shared if self.widths.removes_from(site)}
        apart = {site.kind for site in self.shared} - cut
        if self.recipe.attention_sparsity is not None:
            apart.add("attention")
        widths = by_importance(
            self.costs,
            self.widths,
            {site.key: importances[site.key] for site in self.shared},
            self.shares.rounding,
            frozenset(apart),
            self._unused_budget(),
        )
        decided = replace(self, decided=True)
        try:
            return decided._with(widths)
        except OptionError:  # the widths came out alike, and no stock format holds just these
            return decided._with(widths, listed=True)

    @property
    def budget(self) -> int | None:
        """Largest size that may be left; None if sparsity decides.

        A budget of memory has room for the result in the dtype written, and for a multimodal
        model's other weights.

        Raises:
            OptionError: nothing would be removed, or nothing can be left.
        """
        if self.recipe.limit is None:
            return None
        name, text = self.recipe.limit
        model, whole = self.model, self.costs.whole
        dense = replace(self.costs, context=0, rows=0).whole
        if memory := memory_size(text):
            around = 0 if model.around is None else model.around.outside()
            budget = memory // self.written.itemsize - around
        else:
            count = parameter_count(text)
            budget = int(count * dense if count < 1 else count)
        if not 0 < budget < whole:
            context = self.costs.context
            cache = (
                f", with the keys and values of context = {context:,} tokens," if context else ""
            )
            room = "has room for no parameter" if budget < 1 else "removes nothing"
            if budget > 0 and self.costs.rows < 0:
                room = f"removes nothing more than vocabulary = {self.vocabulary:,}"
            raise OptionError(
                f"{name} = {text}{cache} {room} of this model's {dense:,}: allow "
                + ("more" if budget < 1 else "less")
            )
        return budget

    def _unused_budget(self) -> int:
        """Size that the budget leaves unused; 0 if the format adds to the model."""
        # A format that adds biases or similar uses the rest itself.
        unlike = self.size_after != self.costs.whole - self.widths.removed(self.costs, self.dropped)
        return 0 if self.budget is None or unlike else self.budget - self.size_after


def _check_uniform(plan: Plan, widths: Widths, pruned: Shape) -> None:
    """Raise OptionError if widths differ by block without `by_block`."""
    model = plan.model
    if pruned.uniform or plan.recipe.by_block or model.architecture.by_block:
        return
    by_site = {name: set(widths.everywhere(name)) for _, name in widths.kept}
    name, counts = next((name, counts) for name, counts in by_site.items() if len(counts) > 1)
    source = "" if plan.kept is None else f" in '{plan.kept.source}'"
    raise OptionError(
        f"the widths of {name}{source} differ by block ({min(counts):,} to {max(counts):,}), which "
        "no stock format holds: keep the same number in every block"
        + (", or set by_block=True" if model.listed and not model.layout.experts else "")
    )


def _pruned_sizes(model: Description, widths: Widths) -> Shape:
    """Sizes that follow from widths; a kind of site that a block lacks gets its widest elsewhere.

    Raises OptionError if experts of one block keep different numbers of channels.
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
