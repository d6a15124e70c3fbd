"""Solve and train blocks in sequence, the pruned model beside the dense one (METHODS §8).

Where errors propagate, each site is solved on the inputs that the pruned model has there, and aims
at the dense model's hidden states, the error made so far included; else as in the dense model. The
block is then trained as a whole. Blocks that are solved already are only run through.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar, get_args

import torch
from torch import Tensor

from coec.calibration.windows import validation_count
from coec.compensation.closed_form import solve_with_own_ridge
from coec.compensation.shrinkage import few
from coec.distributed.cluster import RETRIES, LostError, lost
from coec.errors import NumericalError
from coec.events import Progress, record, recording
from coec.execution.journal import Journal
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import cast, cut_block
from coec.pipeline.solve import (
    SiteStatistics,
    SolvedBlock,
    assemble,
    naming,
    solve_block,
    solve_site,
)
from coec.pipeline.write import Checkpoint
from coec.planning.plan import tried_blocks
from coec.planning.run import Run
from coec.reconstruction.block_training import Training, relative_error, train_block
from coec.settings.fields import nth_seed
from coec.streaming.dense_stream import Measured, Sums
from coec.streaming.head import Head, Prediction
from coec.streaming.layers import Layers
from coec.streaming.passes import BlockSource
from coec.streaming.token_weights import least_square, token_weights
from coec.streaming.two_streams import (
    ConsumerStatistics,
    TwoStreams,
    WindowKind,
)
from coec.streaming.worker_group import Finished, WorkerGroup
from coec.types import Gram, GramSum

_Result = TypeVar("_Result")
_GENTLER = 0.1
"""Share of the learning rate at which the last block is trained on predictions where the whole rate
makes them worse."""
_CARRIED = 0.6
"""Share of the error made so far that a consumer aims to take back (docs/lab/LOG.md)."""


def reconstruct(
    journal: Journal,
    dense: Dense,
    run: Run,
    source: BlockSource,
    progress: Progress | None = None,
) -> Checkpoint:
    """Solve and train the blocks of a run in sequence.

    Args:
        journal: keeps what is finished.
        dense: the model.
        run: how it is pruned.
        source: of the windows.
        progress: called with (phase, done, total).

    Returns:
        The checkpoint, all of whose blocks are solved; its `facts` say how well it predicts.
    """
    checkpoint = Checkpoint(journal, dense, run)
    checkpoint.say_resumed(progress)
    if not (checkpoint.ended and checkpoint.complete):

        def finished(index: int) -> Mapping[str, Tensor]:
            return checkpoint.tensors(dense.layout.blocks[index])

        with checkpoint, source.worker_group(run) as group:
            reconstruction = BlockReconstruction(dense, run, group)
            for block in reconstruction.blocks(
                finished, checkpoint.solved, "reconstructing", progress
            ):
                checkpoint.keep(block)
            checkpoint.end(reconstruction.end(finished, progress))
    return checkpoint


class BlockReconstruction:
    """The blocks of a pruned model, solved and trained in sequence.

    The workers of `group` hold the hidden states of both models.
    """

    def __init__(self, dense: Dense, run: Run, group: WorkerGroup) -> None:
        self._dense, self._run, self._group = dense, run, group
        self._settings = run.recipe.reconstruction
        self._validates = bool(run.recipe.calibration.validation)
        self._pruned = Description.of(run.plan.output.config)
        self._pruned_sites = {site.key: site for site in self._pruned.layout.sites}

    def blocks(
        self,
        finished: Finished,
        solved: Container[int],
        phase: str,
        progress: Progress | None = None,
        *,
        few: bool = False,
    ) -> Iterator[SolvedBlock]:
        """Yield the blocks that are not in `solved` yet, in order; or `few` of them, evenly spaced.

        Work that was lost with a worker is done again from the block that was open; `finished`
        returns the written tensors of those before. Raises CoecError where work is lost too often.
        """
        blocks = self._dense.layout.blocks
        tried = tried_blocks(len(blocks)) if few else range(len(blocks))
        for block in blocks:
            if block.index in self._run.plan.dropped:
                skip = functools.partial(self._group.do, TwoStreams.advance, block.index, {})
                self._before(block.index, finished, skip)
            elif block.index not in tried:
                skip = functools.partial(self._group.do, TwoStreams.advance, block.index, None)
                self._before(block.index, finished, skip)
            elif block.index not in solved:
                if progress and self._predicts(block):  # a pass over the vocabulary takes long
                    progress("solving the last block for its predictions", 0, 1)
                work = functools.partial(self.solve, block)
                (result, hashes), host = self._before(
                    block.index, finished, functools.partial(self._group.solve, work)
                )
                self._dense.hashes.update(hashes)
                yield result.by(host)
                # Go on with what is written: a run that is resumed has nothing else. A worker that
                # is lost meanwhile is brought there before the next block.
                with contextlib.suppress(LostError):
                    self._group.do(
                        TwoStreams.advance, block.index, result.tensors,
                        halfway=self._halfway(block),
                    )  # fmt: skip
                if progress:
                    progress(phase, block.index + 1, len(blocks))

    def end(self, finished: Finished, progress: Progress | None = None) -> JsonDict:
        """Return how well the pruned model predicts validation windows, after the last block.

        Empty where there are none: how well windows are predicted that were fitted on says nothing
        of others. On a real model their KL was less than half of what it was elsewhere
        (docs/lab/LOG.md).
        """
        work = functools.partial(self._end, progress)
        return self._before(len(self._dense.layout.blocks), finished, work)

    def _before(self, index: int, finished: Finished, work: Callable[[], _Result]) -> _Result:
        """Return what some work makes, every worker standing before a block.

        It is done again where a worker was lost meanwhile; CoecError where that happens too often.
        """
        for attempt in range(RETRIES + 1):
            try:
                self._group.bring_to(index, finished)
                return work()
            except LostError as error:
                if attempt == RETRIES:
                    raise lost(error) from error
        raise AssertionError

    def _end(self, progress: Progress | None) -> JsonDict:
        if not self._validates:
            return {}
        dense = self._score(progress, dense=True).perplexity
        return {"windows": "held out", "dense": dense, **self._score(progress).record()}

    def _score(self, progress: Progress | None, *, dense: bool = False) -> Prediction:
        """Return how well either model predicts the validation windows."""
        calibration, length = self._run.recipe.calibration, self._run.plan.seq_len
        count = validation_count(calibration.samples, calibration.validation)
        sums = Prediction()
        for batch in self._group.each(TwoStreams.predict, "validation", dense):
            sums.add(batch)
            if progress:
                progress("predicting windows", sums.tokens // (length - 1), count)
        return sums

    def solve(self, block: BlockLayout) -> tuple[SolvedBlock, dict[str, str]]:
        """Return a block, solved and trained, and the hashes of its dense weights."""
        run = self._run
        tensors = self._dense.tensors(block)
        self._group.do(TwoStreams.open, block.index)
        self._weigh()
        if self._settings.propagate:
            solved = self._solved(block, tensors)
        else:
            solved = solve_block(self._measured(block, tensors), run)
        if self._settings.reconstruct:
            began, row = time.perf_counter(), solved.rows[-1]
            solved = replace(solved, tensors=self._trained(block, solved.tensors, row))
            row["seconds"] += time.perf_counter() - began
        return solved, {name: self._dense.hashes[name] for name in tensors}

    def _measured(self, block: BlockLayout, tensors: dict[str, Tensor]) -> Measured:
        """Return a block with the statistics of all its sites in the dense model."""
        sums = Sums()
        for windows in get_args(WindowKind):
            totals: dict[str, GramSum] = getattr(sums, windows)
            for part in self._group.each(TwoStreams.measure_block, windows):
                for name, total in part.items():
                    if name not in totals:
                        totals[name] = GramSum(len(total.x), self._run.device)
                    totals[name].merge(total)
                del part, total
        return Measured(block, tensors, *sums.grams())

    def _solved(self, block: BlockLayout, tensors: Mapping[str, Tensor]) -> SolvedBlock:
        """Return a block whose sites were solved in sequence, each behind those before it."""
        run, cuts, rows = self._run, [], []
        written = {name: tensor.to(run.written) for name, tensor in tensors.items()}
        for number, site in enumerate(block.sites):
            statistics = self._statistics(number, site, tensors)
            cut, row = solve_site(site, tensors, statistics, run)
            small = cut_block(tensors, [cut], run.written)
            written |= {name: small[name] for name in site.tensors if name in small}
            if site is not block.sites[-1]:  # what is left of the layer is run by `advance`
                self._load(block, site, written)
                self._group.do(TwoStreams.advance_site, number)
            cuts.append(cut)
            rows.append(row)
        return assemble(block, written, cuts, rows, run.plan)

    def _trained(
        self, block: BlockLayout, tensors: Mapping[str, Tensor], row: JsonDict
    ) -> dict[str, Tensor]:
        """Return the tensors of a block, trained as a whole; note the training in `row`.

        Whoever solves the block trains it, on windows that the workers send: its weights change
        with every step, their hidden states do not.
        """
        run, settings, each = self._run, self._settings, self._group.each
        examples = [*each(TwoStreams.examples, "fit")]
        validation = [*each(TwoStreams.examples, "validation")] if self._validates else []
        layers = Layers(self._pruned, device=run.device, dtype=run.forward)
        wide = torch.promote_types(run.forward, torch.float32)
        plain = Training(
            relative_error(examples, run.device), settings.reconstruct, settings.reconstruct_rate,
            nth_seed(run.recipe.calibration.seed, block.index), run.written,
        )  # fmt: skip
        stages = [("reconstruction", plain)]
        if self._predicts(block):
            head = Head(self._dense, device=run.device, dtype=run.forward)
            predictions = replace(
                plain, objective=lambda out, dense, _: head.divergence(out, dense),
                passes=settings.prediction_passes, ends_when_worse=True,
            )  # fmt: skip
            gentler = replace(predictions, rate=_GENTLER * plain.rate)
            stages += [("predictions", predictions), ("predictions", gentler)]
        with recording() as events:
            for name, training in stages:
                if row.get(name, {}).get("taken"):
                    continue  # at the higher rate
                try:
                    trained = train_block(
                        layers.function(block),
                        {name: tensor.to(run.device, wide) for name, tensor in tensors.items()},
                        examples, validation, training,
                    )  # fmt: skip
                    if trained.taken:
                        tensors = {n: cast(p, run.written, n) for n, p in trained.theta.items()}
                    row[name] = trained.record() | {"rate": training.rate}
                except NumericalError as error:
                    record(f"{name}: the block is not trained: {error}")
        row["events"] = [*row["events"], *events]
        return dict(tensors)

    def _halfway(self, block: BlockLayout) -> bool:
        """Tell that solving leaves the pruned model behind the first of two sites, as written."""
        settings = self._settings
        return settings.propagate and not settings.reconstruct and len(block.sites) == 2

    def _predicts(self, block: BlockLayout) -> bool:
        """Tell the last block, where it is trained on what the model predicts."""
        last = block is self._dense.layout.blocks[-1]
        return last and bool(self._settings.prediction_passes)

    def _load(self, block: BlockLayout, site: Site, written: Mapping[str, Tensor]) -> None:
        """Give the pruned model's layer the tensors that a sublayer needs."""
        foreign = {name for s in block.sites if s.name != site.name for name in s.tensors}
        tensors = {name: tensor for name, tensor in written.items() if name not in foreign}
        # Biases of a format that has them everywhere, where nobody computed any.
        for name, shape in self._run.plan.pruned_shapes.items():
            inside = name.startswith(block.prefix) and name.endswith(".bias")
            if inside and name not in tensors and name not in foreign:
                tensors[name] = torch.zeros(shape, dtype=self._run.written)
        self._group.do(TwoStreams.load, tensors)

    def _weigh(self) -> None:
        """Set the weight of every token, of mean 1 over the windows fitted on."""
        if self._settings.token_weights == "equal":
            return
        squares = [s for squares in self._group.each(TwoStreams.squares) for s in squares]
        floor = least_square(squares)
        weights = [token_weights(batch, floor) for batch in squares]
        total = math.fsum(torch.stack([w.sum(dtype=torch.float64) for w in weights]).tolist())
        mean = total / sum(batch.numel() for batch in weights)
        self._group.do(TwoStreams.weigh, floor, mean)

    def _statistics(self, number: int, site: Site, tensors: Mapping[str, Tensor]) -> SiteStatistics:
        """Return the statistics of the consumer's inputs, with the dense weights before it.

        The consumer has to add the residual of the hidden states behind it as well: with `δ` that
        residual, `T = W₀ + (Σ w δ xᵀ)(G + ε)⁻¹` is the consumer that comes closest. It aims at a
        share of that: over windows that earlier blocks were fitted on too, the residual is smaller
        than elsewhere and better foreseen by the inputs, the more so with every block.
        """
        gram, target = self._gram_and_target(number, site, tensors, "fit", share=_CARRIED)
        validation, aim = None, None
        columns = self._pruned_sites[site.key].columns
        guarded = self._run.recipe.calibration.guard and few(gram.tokens, columns)
        if self._validates and guarded:
            validation, aim = self._gram_and_target(number, site, tensors, "validation")
        return SiteStatistics(gram, validation, target, aim)

    def _gram_and_target(
        self,
        number: int,
        site: Site,
        tensors: Mapping[str, Tensor],
        windows: WindowKind,
        *,
        share: float = 1.0,
    ) -> tuple[Gram, Tensor]:
        """Return the Gram of the consumer's inputs, and the target, by a share of what it lacks."""
        sums = ConsumerStatistics(GramSum(site.columns, self._run.device))
        for sums_of_part in self._group.each(TwoStreams.measure, number, windows):
            sums.merge(sums_of_part)
            del sums_of_part  # as large as the sums: before the next is made
        total_weight = sums.gram.weight
        gram = sums.gram.gram()
        with naming(site.consumer):
            gram.check_finite()
        assert sums.residual is not None
        weight = tensors[site.weight].to(gram.xx)
        scale = float(sums.scale)
        factor = float(sums.added) / scale if scale > 0 else 1.0
        residual = sums.residual.to(gram.xx) / (factor or 1.0)
        # Weights of tokens have mean 1 over the windows fitted on; in a Gram, over its own.
        if windows == "validation":
            residual *= gram.tokens / total_weight
        change, _ = solve_with_own_ridge(residual, gram.xx, gram.tokens, gram.precision)
        return gram, weight + share * change
