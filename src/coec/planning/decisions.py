"""The decisions of a pruning run: what follows from them, and how records show them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from coec.config.recipe import Recipe, memory_size
from coec.devices import dtype_name
from coec.events import as_html
from coec.methods import Method
from coec.models.description import Description
from coec.models.formats import OutputFormat, renumbered, without_blocks
from coec.models.layout import QUANTISED_COLUMNS, BlockLayout, Shape, Site, in_words
from coec.models.names import Source
from coec.models.non_uniform import FILE as CODE
from coec.models.renumbering import VOCABULARY
from coec.planning.checks import notes_of
from coec.planning.kept import KeptUnits
from coec.planning.widths import Costs, Shares, Widths
from coec.text.windows import validation_count

_PLURALS = {"expert": "experts"}
"""What records call a kind of site of which a block has several."""
_HEADS = {"kv_groups": "kv_heads", "query_heads": "heads"}
"""What records call sizes that pruning changes, and the fields of a shape that hold them."""


@dataclass(frozen=True, repr=False)
class Decisions:
    """Decisions of one pruning run, and what follows from them.

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
        kinds = dict.fromkeys(site.kind for block in self.blocks for site in block.sites)
        removed = {kind: self._removed(kind) for kind in kinds}
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
            "attention_units": self.model.layout.attention_units,
            "layers": self.dense.layers,
            "dropped_blocks": list(self.dropped) if self.chosen else None,
            "inside": self.model.around.name if self.model.around else None,
            "widths": self._widths_by_name(),
            "parameters": {"before": before, "after": after},
            "active": self._active() if self.model.layout.experts else None,
            "removed": {**removed, "parameters": (before - after) / before},
            "kept": None if self.kept is None else self.kept.record(),
            "notes": list(self.notes),
            "seq_len": self.seq_len,
        }

    def _widths_by_name(self) -> dict[str, dict[str, int | list[int]]]:
        """Return every size that pruning changes, before and after."""
        fields = {
            pattern.name: pattern.counted_by for pattern in self.model.architecture.blocks.sites
        }
        channels = [site.kind for site in self.model.layout.kinds if site.value is None]
        sizes = {_PLURALS.get(name, name): fields[name] for name in channels}
        sizes |= {"whole_experts": "experts"} if self.model.layout.experts else {}
        widths = {
            name: {
                "before": _by_block(self.dense, size),
                "after": _by_block(self.pruned, size, self.dropped),
            }
            for name, size in (sizes | _HEADS).items()
        }
        if self.vocabulary != self.model.vocabulary:
            widths[VOCABULARY] = {"before": self.model.vocabulary, "after": self.vocabulary}
        return widths

    def _active(self) -> dict[str, int]:
        """Return the parameters that one token passes: of the experts the chosen ones alone."""
        costs = Costs(self.model, active=True)
        after = costs.count(self._shapes_after, self.pruned.experts)
        return {"before": costs.whole, "after": after}

    def _removed(self, site_kind: str) -> float:
        sites = [s for block in self.blocks for s in block.sites if s.kind == site_kind]
        before = sum(site.units for site in sites)
        return (before - sum(map(self.widths.of, filter(self.widths.stays, sites)))) / before


def _by_block(shape: Shape, size: str, dropped: Collection[int] = ()) -> int | list[int]:
    """A size in every block that is not dropped: one number if all are alike."""
    stay = (index for index in range(shape.layers) if index not in dropped)
    sizes = [getattr(shape.at(index), size) for index in stay]
    return sizes[0] if len(set(sizes)) == 1 else sizes
