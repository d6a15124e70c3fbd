"""The solving stage in order: the pruned model beside the dense one, a block after the other.

Each site is measured on the inputs that the pruned model has there, aims at the dense model's
hidden states, the error made so far included, and is then fitted to them, its producers too
(METHODS §8). What is solved already is only run through.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.shrinkage import few
from coec.distributed.cluster import RETRIES, LostError, lost
from coec.distributed.worker_group import Finished, NothingKeptError, WorkerGroup, worker_group
from coec.errors import NumericalError
from coec.events import Progress, record, recording
from coec.execution.journal import Journal
from coec.linalg.spd import solve_right
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import write_json
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import cast, cut_block
from coec.pipeline.solve import (
    SiteStatistics,
    Solved,
    SolvedBlock,
    assembled,
    naming,
    own_seed,
    solve_site,
)
from coec.pipeline.write import Checkpoint
from coec.planning import Plan
from coec.reconstruction import LeastSquares, fit
from coec.streaming.head import Score, rescaled_norm
from coec.streaming.measure import DensePass, Source
from coec.streaming.prediction import Prediction
from coec.streaming.two_streams import Kind, Seen, fitted_rows, weights_of, whole
from coec.types import Gram, GramSum

Result = TypeVar("Result")
TARGET_RIDGE = 1e-3
"""Of the least-squares map from inputs to targets, relative to the mean diagonal of the Gram."""
ATTENTION_STEPS = 1
"""Steps that fit attention: more gain nothing (docs/LOG.md)."""
SMALLEST = 1e-3
"""Mean squares of hidden states below this share of the median count as that much."""


@dataclass(frozen=True, eq=False)
class Ending:
    """What is known when the last block is passed.

    Attributes:
        norm: the final norm's weight, where it is changed.
        facts: scores on held-out windows (on the fitted ones where none are held out), JSON-ready.
    """

    norm: Float[Tensor, " h"] | None
    facts: dict[str, Any]


def rebuilt(
    done: Journal,
    dense: Dense,
    plans: Mapping[str, Plan],
    source: Source,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> tuple[Checkpoint, dict[str, Any]]:
    """Solves every block, of that candidate which is nearest to the dense model after a brief fit.

    Args:
        done: holds what is finished.
        dense: the model.
        plans: the candidates, by name.
        source: whose windows have been made.
        device: where to compute.
        dtype: of the written weights.
        progress: called with (phase, finished blocks, blocks).

    Returns:
        The checkpoint, all of whose blocks are solved; and how well it and every candidate predict.
    """
    assert isinstance(source, DensePass)  # statistics are refused before

    @contextlib.contextmanager
    def beside(plan: Plan) -> Iterator[SideBySide]:
        with worker_group(source, dense, plan, dtype) as team:
            yield SideBySide(dense, plan, team, device=device, dtype=source.dtype, written=dtype)

    tried: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items() if len(plans) > 1 else ():
        piece = f"trial-{name}.json"
        if piece not in done:
            with beside(plan.briefly()) as both:
                facts = _trial(both, f"trying {name}", progress)
            facts["widths"] = plan.record()["widths"]
            made_of = dense.digests_of(dense.layout.blocks)
            path = done.work / piece
            done.put(piece, path, functools.partial(_write, facts), made_of=made_of, trial=facts)
        tried[name] = done.facts(piece)["trial"]
    # Perplexity of few windows is noisy: how likely their next tokens were says less about a model
    # than all that the dense one expects there (docs/LOG.md).
    chosen = min(tried or plans, key=lambda name: _of(tried.get(name, {}).get("kl")))
    made = Checkpoint(done, dense, plans[chosen], dtype)
    made.say_resumed(progress)
    if not made.ended or len(made.solved) < len(dense.layout.blocks):
        with beside(plans[chosen]) as both:

            def finished(index: int) -> Mapping[str, Tensor]:
                return made.tensors(dense.layout.blocks[index])

            for solved in both.blocks(finished, made.solved, "reconstructing", progress):
                made.keep(solved)
            ending = both.end(finished)
            made.end(ending.norm, ending.facts)
    return made, {"kv_groups": chosen, **made.facts, "candidates": tried}


def _write(facts: dict[str, Any], path: Path) -> None:
    write_json(path, facts)


def _trial(both: "SideBySide", phase: str, progress: Progress | None) -> dict[str, Any]:
    """How well a pruned model predicts; nothing of it is kept."""
    for _ in range(RETRIES + 1):
        with contextlib.suppress(NothingKeptError):
            for _ in both.blocks(lambda index: None, (), phase, progress):
                pass
            return both.end(lambda index: None).facts
    raise lost(LostError(phase))


class SideBySide:
    """The dense and the pruned model over the same windows.

    Args:
        dense: the model.
        plan: the sizes of the pruned one, and how it is made.
        team: holds the hidden states of both.
        device: where blocks are solved.
        dtype: of the forward pass.
        written: the dtype of the written weights, with which the pruned model is run on.
    """

    def __init__(
        self,
        dense: Dense,
        plan: Plan,
        team: WorkerGroup,
        *,
        device: torch.device,
        dtype: torch.dtype,
        written: torch.dtype,
    ) -> None:
        self._dense, self._plan, self._how = dense, plan, plan.recipe.reconstruction
        self._team, self._device, self._dtype, self._written = team, device, dtype, written
        self._held_out = bool(plan.recipe.calibration.held_out)
        self._smaller = {s.key: s for s in Description.of(plan.output.config).layout.sites}

    def blocks(
        self,
        finished: Finished,
        solved: Container[int],
        phase: str = "reconstructing",
        progress: Progress | None = None,
    ) -> Iterator[Solved]:
        """Yields the blocks that are not solved yet, in order.

        What a team lost with one of its places is done again from the block that was open.

        Args:
            finished: the written tensors of a solved block; None where nothing was kept.
            solved: which are.
            phase: what progress calls this.
            progress: called with (phase, finished blocks, blocks).

        Raises:
            CoecError: as `solve_site`; or work was lost too often.
        """
        blocks = self._dense.layout.blocks
        for block in blocks:
            if block.index not in solved:
                solve = functools.partial(self._team.solve, functools.partial(self.solved, block))
                handed = self._standing(block.index, finished, solve)
                self._dense.hashes.update(handed.hashes)
                yield handed.solved
                # As it is written: a run that goes on from the disk has nothing else. Where a place
                # is lost meanwhile, it is brought there before the next block.
                with contextlib.suppress(LostError):
                    self._team.do("go_past", block.index, handed.solved.tensors)
                if progress:
                    progress(phase, block.index + 1, len(blocks))

    def end(self, finished: Finished) -> Ending:
        """What the pruned model's end needs, and how well it predicts; after the last block."""
        return self._standing(len(self._dense.layout.blocks), finished, self._end)

    def _standing(self, index: int, finished: Finished, work: Callable[[], Result]) -> Result:
        """What some work comes to, every place of the team standing before a block.

        It is done again where a place was lost meanwhile.

        Raises:
            CoecError: that happened too often.
        """
        for attempt in range(RETRIES + 1):
            try:
                self._team.bring_to(index, finished)
                return work()
            except LostError as error:
                if attempt == RETRIES:
                    raise lost(error) from error
        raise AssertionError

    def _end(self) -> Ending:
        kind: Kind = "held" if self._held_out else "fit"

        def score(norm: Tensor | None = None, *, dense: bool = False) -> Score:
            sums = Prediction()
            for one in self._team.all("predict", kind, norm, dense):
                sums.add(one)
            return Score.of(sums)

        facts = {
            "windows": "held out" if self._held_out else "fitted",
            "dense": score(dense=True).perplexity,
        }
        plain = score()
        if not self._how.final_norm:
            return Ending(None, {**facts, **asdict(plain)})
        before = self._dense.tensor(self._dense.layout.norm).to(self._dtype)
        try:
            rescaled = rescaled_norm(before, self._team.all("norms"))
            norm = cast(rescaled, self._written, "final norm")
        except NumericalError as error:
            record(f"the final norm is not rescaled: {error}")
            return Ending(None, {**facts, **asdict(plain)})
        fitted = score(norm)
        taken = _of(fitted.perplexity) < _of(plain.perplexity)
        tried = {"taken": taken, "without": plain.perplexity, "with": fitted.perplexity}
        best = asdict(fitted if taken else plain)
        return Ending(norm if taken else None, {**facts, **best, "final_norm": tried})

    def solved(self, block: BlockLayout) -> SolvedBlock:
        """A block before which every place of the team stands."""
        tensors = self._dense.tensors(block)
        self._team.do("open", block.index)
        self._weigh()
        cuts, rows = [], []
        written = {name: tensor.to(self._written) for name, tensor in tensors.items()}
        for number, site in enumerate(block.sites):
            statistics = self._measured(number, site, tensors)
            cut, row = solve_site(
                site, tensors, statistics, self._plan, self._device, self._written
            )
            small = cut_block(tensors, [cut], self._written)
            written |= {name: small[name] for name in site.tensors if name in small}
            self._load(block, site, written)
            if self._how.reconstruct:
                began = time.perf_counter()
                written |= self._fitted(number, site, written, row)
                self._load(block, site, written)
                row["seconds"] += time.perf_counter() - began
            if site is not block.sites[-1]:  # behind the last the whole layer is run, as written
                self._team.do("enter", number)
            cuts.append(cut)
            rows.append(row)
        solved = assembled(block, written, cuts, rows, self._plan)
        return SolvedBlock(solved, {name: self._dense.hashes[name] for name in tensors})

    def _load(self, block: BlockLayout, site: Site, written: Mapping[str, Tensor]) -> None:
        """Gives the pruned model's layer what the half of a site needs."""
        others = {name for s in block.sites if s.name != site.name for name in s.tensors}
        own = {name: tensor for name, tensor in written.items() if name not in others}
        # Biases of a format that has them everywhere, where nobody computed any.
        for name, shape in self._plan.pruned_shapes.items():
            inside = name.startswith(block.prefix) and name.endswith(".bias")
            if inside and name not in own and name not in others:
                own[name] = torch.zeros(shape, dtype=self._written)
        self._team.do("load", own)

    def _weigh(self) -> None:
        """W of every token, of mean 1 over the windows fitted on."""
        if self._how.token_weights == "equal":
            self._team.do("weigh", None, 1.0)
            return
        squares = [one for part in self._team.all("squares") for one in part]
        least = SMALLEST * float(torch.cat([one.flatten() for one in squares]).median())
        weights = [weights_of(one, least) for one in squares]
        total = math.fsum(float(one.sum(dtype=torch.float64)) for one in weights)
        self._team.do("weigh", least, total / sum(one.numel() for one in weights))

    def _measured(self, number: int, site: Site, tensors: Mapping[str, Tensor]) -> SiteStatistics:
        """Statistics of the consumer's inputs, with the dense weights before it.

        What is missing in the hidden states behind it, the consumer has to add: with `δ` that
        difference, `T = W₀ + (Σ w δ xᵀ)(G + ε)⁻¹` is the consumer that comes closest.
        """
        gram, target = self._aimed(number, site, tensors, "fit")
        held, held_target = None, None
        judged = self._plan.recipe.calibration.guard and few(
            gram.tokens, self._smaller[site.key].columns
        )
        if target is None or judged:
            held, held_target = self._aimed(number, site, tensors, "held")
        return SiteStatistics(gram, held, target, held_target)

    def _aimed(
        self, number: int, site: Site, tensors: Mapping[str, Tensor], kind: Kind
    ) -> tuple[Gram, Tensor | None]:
        """Statistics of the consumer's inputs, and the target on them, where errors propagate."""
        seen = self._seen(number, site, kind)
        weight_of_tokens = seen.gram.weight
        gram = seen.gram.gram()
        with naming(site.consumer):
            gram.check_finite()
        if seen.missing is None:
            return gram, None
        weight = tensors[site.weight].to(gram.xx)
        factor = seen.added / seen.scale if seen.scale > 0 else 1.0
        missing = seen.missing.to(gram.xx) / (factor or 1.0)
        if kind == "held":  # weights have mean 1 over the windows fitted on, in a Gram over its own
            missing *= gram.tokens / weight_of_tokens
        return gram, weight + solve_right(missing, gram.xx, TARGET_RIDGE, gram.precision)

    def _seen(self, number: int, site: Site, kind: Kind) -> Seen:
        """The sum of all parts."""
        total = Seen(GramSum(site.columns, self._device))
        for part in self._team.all("see", number, kind):
            total.merge(part)
        return total

    def _fitted(
        self, number: int, site: Site, written: Mapping[str, Tensor], row: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Those weights of a half that were fitted to the targets; the account goes into `row`."""
        rows = fitted_rows(self._smaller[site.key], written)
        self._team.do("prepare", number)

        def problem(kind: Kind) -> LeastSquares:
            ask = functools.partial(self._team.all, "product", kind)
            return LeastSquares(ask, self._how.curvature_share)

        wide = torch.promote_types(self._dtype, torch.float32)
        theta = {
            name: written[r.tensor][r.start : r.stop].to(self._device, wide)
            for name, r in rows.items()
        }
        steps = self._how.reconstruct
        with recording() as events:
            found = fit(
                problem("fit"), problem("held") if self._held_out else None, theta,
                steps=steps if site.value is None else min(steps, ATTENTION_STEPS),
                iterations=self._how.cg_iterations, damping=self._how.damping,
                seed=own_seed(self._plan.recipe.calibration.seed, site.block),
            )  # fmt: skip
            fitted: dict[str, Tensor] = {}
            try:
                if any(step.length for step in found.steps):
                    new = {n: cast(p, self._written, n) for n, p in found.theta.items()}
                    fitted = whole(written, rows, new)
            except NumericalError as error:
                record(f"the reconstruction is taken back: {error}")
                found = found.taken_back()
        row["reconstruction"] = found.record()
        row["events"] = [*row["events"], *events]
        return fitted


def _of(score: float | None) -> float:
    """To be compared: one that is not finite is the worst."""
    return math.inf if score is None else score
