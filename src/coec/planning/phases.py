"""What a run does, phase by phase, as work: from the plan alone."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from coec.models.layout import Site
from coec.planning import fits, solves
from coec.planning.facts import Facts, characters
from coec.planning.how import ComputeConfig
from coec.planning.machines import Work
from coec.planning.operations import Consumer
from coec.planning.passes import Written
from coec.streaming.dense_stream import batch_size
from coec.streaming.sensitivity import TOKENS as TRIED

if TYPE_CHECKING:
    from coec.planning.plan import Plan

OPENING = (40_000.0, 900.0)
"""Calls that opening a model takes, and for every block, whose modules are made and copied."""
Length = Literal["least", "typical", "most"]
"""Of the descents, whose steps depend on the data."""


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        name: what it is called.
        lap: the phase that a report counts its seconds under; "" for the start of the process.
        work: all that it does.
        tasks: in how many parts that do not depend on each other it can be cut, by blocks or by
            windows; 1 where it cannot.
    """

    name: str
    lap: str
    work: tuple[Work, ...]
    tasks: int = 1

    @property
    def operations(self) -> float:
        """Floating-point operations, without elementwise ones."""
        return sum(one.operations for one in self.work)


def phases(plan: "Plan", how: ComputeConfig, length: Length = "typical") -> list[Phase]:
    """Every phase of a run, in order.

    Args:
        plan: the widths, and what is asked for.
        how: where it is done.
        length: how long descents are taken to run.
    """
    of = _Work(plan, how, length)
    blocks = plan.dense.layers
    windows = plan.recipe.calibration.windows
    found = [
        Phase("starting", "", (Work("import", 1.0),)),
        Phase("checking", "checking", tuple(of.checking())),
    ]
    if plan.recipe.calibration.written and not how.measured:
        found.append(Phase("sampling text", "reading text", tuple(of.sampling())))
    if not plan.decided:
        found.append(Phase("allocating", "allocating", tuple(of.allocating())))
    found.append(of.reading())
    if plan.recipe.reconstruction.sequential:
        found += of.reconstruction()
    else:
        if not how.measured:
            found.append(Phase("loading weights", "calibrating", tuple(of.facts.loading())))
        found.append(Phase("calibrating", "calibrating", tuple(of.calibrating()), windows))
        found += [
            Phase(f"solving {kind}", "solving", tuple(of.solving(kind)), blocks)
            for kind in of.kinds
        ]
    return [*found, Phase("writing", "writing", tuple(of.writing()))]


class _Work:
    """The work of every phase of one plan."""

    def __init__(self, plan: "Plan", how: ComputeConfig, length: Length) -> None:
        self.plan, self.how, self.length = plan, how, length
        self.recipe = plan.recipe
        self.tokens = float(plan.recipe.calibration.windows * plan.seq_len)
        self.kinds = [site.kind for site in plan.model.layout.kinds]
        self.facts = Facts(plan, how)

    def checking(self) -> list[Work]:
        """Imports apart: the model is opened, and a text is tokenised."""
        plan = self.plan
        calls = OPENING[0] + OPENING[1] * plan.dense.layers
        found = [Work("call", 1.0, 1.0, calls)]
        text = 0 if self.how.measured else characters(plan)
        return [*found, Work("tokenise", float(text))] if text else found

    def reading(self) -> Phase:
        """Every weight once, its digest too, a block ahead of what is computed."""
        if self.recipe.reconstruction.sequential:
            lap = "reconstructing"
        else:
            lap = "solving" if self.how.measured else "calibrating"
        once = self.plan.parameters_before * self.how.stored.itemsize
        return Phase("reading weights", lap, (Work("digest", float(once)),))

    def sampling(self) -> list[Work]:
        """Windows that the model writes, the whole of it in memory."""
        plan, calibration = self.plan, self.recipe.calibration
        embedding = plan.model.shapes[plan.model.layout.embedding].numel()
        weights = float(plan.parameters_before - (0 if plan.model.tied else embedding))
        return Written(
            weights * self.facts.active, plan.dense.hidden, plan.dense.layers, calibration.written,
            plan.seq_len, self.how.at_once, self.how.passes,
        ).work()  # fmt: skip

    def calibrating(self) -> list[Work]:
        """The dense pass, and the statistics of every site."""
        if self.how.measured:
            return []
        size = batch_size(self.plan.seq_len)
        batches = float(-(-self.recipe.calibration.windows // size))
        found: list[Work] = []
        for block, count in self.facts.blocks().items():
            found += self.facts.passed(block, self.tokens, batches).forward(count)
            found += self.facts.grams(block, self.tokens, batches, count)
        return found

    def solving(self, kind: str) -> list[Work]:
        """Selection and compensation of all sites of one kind."""
        found: list[Work] = []
        for (one, units, kept, aligned), count in self.facts.consumers(kind).items():
            found += [
                replace(w, times=w.times * count) for w in self._solve(one, units, kept, aligned)
            ]
        return found

    def allocating(self) -> list[Work]:
        """A dense pass of its own; for errors also solves, and models run side by side."""
        found = [*self.facts.loading(), *self.calibrating()]
        for kind in self.kinds:
            for (one, units, _, _), count in self.facts.consumers(kind).items():
                if self.recipe.pruning.allocation == "error":
                    work = solves.greedy_selection(one, units, max(1, one.k * units // one.d))
                    found += [replace(w, times=w.times * count) for w in work]
                found += [replace(w, times=w.times * count) for w in solves.errors(one)]
        if self.recipe.pruning.allocation != "error":
            return found
        for kind in self.kinds:
            found += self.solving(kind)
        sites = len(self.plan.model.layout.sites)
        tried = float(min(self.tokens, max(TRIED, self.plan.seq_len)))
        for block, count in self.facts.blocks().items():
            # Of each earlier site two models, of each own site two, the dense and the pruned one.
            models = len(block.sites) * (self.plan.dense.layers + 1) + 2
            found += self.facts.passed(block, tried, 1.0).forward(count * models)
        return found + self.facts.head(tried, 1.0 + 2 * sites)

    def reconstruction(self) -> list[Phase]:
        """Both models side by side, once briefly for each of several candidates."""
        lap = "reconstructing"
        own = [Phase(name, lap, tuple(work)) for name, work in self._ordered().items()]
        plans = self.plan.candidates(self.plan.model, self.recipe)
        tried: list[Work] = []
        for other in plans.values() if len(plans) > 1 else ():
            brief = _Work(other.briefly(), self.how, self.length)
            tried += [one for work in brief._ordered().values() for one in work]
        return [*([Phase("trying candidates", lap, tuple(tried))] if tried else []), *own]

    def writing(self) -> list[Work]:
        """Every weight is converted and written, and each block once before."""
        size = 2.0 * self.plan.parameters_after * self.how.written.itemsize
        return [
            Work("elementwise", 3 * size, 2.0**24),
            Work("call", 1.0, 1.0, 3000.0 * self.plan.dense.layers),
        ]

    def _ordered(self) -> dict[str, list[Work]]:
        """One candidate: passes of both models, solves, fits, and how well it predicts."""
        plan, how = self.plan, self.recipe.reconstruction
        held = self.facts.held()
        size = batch_size(plan.seq_len, int((self.tokens - held) / plan.seq_len))
        batches = self.tokens / plan.seq_len / size
        found: dict[str, list[Work]] = {"passes": [*self.facts.loading(), *self.facts.loading()]}
        for block, count in self.facts.blocks().items():
            dense, pruned = (
                self.facts.passed(block, self.tokens, batches, pruned=after)
                for after in (False, True)
            )
            # Behind every half of the dense block, and once more where each is measured.
            found["passes"] += [*dense.forward(2 * count), *pruned.forward(1.5 * count)]
            found["passes"] += self.facts.grams(block, self.tokens, batches, count)
            for site in block.sites if how.propagate else ():
                rows = plan.model.shapes[site.weight][0]
                missing = 2.0 * rows * site.columns * (self.tokens - held)
                found["passes"].append(
                    Work("product", missing, float(site.columns), count, "float32")
                )
        for kind in self.kinds:
            found[f"solving {kind}"] = self.solving(kind)
            if how.reconstruct:
                found[f"fitting {kind}"] = self._fits(kind, held, size)
        judged = held or self.tokens
        found["predicting"] = self.facts.head(judged, 2.0 + how.final_norm)
        return found

    def _fits(self, kind: str, held: float, size: int) -> list[Work]:
        """All fits of one kind of sites."""
        plan, how = self.plan, self.recipe.reconstruction
        tokens = self.tokens - held
        found: list[Work] = []
        for block, count in self.facts.blocks().items():
            for site in (one for one in block.sites if one.kind == kind):
                passed = self.facts.passed(block, tokens, tokens / plan.seq_len / size, pruned=True)
                weights = sum(
                    plan.pruned_shapes[name].numel()
                    for name in site.tensors
                    if name in plan.pruned_shapes
                )
                attends = site.value is not None
                ffn = 0 if attends else passed.ffn
                half = fits.Half(
                    replace(passed, weights=float(weights), ffn=ffn),
                    held,
                    self._matrices(site),
                    attends,
                )
                work = half.work(how.reconstruct, how.cg_iterations, how.curvature_share)
                found += [replace(one, times=one.times * count) for one in work]
        return found

    def _matrices(self, site: Site) -> tuple[tuple[int, int], ...]:
        """Sizes of what is fitted at a site, the consumer last."""
        plan = self.plan
        kept = plan.widths.of(site)
        rows = [
            ((part.stop - part.start) // site.units * kept, int(plan.model.shapes[part.tensor][1]))
            for part in site.fitted
        ]
        consumer = plan.pruned_shapes[site.weight]
        return (*rows, (int(consumer[0]), int(consumer[1])))

    def _solve(self, one: Consumer, units: int, kept: int, aligned: bool) -> list[Work]:
        """One site."""
        method, dtype = self.recipe.method.name, self.how.solves
        device = self.how.device
        selected = self.recipe.kept is None and self.recipe.pruning.selection == "obs"
        found = solves.greedy_selection(one, units, kept) if selected else []
        found += solves.errors(one)
        if one.k == one.d and not self.recipe.reconstruction.propagate:
            return found
        if method in ("coec", "auto"):
            options = {**self.recipe.method.defaults, **self.recipe.pruning.options}
            if method == "auto":
                options = {**_defaults(), **options}
            work = solves.coec(one, self._course(aligned), dtype, device, options)
            # All candidates, three of them descents, and the best one again.
            found += work * 4 if method == "auto" else work
        elif method in ("least-squares", "ridge-to-slice"):
            found += solves.closed_form(one)
        elif method == "rcpu":
            found += solves.rcpu(one, device)
        return found

    def _course(self, aligned: bool) -> solves.SolverSteps:
        course = solves.ATTENTION if aligned else solves.MLP
        steps = {"least": course.least, "typical": course.steps, "most": course.most}
        return replace(course, steps=steps[self.length])


def _defaults() -> dict[str, object]:
    from coec.settings import CoecOptions

    return CoecOptions().record()
