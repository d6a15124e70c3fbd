"""Phases of a run: the work of each, a formula per step, and what it holds in memory.

A multiplication and an addition are two operations. Cholesky factors and triangular solves count as
products of the same shape, which take as long. Bytes of elementwise traffic and calls of operators
were counted with a dispatch mode. Sites of one kind count as alike, of their mean width.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from coec.models.layout import Site
from coec.planning.machines import Work
from coec.planning.memory import (
    ComputeConfig,
    placed,
    purposes_of,
    text_characters,
    tried_tokens,
)
from coec.planning.plan import Plan, tried_blocks
from coec.reconstruction.block_training import step_tokens
from coec.settings import CoecOptions
from coec.streaming.dense_stream import batch_size
from coec.streaming.windows import MEASURED_TOKENS

_PROCESS = ("program", "text")
_STREAM = (*_PROCESS, "block's weights", "hidden states", "forward pass", "statistics")
_SOLVE = (*_PROCESS, "hidden states", "Grams", "weight", "solver", "decomposition")
_FIT = (*_PROCESS, "block's weights", "hidden states", "fit")
_ALLOCATE = (*_STREAM, "consumers", "Grams", "weight", "solver", "decomposition", "logits")
_PREDICT = (*_PROCESS, "hidden states", "logits")


@dataclass(frozen=True)
class Phase:
    """Phase of a run: its name in plans, all that it does, and bytes of memory by purpose.

    All memory is the host's where that computes.
    """

    name: str
    work: tuple[Work, ...]
    device: dict[str, int]
    host: dict[str, int]

    @property
    def operations(self) -> float:
        """Floating-point operations, without elementwise ones."""
        return sum(piece.operations for piece in self.work)


def phases_of(plan: Plan, compute: ComputeConfig, candidates: Sequence[Plan] = ()) -> list[Phase]:
    """List the phases of a run, in order; `candidates` are tried before, to choose one."""
    run, layers, phases = PlanWork(plan, compute), plan.dense.layers, []

    def add(name: str, steps: Iterable[Work], purposes: tuple[str, ...] = ()) -> None:
        site_kind = name.removeprefix("solving ") if purposes == _SOLVE else ""
        sizes = purposes_of(plan, compute, site_kind) if purposes else {}
        memory = placed({purpose: sizes[purpose] for purpose in purposes}, compute.device)
        phases.append(Phase(name, tuple(steps), *memory))

    # Opening takes calls; a million characters are tokenised per second.
    text = 0.0 if compute.measured else text_characters(plan) / 1e6
    opening = [Work("call", 40_000.0 + 900.0 * layers), Work("host", text)]
    add("starting", [Work("host", 4.0)])
    add("checking", opening, _PROCESS)
    calibration = plan.recipe.calibration
    if calibration.bos == "auto" and not (calibration.own or compute.measured):
        tokens = 2.0 * MEASURED_TOKENS  # where the tokenizer has a start, which no config says
        work = [*run.loading(), *run.forward(tokens)]
        add("measuring bos", work, (*_PROCESS, "block's weights", "logits"))
    if calibration.written and not compute.measured:
        add("sampling text", run.sampling(), (*_PROCESS, "whole model"))
    if not plan.decided:
        add("allocating", run.allocating(), _ALLOCATE)
    stored = float(plan.parameters_before * compute.stored.itemsize)
    add("reading weights", [Work("read", stored)])
    if plan.recipe.reconstruction.sequential:
        trials = [PlanWork(candidate, compute).trial() for candidate in candidates]
        if tried := [step for trial in trials for step in trial]:
            add("trying candidates", tried)
        for name, steps, purposes in run.reconstruction():
            add(name, steps, purposes)
    else:
        if not compute.measured:
            add("loading weights", run.loading())
        add("calibrating", [] if compute.measured else run.dense_pass(), _STREAM)
        for site_kind in run.kinds:
            add(f"solving {site_kind}", run.solving(site_kind), _SOLVE)
    size = 6.0 * plan.parameters_after * compute.written.itemsize  # each block once before
    writing = [Work("elementwise", size, 2.0**24), Work("call", 3000.0 * layers)]
    add("writing", writing, (*_PROCESS, "shard"))
    return phases


class PlanWork:
    """Work of the phases of one plan."""

    def __init__(self, plan: Plan, compute: ComputeConfig) -> None:
        self.plan, self.compute, self.recipe = plan, compute, plan.recipe
        self.dtype, self.itemsize = _name(compute.forward), compute.forward.itemsize
        self.hidden, self.layers = plan.dense.hidden, plan.dense.layers
        self.kinds: dict[str, list[Site]] = {}
        for site in plan.model.layout.sites:
            self.kinds.setdefault(site.kind, []).append(site)
        sequential = self.recipe.reconstruction.sequential
        windows = self.recipe.calibration.windows if sequential else None
        self.batch = batch_size(plan.seq_len, windows) * plan.seq_len  # tokens run at once
        routed = float(plan.model.config.get("num_experts_per_tok") or 1)
        # Fraction of the experts that a token meets.
        self.active = routed / float(plan.dense.experts or routed)

    def forward(
        self, tokens: float, times: float = 1.0, *, half: str = "", pruned: bool = False
    ) -> list[Work]:
        """Run all blocks: 2·weights·tokens, attention maps 4·length·width·tokens, 36·hidden + 8·ffn
        numbers through memory per token, and hidden states from the host to a GPU and back.

        `half` is a kind of site, to run only the halves of blocks that hold it.
        """
        plan, hidden, layers = self.plan, self.hidden, self.layers
        shapes = plan.pruned_shapes if pruned else plan.model.shapes
        weights = ffn = attention = 0.0
        for site in plan.model.layout.sites:
            if half not in ("", site.kind):
                continue
            met = self.active if site.routed else 1.0
            weights += met * sum(shapes[name].numel() for name in site.tensors if name in shapes)
            width = plan.widths.of(site) * site.columns_per_unit if pruned else site.columns
            attention += width * (site.value is not None)
            ffn += width * met * (site.value is None)
        batches = max(1.0, tokens / self.batch)
        rows, maps = tokens / batches, 4.0 * plan.seq_len * attention * tokens
        traffic = (36.0 * hidden * layers + 8.0 * ffn) * tokens * self.itemsize
        copied = 2.0 * hidden * layers * tokens * self.itemsize * (self.compute.device != "cpu")
        edge = (rows * hidden**2) ** (1 / 3)
        return [
            Work("product", 2.0 * weights * tokens, edge, times, self.dtype),
            Work("product", maps, (64.0 * plan.seq_len**2) ** (1 / 3), times, self.dtype),
            Work("elementwise", traffic, 3.0 * rows * hidden * self.itemsize, times),
            Work("call", 110.0 * layers * batches, 1.0, times),
            Work("link", copied, 1.0, times),
        ]

    def sampling(self) -> list[Work]:
        """Sample windows: every token, 2·weights but the embedding's, reads all weights, and keys
        and values before it.
        """
        plan, windows = self.plan, self.recipe.calibration.written
        rows = min(self.compute.at_once, windows)
        steps = -(-windows // self.compute.at_once) * float(plan.seq_len)
        embedding = 0 if plan.model.tied else plan.model.shapes[plan.model.layout.embedding].numel()
        weights = self.active * (plan.parameters_before - embedding)
        read = weights + 3.0 * plan.seq_len * self.hidden * rows * self.layers
        edge = (rows * self.hidden**2) ** (1 / 3)
        return [
            Work("product", 2.0 * weights * rows, edge, steps, self.dtype),
            Work("elementwise", read * self.itemsize, 2.0**20, steps),
            Work("call", 200.0 * self.layers + 900.0, 1.0, steps),
        ]

    def loading(self) -> list[Work]:
        """Convert all weights to the forward dtype, and copy them to a GPU."""
        stored = float(self.plan.parameters_before * self.compute.stored.itemsize)
        copied = stored * (self.compute.device != "cpu")
        return [Work("elementwise", 2 * stored, 2.0**24), Work("link", copied)]

    def dense_pass(self, times: float = 1.0) -> list[Work]:
        """Run the dense model over all windows, and sum the Grams of every site once: 2d²·tokens in
        float32, and the sums in float64.
        """
        steps = self.forward(self.plan.tokens, times)
        for sites in self.kinds.values():
            d, count = sites[0].columns, len(sites)
            tokens = self.plan.tokens * (self.active if sites[0].routed else 1.0)
            batches = max(1.0, tokens / self.batch)
            traffic = 100.0 * d * tokens + 20.0 * d**2 * batches
            steps += [
                product(d, tokens / batches, d, batches * count, "float32"),
                Work("elementwise", traffic, 4.0 * d * tokens / batches, count),
                Work("call", 25.0 * batches, 1.0, count),
            ]
        return steps

    def solving(self, site_kind: str, *, compensate: bool = True) -> list[Work]:
        """Score or eliminate, compensate, and measure errors at all sites of one kind."""
        recipe, sites = self.recipe, list(filter(self.plan.widths.counts, self.kinds[site_kind]))
        site = sites[0]
        kept = round(sum(map(self.plan.widths.of, sites)) / len(sites)) * site.columns_per_unit
        size = SiteSize(
            int(self.plan.model.shapes[site.weight][0]), site.columns, kept, site.value is not None
        )
        steps = errors(size)
        if recipe.pruning.selection == "obs" and recipe.kept is None:
            steps += elimination(size, site.units)
        if compensate and (size.k < size.d or recipe.reconstruction.propagate):
            options = {**CoecOptions().record(), **recipe.method.defaults, **recipe.pruning.options}
            steps += compensation(recipe.method.name, size, self.compute, options)
        return [step._replace(times=step.times * len(sites)) for step in steps]

    def allocating(self) -> list[Work]:
        """Run a dense pass of its own and score units; for errors also eliminate, solve, run the
        dense model and two others, and these again with derivatives, twice a way forward each.
        """
        by_error = self.recipe.pruning.allocation == "error"
        steps = [*self.loading(), *self.dense_pass()]
        for site_kind in self.kinds:
            steps += self.solving(site_kind, compensate=by_error)
        if by_error:
            tokens = tried_tokens(self.plan)
            steps += self.loading() + self.forward(tokens, 9.0) + self._head(tokens, 6.0)
        return steps

    def reconstruction(self) -> Iterator[tuple[str, list[Work], tuple[str, ...]]]:
        """Yield name, work and purposes of every part of running both models side by side.

        The dense blocks run for the targets, and once more where each half is measured.
        """
        settings, calibration = self.recipe.reconstruction, self.recipe.calibration
        share, tokens = calibration.held_out, self.plan.tokens
        held_out = max(1, round(share * calibration.samples)) * self.plan.seq_len if share else 0
        passes = [*self.loading() * 2, *self.dense_pass(2.0)]
        passes += self.forward(tokens, 1.0 + settings.propagate, pruned=True)
        yield "passes", passes, _STREAM
        for site_kind in self.kinds:
            yield f"solving {site_kind}", self.solving(site_kind), _SOLVE
        if settings.reconstruct:
            yield "training blocks", self._training(settings.reconstruct, held_out), _FIT
        if settings.prediction_passes:
            last = self._training(settings.prediction_passes, held_out, 1 / self.layers)
            head = self._head(self.plan.tokens - held_out, 2.0 * settings.prediction_passes)
            yield "training on predictions", [*last, *head], (*_FIT, "logits")
        yield "predicting", self._head(held_out or tokens, 2.0 + settings.final_norm), _PREDICT

    def trial(self) -> Iterator[Work]:
        """Yield the steps of running both models with few blocks pruned, to compare candidates."""
        share = len(tried_blocks(self.layers)) / self.layers
        for name, steps, _ in self.reconstruction():
            pruned = share if name.startswith("solving") else 1.0
            yield from (step._replace(times=pruned * step.times) for step in steps)

    def _training(self, passes: int, held_out: int, share: float = 1.0) -> list[Work]:
        """Train a share of the blocks: a step is one way forward and two back, and AdamW reads and
        writes seven numbers of each weight; held-out windows are run before and behind every pass.
        """
        tokens = float(self.plan.tokens - held_out)
        weights = self.plan.parameters_after - self.plan.model.vocabulary * self.hidden
        steps = passes * math.ceil(tokens / step_tokens(self.plan.seq_len))
        return [
            *self.forward(share * passes * tokens, 3.0, pruned=True),
            *self.forward(share * held_out, passes + 1.0, pruned=True),
            Work("elementwise", 28.0 * share * weights, 28.0 * weights / self.layers, steps),
            Work("call", 400.0 * share * self.layers, 1.0, steps),
        ]

    def _head(self, tokens: float, models: float) -> list[Work]:
        """Compare logits of models with the dense one's: 4·hidden·vocabulary·tokens for each."""
        logits = self.plan.model.vocabulary * tokens
        return [
            Work("product", 4.0 * self.hidden * logits, self.hidden, models, self.dtype),
            Work("elementwise", 88.0 * logits, 2.0**26, models),
            Work("call", 90.0 * max(1.0, logits / 2**24), 1.0, models),
        ]


def product(m: float, n: float, k: float, times: float = 1.0, dtype: str = "float64") -> Work:
    """Multiply m×n by n×k: 2mnk."""
    return Work("product", 2.0 * m * n * k, float(m * n * k) ** (1 / 3), times, dtype)


def eigenpairs(n: int, times: float = 1.0, dtype: str = "float64") -> Work:
    """Find all eigenpairs of n×n: 14/3 n³ (tridiagonalise 4/3, divide and conquer 4/3, back 2)."""
    return Work("eigen", 14 / 3 * n**3, n, times, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SiteSize(NamedTuple):
    """Sizes of a consumer: m outputs, d inputs, of which k stay.

    The alignment penalty applies to attention.
    """

    m: int
    d: int
    k: int
    attention: bool = False


class DescentLength(NamedTuple):
    """Length of COEC's descent at one site: means over the sites of small trained models.

    `steps` counts those of all right solves; a step tries `trials` lengths, and its preconditioner
    takes `inner` iterations (docs/PERFORMANCE.md, `The plan against runs`).
    """

    rounds: float
    steps: float
    trials: float
    inner: float


MLP_DESCENT = DescentLength(2.1, 20, 1.6, 4.6)
ATTENTION_DESCENT = DescentLength(3.1, 30, 1.7, 10.5)
FEWEST_STEPS, MOST_STEPS = 0.6, 3.5
"""Fewest and most steps that were seen, as fractions of the usual number."""
_SOLVERS = {"gradient": 6.0, "conjugate": 2.0, "joint": 1.0}
"""Steps of the right solvers, relative to those of `joint`."""


def errors(site: SiteSize) -> list[Work]:
    """Score units, check statistics and measure errors: 12md²."""
    return [product(site.m, site.d, site.d, 6.0), Work("call", 400.0)]


def elimination(site: SiteSize, units: int) -> list[Work]:
    """Select by `obs`: n³ for an inverse, md² + d³ − k³, and 192(d² − k²) for panels of columns."""
    m, d, k, _ = site
    removed = units * (d - k) // d
    calls = 87.0 if units == d else 93.0 + 11 * units
    return [
        Work("product", m * d**2 + 2 * d**3 - k**3 + 192.0 * (d**2 - k**2), d, 1.0, "float64"),
        Work("call", calls * removed),
    ]


def compensation(
    method: str, site: SiteSize, compute: ComputeConfig, options: Mapping[str, Any]
) -> list[Work]:
    """Compensate by a method; nothing for the methods without cost.

    Ridges take 2md² + 2mk², a Cholesky factor of k×k and two solves with m columns, and a choice of
    λ the eigenpairs of k×k and 4mk² + 4k³; rcpu 2md² + 6mk², an SVD and a polar factor of m×k.
    """
    m, d, k, attention = site
    if method == "coec":
        descent = ATTENTION_DESCENT if attention else MLP_DESCENT
        return coec(site, descent, compute, options)
    steps = [product(m, d, d), product(m, k, k, 3.0), Work("call", 150)]
    if method in ("least-squares", "ridge-to-slice"):
        if options.get("ridge") == "auto":
            steps += [product(m, k, k, 2.0), product(k, k, k, 2.0), eigenpairs(k)]
        return [*steps, product(k, k, k / 2)]
    if method == "rcpu":
        return steps + _decompositions(m, k, compute.device, "float64", svds=1, polars=1)
    return []


def coec(
    site: SiteSize, descent: DescentLength, compute: ComputeConfig, options: Mapping[str, Any]
) -> list[Work]:
    """Compensate by COEC: rcpu, eigenpairs of d×d and k×k, 2md² + 2mdk + 2k²d + 4mk² + 4bk² + 2mbk,
    an SVD of m×k (in attention three), two polar factors and 2mbk per round, and steps.

    A step of t trials and i inner iterations takes products of b×k frames, 4 + 2t (tangents,
    retractions) and 3 + 2i in float32 (preconditioner), 1 + t of m×k by k×b, and t polar factors.
    """
    m, d, k, attention = site
    b, t, i, dtype = min(m, k), descent.trials, descent.inner, _name(compute.solve)
    rounds = min(descent.rounds, options["rounds"])
    steps = min(descent.steps, descent.rounds * options["iterations"])
    steps *= _SOLVERS[options["solver"]] * (rounds > 0 and options["rotation"] != "left")
    polars = 2 + 2 * rounds + (steps * t if options["solver"] == "joint" else 0.0)
    calls = 111 + 74 * t + 19 * i + (116 + 15 * i if attention else 0)  # alignment adds some
    setup = 2.0 * m * d * (d + k) + 2.0 * k**2 * (d + 2 * m + 2 * b) + 2.0 * m * b * k
    work = [
        *compensation("rcpu", site, compute, options), eigenpairs(d), eigenpairs(k),
        *_decompositions(m, k, compute.device, dtype, svds=3 if attention else 1),
        *_decompositions(m, b, compute.device, dtype, polars=polars),
        Work("product", setup, k, 1.0, "float64"), product(m, b, k, 3 + rounds, dtype),
        product(b, k, b, (4 + 2 * t) * steps, dtype), product(m, k, b, (1 + t) * steps, dtype),
        product(b, k, b, (3 + 2 * i) * steps, "float32"),
        Work("elementwise", 1500.0 * b * k, 8.0 * b * k, steps),
        Work("call", 600 + 130 * rounds + calls * steps),
    ]  # fmt: skip
    return work * (2 if options["rotation"] == "better" else 1)


def _decompositions(
    m: int, n: int, device: str, dtype: str, *, svds: float = 0.0, polars: float = 0.0
) -> list[Work]:
    """Decompose m×n: 6mn² + 20/3 n³ for each SVD and polar factor.

    On a GPU a polar factor takes six QDWH steps, 44mn², and an SVD the eigenpairs of n×n besides.
    """
    m, n = max(m, n), min(m, n)
    if device == "cpu":
        return [Work("eigen", 6.0 * m * n**2 + 20 / 3 * n**3, n, svds + polars, dtype)]
    return [product(m, n, n, 22 * (svds + polars), dtype), eigenpairs(n, svds, dtype)]
