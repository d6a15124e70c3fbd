"""The plan: what pruning will do, from the configuration alone, in seconds."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coec.allocation import (
    MOST_ADDED,
    MULTIPLES,
    OF_EXPERTS,
    Widths,
    Worths,
    by_worth,
    shares_for,
    uniform,
    whole_attention,
)
from coec.calibration.layers import TOKENS_PER_BATCH
from coec.calibration.sensitivity import TOKENS as TRIED
from coec.calibration.tokens import TOKEN_SUFFIXES, WHOLE
from coec.calibration.windows import DEFAULT_SEQ_LEN, resolve_seq_len
from coec.devices import DTYPES, resident_bytes
from coec.errors import OptionError
from coec.models.architectures import Architecture
from coec.models.description import Description
from coec.models.fallbacks import fallbacks
from coec.models.formats import OutputFormat, choose_format
from coec.models.layout import Layout, Site
from coec.models.non_uniform import FILE as CODE
from coec.models.shape import Shape
from coec.recipe import Recipe
from coec.selection import kept_count
from coec.settings import Repair

SOLVER_MATRICES = 6
"""Matrices of the wider consumer's size in a solve: four are counted (benchmarks), and an
eigendecomposition takes two more inside."""
SOLVER_OPERATIONS = 20
"""Times d³: an eigendecomposition takes 9, an inverse 2, and what a repair adds the rest."""
BYTES_PER_CHARACTER = 170
"""Memory that tokenising takes, measured (docs/FORMATS.md)."""
NAMED_TEXT = 11_000_000
"""Characters that are read of a data set at most."""
WIDTHS = {"kv_groups": "kv_heads", "query_heads": "heads"}
"""What records call sizes that pruning changes, and the fields of a shape that hold them."""
SHARD_BYTES = 2 * 10**9
BRIEF_ITERATIONS = 3
"""Of conjugate gradients in the one step that a candidate is tried with (docs/LOG.md)."""
OF_TEXT = ("text", "hidden states", "forward pass")
"""What a dense pass takes memory for."""


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
        if recipe.kept is not None:
            recipe.kept.check(model.layout)
        if (setting := recipe.rebuilding.in_order) and (adds := model.architecture.adds):
            raise OptionError(
                f"{setting} needs blocks that add what attention and the MLP return, one after the "
                f"other; those of {model.architecture.model_type} add {adds}: leave it out "
                "(preset = fast does)"
            )
        _check_whole(model.architecture, recipe)
        _check_experts(model.architecture, recipe)
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

    def briefly(self) -> "Plan":
        """The same with little reconstruction: enough to see which of several candidates leads."""
        how = self.recipe.rebuilding
        if not how.reconstruct:
            return self
        brief = replace(how, reconstruct=1, inner=min(how.inner, BRIEF_ITERATIONS))
        return replace(self, recipe=replace(self.recipe, rebuilding=brief))

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
        repair, kept = recipe.repair, recipe.kept
        goal = _goal(model, repair)
        while True:
            if goal is not None:
                repair = shares_for(model.layout, model.shapes, recipe.repair, goal, kept)
            widths = (
                whole_attention(model.layout, model.shapes, repair, kept)
                if kv_groups == "all"
                else uniform(model.layout, repair, kept)
            )
            plan = cls._of(model, recipe, widths, decided=repair.allocation == "uniform")
            over = plan.parameters_after - (plan.parameters_before - (goal or 0))
            if goal is None or over <= 0 or plan.parameters_after <= _budget(model, repair):
                return plan
            goal += over  # what the format adds, such as biases of a repair

    @classmethod
    def _of(cls, model: Description, recipe: Recipe, widths: Widths, *, decided: bool) -> "Plan":
        """The plan of these widths, its format chosen."""
        pruned = _pruned(model, widths)
        if not (pruned.uniform or recipe.repair.non_uniform):
            raise _several_widths(widths, recipe)
        if not decided:
            pruned = pruned.listed()
        biased = frozenset(
            site.kind
            for site in model.layout.sites
            if site.bias in model.shapes
            or (
                recipe.method.adds_bias
                and (not decided or widths.removes_from(site) or recipe.rebuilding.propagate)
            )
        )
        output = choose_format(model.config, pruned, biased=biased, target=recipe.repair.target)
        return cls(
            model,
            recipe,
            widths,
            pruned,
            output,
            Description.of(output.config).shapes,
            resolve_seq_len(recipe.calibration.seq_len, model.positions, DEFAULT_SEQ_LEN),
            decided=decided,
        )

    def allocated(self, worths: Worths) -> "Plan":
        """The plan whose widths are decided, of as many parameters as this one, at most.

        Args:
            worths: of every site whose units nobody names.
        """
        layout, repair = self.model.layout, self.recipe.repair
        whole = (
            kind.kind
            for kind in layout.kinds
            if not any(self.widths.removes_from(s) for s in layout.sites if s.kind == kind.kind)
        )
        widths = by_worth(
            layout,
            self.model.shapes,
            self.widths,
            worths,
            repair.multiple,
            repair.own_shares.union(whole),
            0 if repair.budget_parameters is None else self._spare,
        )
        made = Plan._of(self.model, self.recipe, widths, decided=True)
        return replace(made, remarks=self.remarks)

    @property
    def _spare(self) -> int:
        """What a budget leaves unused; nothing where the repair adds to what is counted."""
        left = _budget(self.model, self.recipe.repair) - self.parameters_after
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
        return sum(shape.numel() for shape in self.model.shapes.values())

    @property
    def parameters_after(self) -> int:
        """Parameters of the pruned model, tied ones once."""
        return sum(shape.numel() for shape in self.pruned_shapes.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What has no effect, and what a width costs elsewhere."""
        kinds, repair, kept = self.model.layout.kinds, self.recipe.repair, self.recipe.kept
        named = kept.units if kept is not None else {}
        asked = [
            (site, share, kept_count(site.units, share) == site.units)
            for site in kinds
            if (share := repair.removed(site.kind)) and site.key not in named
        ]
        unmoved = (
            f"nothing is removed at {site.kind}: {share:.4g} of {site.units} {site.unit}s is less "
            "than one"
            for site, share, too_little in asked
            if too_little
        )
        rounded = (
            f"nothing is removed at {site.kind}: align = {repair.align} rounds up to all "
            f"{site.units:,} {site.unit}s"
            for site, _, too_little in asked
            if site.value is None and not too_little and not self.widths.removes_from(site)
        )
        unaligned = (
            f"align = auto leaves {site.kind} at {width:,} {site.unit}s: the next multiple of "
            f"{MULTIPLES[-1]} adds more than {MOST_ADDED:.0%}"
            for site, _, _ in asked
            if repair.multiple is None
            and site.value is None
            and (width := self.widths.of(site)) % MULTIPLES[-1]
        )
        count = Counter(site.kind for site in self.model.layout.sites)
        costs = (
            fallbacks(site, self.widths.of(site), self._outputs(site), count[site.kind])
            for site in kinds
        )
        whole = self.model.architecture.whole
        experts = next((site for site in kinds if site.routed), None)
        undecided = (
            f"allocation = {repair.allocation} decides the widths of every block from the "
            "calibration text; these are uniform ones of as many parameters"
        )
        return (
            *self.remarks,
            *([] if self.decided else [undecided]),
            *(self._of_experts(experts) if experts else ()),
            *((f"attention keeps all KV groups: {whole}",) if whole else ()),
            *self._of_kept(),
            *unmoved,
            *rounded,
            *unaligned,
            *(c for c in costs if c),
        )

    def _of_experts(self, site: Site) -> tuple[str, ...]:
        """What the width of experts means for who runs them all at once."""
        width = self.widths.of(site)
        if width % OF_EXPERTS:
            return (
                f"experts keep {width:,} {site.unit}s, no multiple of {OF_EXPERTS}: transformers "
                'runs them in narrow dtypes with experts_implementation="eager" only',
            )
        if width == kept_count(site.units, self.recipe.repair.removed(site.kind)):
            return ()
        return (
            f"experts keep {width:,} {site.unit}s, a multiple of {OF_EXPERTS}, as transformers "
            "wants that runs them all at once",
        )

    def _outputs(self, site: Site) -> int:
        """How many rows a consumer has."""
        return self.model.shapes[site.weight][0]

    def _of_kept(self) -> tuple[str, ...]:
        """What kept units that were given leave without effect."""
        kept, sites = self.recipe.kept, self.model.layout.sites
        if kept is None:
            return ()
        if kept.covers(self.model.layout):
            return (
                f"every site keeps the units of '{kept.source}': sparsity, align, selection and "
                "kv_groups have no effect",
            )
        return (
            f"{len(kept.units)} of {len(sites)} sites keep the units of '{kept.source}', the "
            "others are selected from",
        )

    @property
    def statistics_per_block(self) -> int:
        """Bytes of one block's Grams in float64, held-out ones included."""
        kinds = 2 if self.recipe.calibration.holdout else 1
        blocks = self.model.layout.blocks
        squares = max(sum(site.columns**2 for site in block.sites) for block in blocks)
        return kinds * squares * torch.float64.itemsize

    def memory(
        self, stored: torch.dtype, forward: torch.dtype, *, measured: bool = False
    ) -> dict[str, int]:
        """Bytes in memory at the fullest moment, by purpose (docs/FORMATS.md explains each).

        Args:
            stored: the dtype of the dense weights.
            forward: that of the dense pass.
            measured: there are statistics already, and no text is run.
        """
        layout, shapes = self.model.layout, self.model.shapes
        block = max(
            sum(shape.numel() for name, shape in shapes.items() if name.startswith(one.prefix))
            for one in layout.blocks
        )
        embedding = shapes[layout.embedding].numel()
        samples = self.recipe.calibration.windows
        length, hidden = self.seq_len, self.dense.hidden
        widest = max(site.columns for site in layout.kinds)
        per_token = (6 * hidden + 4 * self.dense.ffn) * forward.itemsize + 8 * widest
        batch = max(1, TOKENS_PER_BATCH // length) * length
        written = self.parameters_after * DTYPES[self.recipe.repair.dtype or "float32"].itemsize
        solve = DTYPES[self.recipe.repair.solve_dtype].itemsize
        found = {
            "program": resident_bytes(),
            "text": self._text_bytes(forward),
            "one block's weights": max(block, embedding) * (stored.itemsize + forward.itemsize),
            "hidden states": self._waiting(samples * length) * hidden * forward.itemsize,
            "forward pass": min(batch, samples * length) * per_token,
            "statistics": self.statistics_per_block + 8 * widest**2,
            "solver": SOLVER_MATRICES * widest**2 * solve,
            "shard being filled": min(written, SHARD_BYTES),
        }
        return found | dict.fromkeys(OF_TEXT, 0) if measured else found

    def _waiting(self, tokens: int) -> int:
        """Of how many tokens hidden states wait at once, those of several models each counted."""
        beside = self._streams * tokens
        if self.recipe.repair.allocation != "error":
            return beside
        return max(beside, tokens + 2 * len(self.model.layout.sites) * min(tokens, TRIED))

    @property
    def _streams(self) -> int:
        """How many sets of hidden states there are at once: the dense model's before a block, and,
        where the pruned one runs beside it, behind each of its parts, and the pruned one's own.
        """
        beside = 1 + len(self.model.layout.kinds)
        return 1 + beside if self.recipe.rebuilding.in_order else 1

    def operations(self) -> dict[str, float]:
        """Floating-point operations by purpose, of products that grow with text or width alone.

        Where there are several candidates, each is fitted briefly, and one of them then in full.
        """
        found = self._operations()
        if written := self.recipe.calibration.written:
            found["sampling text"] = 2.0 * self.parameters_before * written * self.seq_len
        plans = Plan.candidates(self.model, self.recipe)
        for plan in plans.values() if len(plans) > 1 else ():
            for name, count in plan.briefly()._operations().items():
                found[name] += count
        return found

    def _operations(self) -> dict[str, float]:
        """Of one candidate.

        A product with all weights is 2 operations per weight and token; attention maps are left
        out. An iteration of a reconstruction is a forward pass with its derivative, and back:
        eleven thirds of a product with the weights that are fitted (docs/METHODS.md §8).
        """
        how = self.recipe.rebuilding
        tokens = self.recipe.calibration.windows * self.seq_len
        sites = self.model.layout.sites
        embedding = self.model.shapes[self.model.layout.embedding].numel()
        found = {
            "dense pass": 2.0 * (self.parameters_before - embedding) * tokens,
            "statistics": sum(2.0 * site.columns**2 * tokens for site in sites),
            "solving": sum(SOLVER_OPERATIONS * float(site.columns) ** 3 for site in sites),
        }
        if self.recipe.repair.allocation != "uniform":
            found["allocating"] = found["dense pass"] + found["statistics"] + found["solving"]
        if self.recipe.repair.allocation == "error":
            models = 2 * self.dense.layers + 4  # that run through a block, on average
            found["allocating"] += found["dense pass"] / tokens * min(tokens, TRIED) * models
        if how.in_order:
            found["pruned pass"] = 2.0 * (self.parameters_after - embedding) * tokens
        if how.reconstruct:
            found["reconstruction"] = sum(
                22 / 3 * tokens * how.inner * how.curvature
                * self._fitted(site)
                * (1 if site.value is not None else how.reconstruct)
                for site in sites
            )  # fmt: skip
        return found

    def _fitted(self, site: Site) -> int:
        """How many weights reconstruction fits at a site, of the pruned model."""
        rows = sum(
            (part.stop - part.start) // site.units * self.model.shapes[part.tensor][1]
            for part in site.fitted
        )
        return rows * self.widths.of(site) + self.pruned_shapes[site.weight].numel()

    def _text_bytes(self, forward: torch.dtype) -> int:
        """What making the windows takes: tokenising a text, or a whole model that is sampled."""
        calibration = self.recipe.calibration
        source = calibration.source
        whole = self.parameters_before * forward.itemsize if calibration.written else 0
        if not isinstance(source, str | Path) or calibration.own:
            return whole
        path = Path(source)
        size = path.stat().st_size if path.is_file() else NAMED_TEXT
        if path.suffix in TOKEN_SUFFIXES:
            return max(whole, 2 * size if path.is_file() else 0)
        return max(whole, BYTES_PER_CHARACTER * min(size, WHOLE))

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
            "mlp" if number == 0 else f"{kind}s": {
                "before": _of_blocks(self.dense, counted[kind]),
                "after": _of_blocks(self.pruned, counted[kind]),
            }
            for number, kind in enumerate(kinds)
        }

    @property
    def alternatives(self) -> dict[str, "Plan"]:
        """The candidates besides this one, among which held-out windows choose."""
        found = Plan.candidates(self.model, self.recipe)
        return {name: plan for name, plan in found.items() if plan.pruned != self.pruned}


def _budget(model: Description, repair: Repair) -> int:
    """The most parameters that may be left; raises OptionError where these are no fewer."""
    before = sum(shape.numel() for shape in model.shapes.values())
    asked = repair.budget_parameters
    assert asked is not None
    budget = int(asked * before) if asked < 1 else int(asked)
    if budget >= before:
        raise OptionError(
            f"budget_parameters = {budget:,} is no less than the model's {before:,}: nothing would "
            "go; allow fewer"
        )
    return budget


def _goal(model: Description, repair: Repair) -> int | None:
    """How many parameters must go; None where sparsity says what does."""
    if repair.budget_parameters is None:
        return None
    return sum(shape.numel() for shape in model.shapes.values()) - _budget(model, repair)


def _several_widths(widths: Widths, recipe: Recipe) -> OptionError:
    """The error where widths differ by block and nobody said that they may."""
    kinds = {name: set(widths.everywhere(name)) for _, name in widths.kept}
    name, found = next((name, found) for name, found in kinds.items() if len(found) > 1)
    source = "" if recipe.kept is None else f" in '{recipe.kept.source}'"
    return OptionError(
        f"the widths of {name}{source} differ by block ({min(found):,} to {max(found):,}), which "
        "no stock format holds: keep as many units in every block, or set non_uniform to write "
        "code beside the weights"
    )


def _rules(layout: Layout, recipe: Recipe) -> tuple[str, ...]:
    """How many KV groups stay: the names of the rules, of which held-out windows choose one."""
    asked, kept = recipe.rebuilding.kv_groups, recipe.kept
    given = kept is not None and any(s.key in kept.units for s in layout.sites if s.value)
    if given and asked != "all":
        return ("kept",)  # there is nothing to choose
    return ("uniform", "all") if asked == "held-out" else (asked,)


def _pruned(model: Description, widths: Widths) -> Shape:
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


def _of_blocks(shape: Shape, size: str) -> int | list[int]:
    """A size of every block: one number where all are alike."""
    found = [getattr(shape.at(index), size) for index in range(shape.layers)]
    return found[0] if len(set(found)) == 1 else found


def _check_whole(architecture: Architecture, recipe: Recipe) -> None:
    """Raises OptionError where attention is to lose units and cannot."""
    asked = recipe.repair.attention_sparsity
    if architecture.whole and asked:
        raise OptionError(
            f"attention of {architecture.model_type} keeps all KV groups ({architecture.whole}), "
            f"got attention_sparsity = {asked:g}: leave it out"
        )


def _check_experts(architecture: Architecture, recipe: Recipe) -> None:
    """Raises OptionError where experts would get widths of their own by block."""
    if architecture.blocks.experts and recipe.repair.non_uniform:
        raise OptionError(
            f"non_uniform is not built for models of experts ({architecture.model_type}): leave it "
            "out"
        )


def _share(before: int, after: int) -> float:
    """The fraction that went."""
    return (before - after) / before
