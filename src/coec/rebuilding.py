"""The solving stage in order: the pruned model beside the dense one, a block after the other.

Each site is measured on the inputs that the pruned model has there, aims at the dense model's
hidden states, the error made so far included, and is then fitted to them, its producers too
(METHODS §8). What is solved already is only run through.
"""

import functools
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from coec.calibration.head import Head, rescaled_norm
from coec.calibration.layers import TOKENS_PER_BATCH, Layers, State, to_host
from coec.calibration.measure import DensePass, Source
from coec.errors import NumericalError
from coec.events import Progress, record, recording
from coec.execution.journal import Journal
from coec.linalg.spd import solve_right
from coec.models.ahead import ReadAhead
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import write_json
from coec.models.layout import BlockLayout, Rows, Site
from coec.models.surgery import cast, cut_block, with_rows
from coec.planning import Plan
from coec.reconstruction import Batch, LeastSquares, fit
from coec.solving import SiteStatistics, Solved, assembled, naming, own_seed, solve_site
from coec.types import GramSum
from coec.writing import Checkpoint

States = list[State]
TARGET_RIDGE = 1e-3
"""Of the least-squares map from inputs to targets, relative to the mean diagonal of the Gram."""
ATTENTION_STEPS = 1
"""Steps that fit attention: more gain nothing (docs/LOG.md)."""
SMALLEST = 1e-3
"""Mean squares of hidden states below this share of the median count as that much."""
LEAST_BATCHES = 8
"""So many where there are windows enough: a share of them can stand for all."""
Finished = Callable[[BlockLayout], Mapping[str, Tensor]]


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

    def beside(plan: Plan) -> SideBySide:
        return SideBySide(
            dense, plan, *source.parts(), device=device, dtype=source.dtype, written=dtype
        )

    tried: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items() if len(plans) > 1 else ():
        piece = f"trial-{name}.json"
        if piece not in done:
            facts = _trial(beside(plan.briefly()), f"trying {name}", progress)
            facts["widths"] = plan.record()["widths"]
            done.put(piece, done.work / piece, functools.partial(_write, facts), **facts)
        tried[name] = done.facts(piece)
    # Perplexity of few windows is noisy: how likely their next tokens were says less about a model
    # than all that the dense one expects there (docs/LOG.md).
    chosen = min(tried or plans, key=lambda name: _of(tried.get(name, {}).get("kl")))
    made = Checkpoint(done, dense, plans[chosen], dtype)
    if not made.ended or len(made.solved) < len(dense.layout.blocks):
        both = beside(plans[chosen])
        for solved in both.blocks(made.tensors, made.solved, "rebuilding", progress):
            made.keep(solved)
        ending = both.end()
        made.end(ending.norm, ending.facts)
    return made, {"kv_groups": chosen, **made.facts, "candidates": tried}


def _write(facts: dict[str, Any], path: Path) -> None:
    write_json(path, facts)


def _trial(both: "SideBySide", phase: str, progress: Progress | None) -> dict[str, Any]:
    """How well a pruned model predicts; nothing of it is kept."""
    for _ in both.blocks(lambda block: {}, (), phase, progress):
        pass
    return both.end().facts


class SideBySide:
    """The dense and the pruned model over the same windows.

    Args:
        dense: the model.
        plan: the sizes of the pruned one, and how it is made.
        windows: token ids to fit on.
        held_out: others, on which nothing may get worse.
        device: where to compute; hidden states wait on the CPU.
        dtype: of the forward pass.
        written: the dtype of the written weights, with which the pruned model is run on.
    """

    def __init__(
        self,
        dense: Dense,
        plan: Plan,
        windows: Int[Tensor, "n length"],
        held_out: Int[Tensor, "h length"] | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        written: torch.dtype,
    ) -> None:
        self._dense, self._plan, self._how = dense, plan, plan.recipe.rebuilding
        self._device, self._dtype, self._written = device, dtype, written
        size = max(1, min(TOKENS_PER_BATCH // windows.shape[1], len(windows) // LEAST_BATCHES))
        self._windows = windows if held_out is None else held_out
        fitted = windows.split(size)
        self._batches = fitted if held_out is None else fitted + held_out.split(size)
        self._fit = range(len(fitted))
        self._held = range(len(fitted), len(self._batches))
        self._big = Layers(dense, device=device, dtype=dtype)
        pruned = Description.of(plan.output.config)
        self._small = Layers(pruned, device=device, dtype=dtype)
        self._smaller = {site.key: site for site in pruned.layout.sites}

    def blocks(
        self,
        finished: Finished,
        solved: Container[int],
        phase: str = "rebuilding",
        progress: Progress | None = None,
    ) -> Iterator[Solved]:
        """Yields the blocks that are not solved yet, in order.

        Args:
            finished: the written tensors of a solved block.
            solved: which are.
            phase: what progress calls this.
            progress: called with (phase, finished blocks, blocks).
        """
        embedding = self._dense.tensor(self._dense.layout.embedding)
        self._above = self._big.embed(self._batches, embedding)
        self._below = self._small.embed(self._batches, embedding.to(self._written))
        with ReadAhead(self._dense, last=len(self._dense.layout.blocks) - 1) as ahead:
            for block in self._dense.layout.blocks:
                tensors = ahead.tensors(block)
                self._big.load(block, tensors)
                if block.index in solved:
                    written: Mapping[str, Tensor] = finished(block)
                    with torch.no_grad():
                        self._above = [self._big.advance(block.index, s) for s in self._above]
                else:
                    result = self._solve(block, tensors)
                    written = result.tensors
                    yield result
                # As it is written: a run that goes on from the disk has nothing else.
                self._small.load(block, written)
                with torch.no_grad():
                    self._below = [self._small.advance(block.index, s) for s in self._below]
                self._big.drop(block.index)
                self._small.drop(block.index)
                if progress:
                    progress(phase, block.index + 1, len(self._dense.layout.blocks))

    def end(self) -> Ending:
        """What the pruned model's end needs, and how well it predicts; after the last block."""
        head = Head(self._dense, device=self._device, dtype=self._dtype)
        judged = self._held or self._fit
        mine, theirs = ([states[n] for n in judged] for states in (self._below, self._above))
        facts = {
            "windows": "held out" if self._held else "fitted",
            "dense": head.score(theirs, theirs, self._windows).perplexity,
        }
        plain = head.score(mine, theirs, self._windows)
        if not self._how.final_norm:
            return Ending(None, {**facts, **asdict(plain)})
        fitted = ([states[n] for n in self._fit] for states in (self._below, self._above))
        try:
            norm = cast(rescaled_norm(head, *fitted), self._written, "final norm")
        except NumericalError as error:
            record(f"the final norm is not rescaled: {error}")
            return Ending(None, {**facts, **asdict(plain)})
        rescaled = head.score(mine, theirs, self._windows, norm)
        taken = _of(rescaled.perplexity) < _of(plain.perplexity)
        tried = {"taken": taken, "without": plain.perplexity, "with": rescaled.perplexity}
        score = asdict(rescaled if taken else plain)
        return Ending(norm if taken else None, {**facts, **score, "final_norm": tried})

    @torch.no_grad()
    def _after(self, block: BlockLayout) -> list[States]:
        """The dense hidden states behind every part of a block, in the order of its sites."""
        states, found = self._above, []
        for site in block.sites:
            half = self._big.half(block, site)
            states = [self._run(self._big, half, block, state) for state in states]
            found.append(states)
        return found

    def _solve(self, block: BlockLayout, tensors: dict[str, Tensor]) -> Solved:
        before = self._above
        after = self._after(block)
        weights = self._token_weights(after[-1])
        self._above = after[-1]
        below, cuts, rows = self._below, [], []
        written = {name: tensor.to(self._written) for name, tensor in tensors.items()}
        for site, targets in zip(block.sites, after, strict=True):
            inputs = below if self._how.propagate else before
            statistics = self._measured(block, site, tensors, inputs, targets, weights)
            cut, row = solve_site(site, tensors, statistics, self._plan, self._device)
            small = cut_block(tensors, [cut], self._written)
            written |= {name: small[name] for name in site.tensors if name in small}
            self._load_half(block, site, written)
            if self._how.reconstruct:
                began = time.perf_counter()
                written |= self._fitted(block, site, inputs, targets, weights, written, row)
                self._load_half(block, site, written)
                row["seconds"] += time.perf_counter() - began
            if site is not block.sites[-1]:  # behind the last the whole layer is run, as written
                half = self._small.half(block, site)
                with torch.no_grad():
                    below = [self._run(self._small, half, block, state) for state in below]
            before = targets
            cuts.append(cut)
            rows.append(row)
        return assembled(block, written, cuts, rows, self._plan)

    @torch.no_grad()
    def _measured(
        self,
        block: BlockLayout,
        site: Site,
        tensors: Mapping[str, Tensor],
        inputs: States,
        targets: States,
        weights: list[Tensor],
    ) -> SiteStatistics:
        """Statistics of the consumer's inputs, with the dense weights before it.

        What is missing in the hidden states behind it, the consumer has to add: with `δ` that
        difference, `T = W₀ + (Σ w δ xᵀ)(G + ε)⁻¹` is the consumer that comes closest.
        """
        half = self._big.half(block, site)
        consumer = half.get_submodule(site.consumer.removeprefix(block.prefix))
        seen: list[tuple[Tensor, Tensor]] = []
        hook = consumer.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
        sums = {kind: GramSum(site.columns, self._device) for kind in ("fit", "held")}
        missing: Tensor | float = 0.0
        added = scale = 0.0
        try:
            for n, (state, target) in enumerate(zip(inputs, targets, strict=True)):
                state = state.to(self._device)
                out = self._big.call(half, block.index, state)
                x, consumed = seen.pop()
                w = weights[n].to(self._device)
                sums["fit" if n in self._fit else "held"].update(x, w)
                if n in self._fit and self._how.propagate:
                    delta = _flat(target.to(self._device)) - _flat(out)
                    weighted = delta * w.reshape(-1, 1).to(delta)
                    missing = missing + (weighted.T @ _flat(x)).double()
                    # A model may scale what a part adds, by one number for all.
                    part = _flat(out) - _flat(state)
                    added += float((part * _flat(consumed)).sum(dtype=torch.float64))
                    scale += float(_flat(consumed).square().sum(dtype=torch.float64))
        finally:
            hook.remove()
        gram = sums["fit"].gram()
        with naming(site.consumer):
            gram.check_finite()
        target_weight = None
        if isinstance(missing, Tensor):
            weight = tensors[site.weight].to(gram.xx)
            factor = added / scale if scale > 0 else 1.0
            correction = solve_right(
                missing / (factor or 1.0), gram.xx, TARGET_RIDGE, gram.precision
            )
            target_weight = weight + correction
        # The target is of the windows fitted on: what it misses on others is not known.
        held = sums["held"].gram() if self._held and target_weight is None else None
        return SiteStatistics(gram, held, target_weight)

    def _fitted(
        self,
        block: BlockLayout,
        site: Site,
        inputs: States,
        targets: States,
        weights: list[Tensor],
        written: Mapping[str, Tensor],
        row: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Those weights of a half that were fitted to the targets; the account goes into `row`."""
        half = self._small.half(block, site)
        fitted_rows = _fitted_rows(self._smaller[site.key], written)
        tensors = {rows.tensor for rows in fitted_rows.values()}
        own = {tensor: tensor.removeprefix(block.prefix) for tensor in tensors}
        held = {tensor: half.get_parameter(name).detach() for tensor, name in own.items()}

        def function(theta: dict[str, Tensor], state: Tensor) -> Tensor:
            state_dict = {own[t]: p for t, p in _whole(held, fitted_rows, theta).items()}
            call = lambda *args, **kwargs: functional_call(half, state_dict, args, kwargs)  # noqa: E731
            return self._small.call(call, block.index, state)

        modules = {
            name: half.get_submodule(own[rows.tensor].removesuffix(".weight"))
            for name, rows in fitted_rows.items()
        }
        parts = [
            [Batch(inputs[n], targets[n], weights[n]) for n in numbers]
            for numbers in (self._fit, self._held)
        ]
        problems = [
            LeastSquares(
                function,
                modules,
                part,
                self._device,
                rows={name: slice(r.start, r.stop) for name, r in fitted_rows.items()},
                quadratic=site.value is not None,
                curvature=self._how.curvature,
            )
            if part
            else None
            for part in parts
        ]
        assert problems[0] is not None
        wide = torch.promote_types(self._dtype, torch.float32)
        theta = {
            name: written[rows.tensor][rows.start : rows.stop].to(self._device, wide)
            for name, rows in fitted_rows.items()
        }
        steps = self._how.reconstruct
        with recording() as events:
            found = fit(
                problems[0], problems[1], theta,
                steps=steps if site.value is None else min(steps, ATTENTION_STEPS),
                iterations=self._how.inner, damping=self._how.damping,
                seed=own_seed(self._plan.recipe.calibration.seed, site.block),
            )  # fmt: skip
            fitted: dict[str, Tensor] = {}
            try:
                if any(step.length for step in found.steps):
                    new = {n: cast(p, self._written, n) for n, p in found.theta.items()}
                    fitted = _whole(written, fitted_rows, new)
            except NumericalError as error:
                record(f"the reconstruction is taken back: {error}")
                found = found.taken_back()
        row["reconstruction"] = found.record()
        row["events"] = [*row["events"], *events]
        return fitted

    def _load_half(self, block: BlockLayout, site: Site, written: Mapping[str, Tensor]) -> None:
        """Gives the pruned model's layer what a half of it needs."""
        others = {name for s in block.sites if s.name != site.name for name in s.tensors}
        own = {name: tensor for name, tensor in written.items() if name not in others}
        # Biases of a format that has them everywhere, where nobody computed any.
        for name, shape in self._plan.pruned_shapes.items():
            inside = name.startswith(block.prefix) and name.endswith(".bias")
            if inside and name not in own and name not in others:
                own[name] = torch.zeros(shape, dtype=self._written)
        self._small.load(block, own, part=True)

    def _run(self, layers: Layers, half: nn.Module, block: BlockLayout, state: State) -> State:
        return to_host(layers.call(half, block.index, state.to(self._device)))

    def _token_weights(self, states: States) -> list[Float[Tensor, "_ length"]]:
        """W of every token, of mean 1 over the windows fitted on."""
        if self._how.token_weights == "equal":
            return [torch.ones(state.shape[:2]) for state in states]
        squares = [state.float().square().mean(dim=-1) for state in states]
        least = SMALLEST * float(torch.cat([squares[n].flatten() for n in self._fit]).median())
        weights = [1 / square.clamp_min(least or 1.0) for square in squares]
        total = math.fsum(float(weights[n].sum(dtype=torch.float64)) for n in self._fit)
        mean = total / sum(weights[n].numel() for n in self._fit)
        return [weight / mean for weight in weights]


def _fitted_rows(site: Site, tensors: Mapping[str, Tensor]) -> dict[str, Rows]:
    """The rows of a pruned site that are fitted, by the names that θ has for them."""
    consumer = Rows(site.weight, 0, len(tensors[site.weight]))
    return {
        rows.tensor
        if rows.stop - rows.start == len(tensors[rows.tensor])
        else f"{rows.tensor}[{rows.start}:{rows.stop}]": rows
        for rows in (*site.fitted, consumer)
    }


def _whole(
    tensors: Mapping[str, Tensor], rows: Mapping[str, Rows], theta: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors that θ are rows of, with θ in them."""
    parts: dict[str, dict[Rows, Tensor]] = {}
    for name, one in rows.items():
        parts.setdefault(one.tensor, {})[one] = theta[name]
    return {tensor: with_rows(tensors[tensor], own) for tensor, own in parts.items()}


def _of(score: float | None) -> float:
    """To be compared: one that is not finite is the worst."""
    return math.inf if score is None else score


def _flat(tensor: Tensor) -> Float[Tensor, "tokens d"]:
    """Every token a row, in float32 or wider."""
    return tensor.flatten(0, -2).to(torch.promote_types(tensor.dtype, torch.float32))
