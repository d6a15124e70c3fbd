"""The plan: how many units stay, in which format, where and in which dtypes it is computed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from coec.config.recipe import Recipe, memory_size, parameter_count
from coec.devices import (
    DTYPES,
    choose_device,
    choose_forward_dtype,
    choose_solve_dtype,
    dtype_name,
    stored_dtype,
)
from coec.errors import OptionError
from coec.events import as_html
from coec.methods import Method
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.formats import OutputFormat, choose_format, renumbered, without_blocks
from coec.models.layout import QUANTISED_COLUMNS, BlockLayout, Shape, Site, in_words
from coec.models.names import Source
from coec.models.non_uniform import FILE as CODE
from coec.models.renumbering import VOCABULARY
from coec.planning.by_importance import Importances, by_importance
from coec.planning.checks import check_model, check_widths, notes_of
from coec.planning.kept import KeptUnits
from coec.planning.widths import Costs, Rounding, Shares, Widths, shares_for, uniform
from coec.text.windows import DEFAULT_SEQ_LEN, resolve_seq_len, validation_count

_PLURALS = {"expert": "experts"}
"""What records call a kind of site of which a block has several."""
_HEADS = {"kv_groups": "kv_heads", "query_heads": "heads"}
"""What records call sizes that pruning changes, and the fields of a shape that hold them."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Plan of one pruning run.

    Attributes:
        model: the dense model as its configuration describes it.
        recipe: the settings.
        kept: the units that the user names, if any.
        shares: fractions that are removed; a budget decides them.
        widths: number of units that every site keeps.
        pruned: the sizes afterwards.
        output: the format of the result.
        pruned_shapes: every tensor that the result stores, of dropped blocks too.
        seq_len: tokens of a calibration window.
        device: where it is computed.
        home: where hidden states wait between blocks.
        stored, forward, solve, written: dtypes of the dense weights, of the forward passes, of the
            iterations of a compensation, and of the result.
        decided: False if the widths wait for statistics; until then they are uniform ones with the
            same number of parameters.
        dropped: blocks that are left out; until they are `chosen`, the same number of the last but
            one.
        remarks: notes on how the plan was made.
    """

    model: Description
    recipe: Recipe
    kept: KeptUnits | None
    shares: Shares
    widths: Widths
    pruned: Shape
    output: OutputFormat
    pruned_shapes: dict[str, torch.Size]
    seq_len: int
    device: torch.device
    home: torch.device
    stored: torch.dtype
    forward: torch.dtype
    solve: torch.dtype
    written: torch.dtype
    decided: bool = True
    dropped: tuple[int, ...] = ()
    chosen: bool = True
    remarks: tuple[str, ...] = ()

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
        if kept is not None:
            kept.check(model.layout)
        device = choose_device(recipe.device)
        stored = model.dtype if isinstance(model, Dense) else stored_dtype(model.config)
        dropped = () if kept is None else kept.dropped
        if recipe.drop_blocks:
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
            solve=choose_solve_dtype("auto", device),
            written=DTYPES[recipe.dtype] if recipe.dtype else stored,
            decided=not recipe.by_block or (kept is not None and kept.covers(model.layout)),
            dropped=dropped,
            chosen=not recipe.drop_blocks,
        )
        return plan._within_budget()

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
        by_token = {n: (self.vocabulary, *built.shapes[n][1:]) for n in model.by_token}
        shapes = built.shapes | {name: torch.Size(shape) for name, shape in by_token.items()}
        if around is not None:
            running = {name: t.shape for name, t in built.skeleton().state_dict().items()}
            around.check(around.with_sizes(model.config, output.config), running)
        if recipe.tensor_parallel not in (possible := pruned.gpus()):
            raise OptionError(
                f"these widths cannot be divided over tensor_parallel = {recipe.tensor_parallel} "
                f"GPUs, but over {', '.join(map(str, possible))}: take one of these, or leave out "
                "kept and attention_sparsity"
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
    def shared(self) -> tuple[Site, ...]:
        """Sites whose units are distributed over the blocks, if their widths differ."""
        named = () if self.kept is None else self.kept.units
        alike = self.recipe.target == "vllm"  # which has the same heads in every block
        return tuple(
            site
            for site in self.model.layout.sites
            if site.key not in named
            and site.block not in self.dropped
            and not (alike and site.value is not None)
        )

    @cached_property
    def costs(self) -> Costs:
        """Sizes in which a budget counts: of memory, with the keys and values of `context`."""
        in_memory = self.recipe.budget is not None and memory_size(self.recipe.budget)
        return Costs(
            self.model,
            context=self.recipe.context if in_memory else 0,
            active=self.recipe.budget_active is not None,
            rows=self.vocabulary - self.model.vocabulary,
        )

    @property
    def size_after(self) -> int:
        """Size of the pruned model in what a budget counts."""
        staying = [block.index for block in self.blocks]
        cached = replace(self.model, shape=self.pruned).cached(staying)
        count = self.costs.count(self._shapes_after, self.pruned.experts)
        return count + self.costs.context * cached

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

    @cached_property
    def method(self) -> Method:
        """The compensation, with the needs that it declares."""
        return Method.of(self.recipe.compensation)

    @property
    def propagates(self) -> bool:
        """True if blocks are calibrated on the inputs that the pruned model has."""
        return self.recipe.propagate and not self.model.architecture.adds

    @property
    def trains(self) -> bool:
        """True if blocks are trained."""
        return self.recipe.reconstruct > 0 and not self.model.reads_tokens

    @property
    def sequential(self) -> bool:
        """True if a block depends on the blocks before it, so that the pruned model is run too."""
        return self.propagates or self.trains

    @property
    def blocks(self) -> list[BlockLayout]:
        """The blocks that stay."""
        return [block for block in self.model.layout.blocks if block.index not in self.dropped]

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the result."""
        return self.recipe.pad_vocabulary or self.recipe.vocabulary or self.model.vocabulary

    @property
    def keeps_blocks(self) -> bool:
        """True if every block stays as it is."""
        if self.dropped or self.widths.experts or not self.decided:
            return False
        return not any(map(self.widths.removes_from, self.model.layout.sites))

    @cached_property
    def pruned_model(self) -> Description:
        """The pruned model as its configuration describes it, dropped blocks included."""
        return Description.of(self.output.config, self.model.architecture)

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
        return sum(shape.numel() for shape in self._shapes_after.values())

    @property
    def _shapes_after(self) -> dict[str, torch.Size]:
        """Shapes of the tensors of the result, by their names there."""
        return {stored: self.pruned_shapes[name] for stored, name in self.stored_names.items()}

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """Names of the tensors of the result, and their names before blocks were dropped."""
        if not self.dropped:
            return {name: name for name in self.pruned_shapes}
        renamed = {renumbered(name, self.dropped): name for name in self.pruned_shapes}
        return {stored: name for stored, name in renamed.items() if stored is not None}

    @property
    def sources(self) -> dict[str, Source]:
        """Names of the tensors in the files of the result, and what they are made of."""
        written: Mapping[str, Source] = self.pruned_model.names.written
        if self.dropped and written:
            config = without_blocks(self.output.config, self.dropped)
            written = Description.of(config, self.model.architecture).names.written
        before = self.stored_names
        if not written:
            return dict(before)
        return {
            file: before[source]
            if isinstance(source, str)
            else replace(source, names=tuple(before[name] for name in source.names))
            for file, source in written.items()
            if not isinstance(source, str) or source in before
        }

    @property
    def tokens(self) -> int:
        """Tokens of all calibration windows."""
        return self.recipe.samples * self.seq_len

    @property
    def validation_count(self) -> int:
        """Number of validation windows."""
        return validation_count(self.recipe.samples, self.recipe.holdout)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings without effect, and on the costs of a width in other programs."""
        undecided = () if self.decided else (
            "the calibration text decides the widths of every block; these are uniform ones with "
            "the same number of parameters",
        )  # fmt: skip
        released = () if self.model.released is None else (
            f"the weights are released in {self.model.released}, and {dtype_name(self.written)} is "
            "written: quantise the result again if it is to be as small (docs/QUANTISE.md)",
        )  # fmt: skip
        notes = notes_of(self.model, self.recipe, self.kept, self.shares, self.widths, self.tokens)
        return (*self.remarks, *released, *undecided, *notes)

    def __repr__(self) -> str:
        rows = self._summary()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        """Return the summary as a table, for notebooks."""
        return as_html(self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        """Return names and values of what matters most, ten at most."""
        record, before, after = self.record(), self.parameters_before, self.parameters_after
        widths = [
            (name.replace("_", " "), f"{in_words(width['before'])} → {in_words(width['after'])}")
            for name, width in record["widths"].items()
            if width["before"] != width["after"]
        ]
        good = [loader for loader, finding in self.output.loads_in.items() if finding == "yes"]
        return [
            ("parameters", f"{before:,} → {after:,} ({after / before:.1%})"),
            ("blocks", f"{self.dense.layers} → {self.dense.layers - len(self.dropped)}"),
            *widths,
            ("stored as", self.output.model_type),
            ("loads in", ", ".join(good)),
            ("computed on", f"{self.device}, in {dtype_name(self.forward)}"),
            ("calibration", f"{self.recipe.samples} × {self.seq_len} tokens"),
        ]

    def record(self) -> dict[str, Any]:
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
            }
            | self._vocabulary_sizes(),
            "parameters": {"before": before, "after": after},
            "active": self._active() if self.model.layout.experts else None,
            "removed": {**removed, "parameters": (before - after) / before},
            "kept": None if self.kept is None else self.kept.record(),
            "notes": list(self.notes),
            "seq_len": self.seq_len,
        }

    def _vocabulary_sizes(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the vocabulary, if it changes."""
        sizes = {"before": self.model.vocabulary, "after": self.vocabulary}
        return {} if len(set(sizes.values())) == 1 else {VOCABULARY: sizes}

    def _active(self) -> dict[str, int]:
        """Return the parameters that one token passes: of the experts the chosen ones alone."""
        costs = Costs(self.model, active=True)
        after = costs.count(self._shapes_after, self.pruned.experts)
        return {"before": costs.whole, "after": after}

    def _removed(self, site_kind: str) -> float:
        sites = [s for block in self.blocks for s in block.sites if s.kind == site_kind]
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


def _by_block(shape: Shape, size: str, dropped: Collection[int] = ()) -> int | list[int]:
    """A size in every block that is not dropped: one number if all are alike."""
    stay = (index for index in range(shape.layers) if index not in dropped)
    sizes = [getattr(shape.at(index), size) for index in stay]
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _check_uniform(plan: Plan, widths: Widths, pruned: Shape) -> None:
    """Raise OptionError if widths differ by block without `by_block`."""
    if pruned.uniform or plan.recipe.by_block or plan.model.architecture.by_block:
        return
    by_site = {name: set(widths.everywhere(name)) for _, name in widths.kept}
    name, counts = next((name, counts) for name, counts in by_site.items() if len(counts) > 1)
    source = "" if plan.kept is None else f" in '{plan.kept.source}'"
    raise OptionError(
        f"the widths of {name}{source} differ by block ({min(counts):,} to {max(counts):,}), which "
        "no stock format holds: keep the same number in every block"
        + ("" if plan.model.architecture.blocks.experts else ", or set by_block=True")
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
