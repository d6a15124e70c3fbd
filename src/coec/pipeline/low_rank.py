"""Solve blocks whose matrices become low rank, and measure what truncating each of them costs.

Every matrix is solved on the inputs that the low-rank model has. Those that add to the hidden state
aim at the dense one, the others at their own dense outputs (METHODS §11).
"""

import functools
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coec.allocation import Importances
from coec.allocation.ranks import largest_rank
from coec.distributed.cluster import LostError, lost
from coec.events import Progress, recording
from coec.execution.journal import Journal
from coec.linalg.low_rank import PivotRows, Spectrum, pivot_rows, spectrum
from coec.linalg.spd import solve_right
from coec.models.dense import Dense
from coec.models.files import JsonDict, read_tensors, write_tensors
from coec.models.layout import BlockLayout, Site
from coec.models.low_rank import stored_tensors
from coec.models.surgery import cast
from coec.pipeline.reconstruct import BlockReconstruction
from coec.pipeline.solve import SolvedBlock, assemble, naming
from coec.planning.run import Run
from coec.streaming.passes import BlockSource
from coec.streaming.sensitivity import SHARES, Truncations
from coec.streaming.two_streams import ConsumerStatistics, TwoStreams
from coec.types import Gram, GramSum

_PIECE = "costs of ranks"
_RIDGE = 1e-3
"""Ridge of targets and of the metric, relative to the Gram's mean diagonal."""
Target = tuple[str, Float[Tensor, "m n"], Gram]
"""Name of a weight, the matrix that it aims at, and the Gram of its inputs."""


class LowRankReconstruction(BlockReconstruction):
    """The blocks of a low-rank model, solved in sequence."""

    def solve(self, block: BlockLayout) -> tuple[SolvedBlock, dict[str, str]]:
        """Return a block whose matrices are of the planned ranks, and hashes of its weights."""
        run, rows = self._run, []
        tensors = self._dense.tensors(block)
        replaced = run.plan.model.matrices
        written = {n: t.to(run.written) for n, t in tensors.items() if n not in replaced}
        self._group.do(TwoStreams.open, block.index)
        self._weigh()
        self._group.do(TwoStreams.load, written)
        for number, site in enumerate(block.sites):
            for targets in self._targets(number, site, tensors, loaded=True):
                for target in targets:
                    new, row = _solved(site, target, run)
                    self._group.do(TwoStreams.load, new)
                    written |= new
                    rows.append(row)
            if site is not block.sites[-1]:
                self._group.do(TwoStreams.advance_site, number)
        solved = assemble(block, written, [], rows, run.plan)
        return solved, {name: self._dense.hashes[name] for name in tensors}

    def begin(self) -> None:
        """Have every worker stand before the first block."""
        self._before(0, lambda index: None, lambda: None)

    def spectra(
        self, block: BlockLayout, tensors: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Spectrum]]:
        """Return every matrix of the next block in the dense model, and its spectrum there."""
        spectra = {}
        self._group.do(TwoStreams.open, block.index)
        self._weigh()
        for number, site in enumerate(block.sites):
            for targets in self._targets(number, site, tensors):
                for name, W, gram in targets:
                    with naming(name.removesuffix(".weight")):
                        spectra[name] = W, spectrum(W, gram.xx, _RIDGE)
            self._group.do(TwoStreams.follow, number)
        self._group.do(TwoStreams.skip)
        return spectra

    def _targets(
        self, number: int, site: Site, tensors: Mapping[str, Tensor], *, loaded: bool = False
    ) -> Iterator[list[Target]]:
        """Yield targets of a site's producers, and when these are loaded that of its consumer."""
        sums = ConsumerStatistics(GramSum(self._dense.shape.hidden, self._run.device))
        for sums_of_part in self._group.each(TwoStreams.measure_producers, number, "fit"):
            sums.merge(sums_of_part)
        names = dict.fromkeys(rows.tensor for rows in site.producers)
        gram = sums.gram.gram()
        with naming(site.producers[0].tensor.removesuffix(".weight")):
            gram.check_finite()
        assert sums.residual is not None
        moved = solve_right(sums.residual.to(gram.xx), gram.xx, _RIDGE, gram.precision)
        matrices = {n: tensors[n].to(gram.xx) for n in names if n.endswith(".weight")}
        yield [(name, W + W @ moved, gram) for name, W in matrices.items()]
        gram, target, _ = self._gram_and_target(number, site, tensors, "fit", loaded=loaded)
        yield [(site.weight, target, gram)]


def measure_costs(
    journal: Journal,
    dense: Dense,
    source: BlockSource,
    run: Run,
    progress: Progress | None = None,
) -> Importances:
    """Return what rank 1, 2, … of every matrix alone costs in KL to the dense model, by its name.

    The cost is measured at a few ranks and is linear in the squared error between them; the journal
    keeps it.

    Raises:
        NumericalError: statistics, weights or predictions are not finite.
    """
    if _PIECE not in journal:
        fit, _ = source.windows_of_text()
        models = Truncations(dense, fit, device=run.device, dtype=run.forward)
        errors: dict[str, Tensor] = {}
        with source.worker_group(run) as group:
            reconstruction = LowRankReconstruction(dense, run, group)
            reconstruction.begin()
            for block in dense.layout.blocks:
                tensors = dense.tensors(block)
                try:
                    spectra = reconstruction.spectra(block, tensors)
                except LostError as error:
                    raise lost(error) from error
                errors |= {name: values.errors.cpu() for name, (_, values) in spectra.items()}
                models.advance(block, tensors, _truncated(spectra))
                if progress:
                    progress("allocating", block.index + 1, len(dense.layout.blocks))
        costs = models.costs()
        curves = {name: _curve(error, costs[name]) for name, error in errors.items()}
        path = journal.work / "costs.safetensors"
        made_of = dense.digests_of(dense.layout.blocks)
        journal.put(_PIECE, path, functools.partial(write_tensors, curves), made_of=made_of)
    return read_tensors(journal.path(_PIECE))


def _truncated(
    spectra: Mapping[str, tuple[Tensor, Spectrum]],
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the names of matrices, ranks, and the matrices truncated to them."""
    for name, (W, truncation) in spectra.items():
        for rank in sorted({largest_rank(W.shape, share) for share in SHARES}):
            yield name, rank, truncation.truncated(W, rank)


def _curve(errors: Float[Tensor, " r"], costs: Mapping[int, float]) -> Float[Tensor, " r"]:
    """Return the cost of every rank, by those measured and by squared errors; it never rises."""
    points = sorted([(0.0, 0.0), *((float(errors[rank - 1]), c) for rank, c in costs.items())])
    levels = np.maximum.accumulate([cost for _, cost in points])
    curve = np.interp(errors.numpy(), [error for error, _ in points], levels)
    curve[-1] = 0.0  # the whole matrix
    return torch.from_numpy(curve)


def _solved(site: Site, target: Target, run: Run) -> tuple[dict[str, Tensor], JsonDict]:
    """Return the tensors in place of a matrix, and its row for the report."""
    began = time.perf_counter()
    name, W, gram = target
    module, full_rank = name.removesuffix(".weight"), min(W.shape)
    rank = run.plan.ranks.get(name, full_rank)
    with naming(module), recording() as events:
        if rank == full_rank:
            new = {name: cast(W, run.written, module)}
            matrix = new[name].to(W)
        else:
            truncation = spectrum(W, gram.xx, _RIDGE)
            rows = pivot_rows(truncation.truncated(W, rank), truncation.basis[:, :rank])
            pivots, coefficients = (cast(factor, run.written, module) for factor in rows[:2])
            new = stored_tensors(name, pivots, coefficients, rows.order.cpu())
            matrix = PivotRows(pivots.to(W), coefficients.to(W), rows.order).matrix()
        error = _energy(W - matrix, gram) / (_energy(W, gram) or 1.0)
    return new, {
        "module": module,
        "block": site.block,
        "site": site.kind,
        "units_before": full_rank,
        "units_after": rank,
        "error_before": None,
        "error_after": error,
        "events": list(events),
        "seconds": time.perf_counter() - began,
    }


def _energy(W: Float[Tensor, "m n"], gram: Gram) -> float:
    """`Σ w |W x|²` over the inputs."""
    return float((W @ gram.xx * W).sum())
