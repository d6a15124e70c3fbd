"""What a plan is made of, in the terms of work: blocks that are alike, consumers, passes."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from coec.calibration.tokens import LONG_TEXT, TOKEN_SUFFIXES
from coec.models.layout import BlockLayout
from coec.planning import passes
from coec.planning.how import ComputeConfig
from coec.planning.machines import Work
from coec.planning.operations import Consumer

if TYPE_CHECKING:
    from coec.planning.plan import Plan

NAMED_TEXT = 11_000_000
"""Characters that are read of a data set at most."""


class Facts:
    """Of one plan, done in one way."""

    def __init__(self, plan: "Plan", how: ComputeConfig) -> None:
        self.plan, self.how = plan, how
        self.active = active(plan)

    def consumers(self, kind: str) -> Counter[tuple[Consumer, int, int, bool]]:
        """The sites of one kind by their sizes, and how many are alike."""
        plan = self.plan
        found: Counter[tuple[Consumer, int, int, bool]] = Counter()
        for site in plan.model.layout.sites:
            if site.kind == kind:
                kept = plan.widths.of(site)
                rows = int(plan.model.shapes[site.weight][0])
                one = Consumer(kind, rows, site.columns, kept * site.columns_per_unit)
                found[one, site.units, kept, site.value is not None] += 1
        return found

    def blocks(self) -> dict[BlockLayout, int]:
        """One block of each shape, and how many are like it."""
        first: dict[tuple[object, ...], BlockLayout] = {}
        counts: Counter[BlockLayout] = Counter()
        for block in self.plan.model.layout.blocks:
            key = tuple(
                (site.name, site.columns, self.plan.widths.of(site)) for site in block.sites
            )
            counts[first.setdefault(key, block)] += 1
        return dict(counts)

    def passed(
        self, block: BlockLayout, tokens: float, batches: float, *, pruned: bool = False
    ) -> passes.Passed:
        """A pass of one block, dense or pruned."""
        plan = self.plan
        shapes = plan.pruned_shapes if pruned else plan.model.shapes
        own = [s for name, s in shapes.items() if name.startswith(block.prefix) and len(s) == 2]
        routed = {site.consumer.rpartition(".")[0] for site in block.sites if site.routed}
        weights = sum(s.numel() for s in own) * (self.active if routed else 1.0)
        share = {site.kind: (plan.widths.of(site) / site.units if pruned else 1.0)
                 for site in block.sites}  # fmt: skip
        wide = {
            kind: sum(
                site.columns * share[site.kind] * (self.active if site.routed else 1.0)
                for site in block.sites
                if site.kind == kind
            )
            for kind in share
        }
        attention = wide.pop("attention", float(plan.dense.hidden))
        return passes.Passed(
            float(weights), plan.dense.hidden, int(sum(wide.values())), int(attention), tokens,
            plan.seq_len, batches, self.how.passes, self.how.device, plan.dense.head_dim,
        )  # fmt: skip

    def grams(self, block: BlockLayout, tokens: float, batches: float, count: int) -> list[Work]:
        found: list[Work] = []
        for site in block.sites:
            share = self.active if site.routed else 1.0
            found += passes.statistics(site.columns, tokens * share, batches, count)
        return found

    def loading(self) -> list[Work]:
        """Every block's weights as they are run."""
        count = float(self.plan.parameters_before)
        size = count * (self.how.stored.itemsize + self.how.forward.itemsize)
        found = [Work("elementwise", size, 2.0**24)]
        if self.how.device != "cpu":
            found.append(Work("link", count * self.how.stored.itemsize))
        return found

    def head(self, tokens: float, models: float) -> list[Work]:
        plan = self.plan
        return passes.head(
            plan.dense.hidden, plan.model.vocabulary, tokens, self.how.passes, models
        )

    def held(self) -> float:
        """Tokens that are held out."""
        calibration = self.plan.recipe.calibration
        share = calibration.held_out
        if not share:
            return 0.0
        return float(max(1, round(share * calibration.samples)) * self.plan.seq_len)


def active(plan: "Plan") -> float:
    """The share of experts that a token meets."""
    names = plan.model.architecture.blocks.experts
    if names is None:
        return 1.0
    met = plan.model.config.get("num_experts_per_tok") or 1
    return float(met) / float(plan.model.config.get(names.count) or met)


def characters(plan: "Plan") -> int:
    """Of a text that is tokenised; 0 for token ids."""
    source = plan.recipe.calibration.source
    if not isinstance(source, str | Path) or plan.recipe.calibration.own:
        return 0
    path = Path(source)
    if path.suffix in TOKEN_SUFFIXES:
        return 0
    return min(path.stat().st_size if path.is_file() else NAMED_TEXT, LONG_TEXT)
