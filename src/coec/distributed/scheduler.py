"""The solving stage on a cluster: blocks are solved as tasks while the dense pass goes on."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from coec.distributed.cluster import RETRIES, LostError, begin, lost
from coec.distributed.shares import DistributedPass, PendingBlock
from coec.events import Progress
from coec.models.dense import Dense
from coec.pipeline.solve import Solved, SolvedBlock, solve_block
from coec.planning import Plan
from coec.streaming.dense_stream import Measured, Sums


@dataclass(eq=False)
class BlockScheduler:
    """Blocks on their way: through the workers of the dense pass, and then to a task each.

    Args:
        source: the dense pass.
        dense: the model.
        plan: how it is pruned.
        dtype: of the written weights.
    """

    source: DistributedPass
    dense: Dense
    plan: Plan
    dtype: torch.dtype

    def blocks(self, skip: Container[int], progress: Progress | None) -> Iterator[Solved]:
        """The blocks that are not in `skip`, as they are finished.

        Lost work is done again: of a block in flight all of it, of a worker's windows what is
        needed to go on.

        Raises:
            CoecError: as `solve_block`; or work was lost too often.
        """
        ray, cluster = self.source.cluster.ray, self.source.cluster
        waiting = [b.index for b in self.dense.layout.blocks if b.index not in skip]
        total, losses, done = len(waiting), 0, 0
        flying: dict[Any, PendingBlock] = {}
        progress = progress or (lambda phase, done, total: None)
        while waiting or flying:
            while waiting and len(flying) < self.source.in_flight:
                oldest = min([*waiting, *(a.block.index for a in flying.values())])
                arriving = self.source.arriving(waiting.pop(0), oldest=oldest)
                flying[self._task(arriving)] = arriving
            finished, _ = ray.wait(list(flying), timeout=1)
            self._show(progress, done, total, flying)
            if not finished and self.source.refitted():
                for reference in flying:
                    ray.cancel(reference)
                waiting = sorted([*waiting, *(a.block.index for a in flying.values())])
                flying.clear()
            for reference in finished:
                arriving = flying.pop(reference)
                try:
                    handed: SolvedBlock = cluster.get(reference)
                except LostError as error:
                    losses += 1
                    if losses > RETRIES * len(self.dense.layout.blocks):
                        raise lost(error) from error
                    waiting.insert(0, arriving.block.index)
                    continue
                done += 1
                self.dense.hashes.update(handed.hashes)
                yield handed.solved
                progress("solving", done, total)

    def _task(self, arriving: PendingBlock) -> Any:
        """A reference to the block, solved."""
        cluster, device = self.source.cluster, self.source.device
        task = cluster.ray.remote(
            max_retries=RETRIES, scheduling_strategy="SPREAD", **cluster.half(device)
        )(_solve)
        return task.remote(
            arriving.sums, self.dense, arriving.block.index, self.plan, device, self.dtype,
            cluster.threads,
        )  # fmt: skip

    def _show(
        self, progress: Progress, done: int, total: int, flying: dict[Any, PendingBlock]
    ) -> None:
        """How many times a worker has passed a block: one bar for all workers."""
        stages = [stage for arriving in flying.values() for stage in arriving.stages]
        if stages:
            ray = self.source.cluster.ray
            passed, _ = ray.wait(stages, num_returns=len(stages), timeout=0, fetch_local=False)
            each = len(stages) // len(flying)
            progress("calibrating", done * each + len(passed), total * each)


def _solve(
    sums: Sums,
    dense: Dense,
    index: int,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
) -> SolvedBlock:
    """One block, in a process of the cluster."""
    begin(threads)
    block = dense.layout.blocks[index]
    tensors = dense.tensors(block)
    fit, held = sums.to(device).grams()
    solved = solve_block(Measured(block, tensors, fit, held), plan, device, dtype)
    return SolvedBlock(solved, {name: dense.hashes[name] for name in tensors}).signed()
