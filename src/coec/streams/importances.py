"""How important the units of every site are, in a dense pass before the blocks are solved.

Widths that differ by block depend on all blocks at once, so that a block's statistics are measured
twice, and only one block's are in memory at a time. The same relative error matters a hundred times
more at one site than at another, and nothing in a site's own statistics says where. So the KL
divergence of the pruned model from the dense one is distributed over the sites, by its derivatives
on the way there (METHODS §10).
"""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from coec import parallel
from coec.errors import NumericalError
from coec.events import Progress
from coec.methods.block_training import step_tokens
from coec.models.calls import State
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import Cut, with_bias
from coec.planning.by_importance import by_error
from coec.planning.plan import Plan
from coec.solve import naming, solve_site
from coec.streams.head import Head
from coec.streams.layers import Layers
from coec.streams.streams import BlockSums, Streams
from coec.text.windows import TRIED_TOKENS, first_windows

_LEAST = 1e-4
"""Lower bound on the cost of pruning a site, as a share of the mean. If pruning costs nothing that
can be measured, the shape of a site's curve alone says how few units will do."""
_RULE = {0.5: 2 / 3, 1.0: 1 / 6}
"""Weights of derivatives, by the share of the way from the dense model to the pruned one at which
they are taken: Simpson's rule, as they are 0 at the start."""
_Parameters = tuple[Tensor, Tensor | None]
"""Weight and bias of a consumer."""


def importances(
    plan: Plan, dense: Dense, windows: Int[Tensor, "n length"], progress: Progress | None
) -> tuple[dict[str, Tensor], JsonDict]:
    """Return the importance of every unit at the sites that share a budget, by `Site.key`, that of
    the last unit to be removed first; no facts.

    Raises:
        NumericalError: statistics, weights or predictions are not finite.
    """
    streams, blocks = Streams(plan, dense, windows, pruned=False), plan.model.layout.blocks
    sensitivity = parallel.lead_only(Sensitivity, dense, windows, plan)
    curves: dict[str, Tensor] = {}
    # Every block: sums → shapes of its curves → pruned consumers → all models advance
    for block in blocks:
        tensors, sums = streams.measure(block)
        if sensitivity is not None and sums is not None:
            consumers = _pruned_consumers(block, tensors, sums, plan, curves)
            sensitivity.advance(block, tensors, consumers)
        if progress:
            progress("allocating", block.index + 1, len(blocks))
    # Curves of all sites → heights, measured on the way back through the blocks
    if sensitivity is not None:
        curves = _scaled(curves, sensitivity.costs(progress), plan)
    return curves, {}


def _pruned_consumers(
    block: BlockLayout,
    tensors: Mapping[str, Tensor],
    sums: BlockSums,
    plan: Plan,
    curves: dict[str, Tensor],
) -> dict[str, "_Parameters"]:
    """Return the consumers of a block as the uniform plan has them, in the dense shape; add the
    curves of its sites.
    """
    consumers, shared = {}, {site.key for site in plan.shared}
    for site in block.sites:
        gram, units = sums.pop(site.name).gram(), None
        if site.key in shared:
            with naming(site.consumer):
                gram.check_finite()
                weight = tensors[site.weight].to(plan.device)
                width = plan.widths.of(site)
                curves[site.key], units = by_error(weight, gram, site.units, width, site.ranges)
        if block.index not in plan.dropped:
            written = tensors[site.weight].dtype
            cut, _ = solve_site(site, tensors, gram, plan, units=units, written=written)
            if cut.result is not None:
                consumers[site.key] = _in_dense_shape(cut, tensors)
    return consumers


def _in_dense_shape(cut: Cut, tensors: Mapping[str, Tensor]) -> "_Parameters":
    """Return a compensated consumer with its columns where they were, and 0 elsewhere."""
    assert cut.result is not None
    old, bias = tensors[cut.site.weight], tensors.get(cut.site.bias)
    weight = torch.zeros(old.shape, dtype=cut.result.weight.dtype)
    kept = cut.site.kept_columns(cut.units).indices.cpu()
    weight[:, kept] = cut.result.weight.cpu()
    if cut.result.bias is not None:
        bias = with_bias(cut.result.bias.cpu(), bias)
    return weight, bias


def _scaled(curves: dict[str, Tensor], costs: dict[str, float], plan: Plan) -> dict[str, Tensor]:
    """Return the curves, each of the height measured at the uniform width, per parameter."""
    measured_costs = {key: cost for key, cost in costs.items() if key in curves}
    # A difference of few tokens may be negative; if none costs anything, all heights are alike.
    floor = _LEAST * sum(map(abs, measured_costs.values())) / max(len(measured_costs), 1) or 1.0
    sites: dict[str, Site] = {site.key: site for site in plan.model.layout.sites}
    scaled = {}
    for key, curve in curves.items():
        # Nats at the uniform width over a unit's parameters: the value of a parameter there.
        height = max(costs.get(key, 0.0), floor) / plan.costs.unit(sites[key])
        scaled[key] = torch.cat([curve[:1], curve[1:] * height])  # the first stays in any case
    return scaled


class Sensitivity:
    """The dense model, models on the way to the pruned one, and the cost of each pruned site.

    On the way, every consumer is changed by the same share; dropped blocks stay whole. All advance
    over a few windows, a block at a time; hidden states before every block wait on the CPU, for the
    derivatives that `costs` takes back, a block at a time as well.
    """

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        plan: Plan,
    ) -> None:
        self._model, self._device, self._dtype = dense, plan.device, plan.forward
        windows = first_windows(windows, TRIED_TOKENS)
        self._tokens = windows.numel()
        batches = windows.split(step_tokens(windows.shape[1]) // windows.shape[1])
        self._layers = Layers(dense, device=plan.device, dtype=plan.forward)
        # Every model has batches of its own, since layers may hand parts of them to later layers.
        count, models = len(batches), 1 + len(_RULE)
        numbered = {n: batches[n % count] for n in range(models * count)}
        states = self._layers.embed(numbered, dense.outside_tensors())
        self._dense, *changed = (
            {n: states[n] for n in range(first, first + count)}
            for first in range(0, models * count, count)
        )
        self._changed = dict(zip(_RULE, changed, strict=True))
        self._inputs: dict[int, dict[float, dict[int, State]]] = {}
        self._compensated: dict[int, dict[str, _Parameters]] = {}

    @torch.no_grad()
    def advance(
        self,
        block: BlockLayout,
        tensors: Mapping[str, Tensor],
        compensated: Mapping[str, _Parameters],
    ) -> None:
        """Run all models through the next block.

        Args:
            block: its layout.
            tensors: its weights as stored, by full names.
            compensated: the pruned consumers, by `Site.key`, of the sites from which anything goes.
        """
        self._layers.load(block, tensors)
        compensated = {
            key: (weight.to(self._dtype), None if bias is None else bias.to(self._dtype))
            for key, (weight, bias) in compensated.items()
        }
        # Kept for the way back, which runs the block again to differentiate it.
        self._inputs[block.index], self._compensated[block.index] = dict(self._changed), compensated
        layer = self._layers.modules[block.index]
        self._dense = self._layers.through(layer, block.index, self._dense)
        for share, states in self._changed.items():
            with self._replaced(block, compensated, share):
                self._changed[share] = self._layers.through(layer, block.index, dict(states))
        self._layers.drop(block.index)

    def costs(self, progress: Progress | None = None) -> dict[str, float]:
        """Return what every pruned site costs, by `Site.key`, in nats per token.

        All blocks have been advanced through.

        Args:
            progress: called with ("allocating on the way back", done, blocks).

        Raises:
            NumericalError: the pruned model predicts nothing finite.
        """
        head = Head(self._model, device=self._device, dtype=self._dtype)
        # KL after the last block → ∂KL/∂h, for both shares of the way
        gradients: dict[float, dict[int, Tensor]] = {}
        divergence = torch.zeros((), device=self._device)
        for share, states in self._changed.items():
            gradients[share] = {}
            for (n, state), dense in zip(states.items(), self._dense.values(), strict=True):
                inputs = state.to(self._device).requires_grad_()
                total = head.divergence(inputs, dense)
                (gradients[share][n],) = torch.autograd.grad(total, inputs)
                divergence = divergence + total.detach()
        costs: dict[str, Tensor] = {}
        blocks = self._model.layout.blocks
        # ∂KL/∂h after every block → before it; hooks add up the costs of its sites
        for passed, block in enumerate(reversed(blocks), start=1):
            self._back(block, gradients, costs)
            if progress:
                progress("allocating on the way back", passed, len(blocks))
        sums = {key: float(cost) for key, cost in costs.items()}
        if not math.isfinite(float(divergence) + math.fsum(sums.values())):
            raise NumericalError(
                "what pruning each site costs cannot be measured: the pruned model predicts "
                "nothing finite; remove less, or leave by_block out"
            )
        return {key: cost / self._tokens for key, cost in sums.items()}

    def _back(
        self,
        block: BlockLayout,
        gradients: dict[float, dict[int, Tensor]],
        costs: dict[str, Tensor],
    ) -> None:
        """Take derivatives from after a block to before it; add up the costs of its sites.

        Keys and values that a layer reads of an earlier one count as constants.
        """
        self._layers.load(block, self._model.tensors(block))
        compensated, inputs = self._compensated.pop(block.index), self._inputs.pop(block.index)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        costs |= dict.fromkeys(compensated, nothing)
        for share, behind in gradients.items():
            before = dict[int, Tensor]()
            with self._replaced(block, compensated, share) as dense, ExitStack() as hooks:
                # Every pruned consumer notes the change of its output; its derivative follows.
                for key, (module, parameters) in dense.items():
                    noting = functools.partial(_note_cost, costs, key, parameters, share)
                    hooks.callback(module.register_forward_hook(noting).remove)
                for n, gradient in behind.items():
                    state = inputs[share][n].to(self._device).requires_grad_()
                    # h → F(h) → (∂F/∂h)ᵀ ∂KL/∂F(h)
                    layer = self._layers.modules[block.index]
                    out = self._layers.call(layer, block.index, state, n)
                    (before[n],) = torch.autograd.grad(out, state, gradient.to(out))
            gradients[share] = before
        self._layers.drop(block.index)

    @contextmanager
    def _replaced(
        self, block: BlockLayout, compensated: Mapping[str, _Parameters], share: float
    ) -> Iterator[dict[str, tuple[nn.Module, _Parameters]]]:
        """Change consumers by a share of the change by pruning; yield the dense ones, by
        `Site.key`.
        """
        sites = {site.key: site for site in block.sites if site.key in compensated}
        modules: dict[str, Any] = {
            key: self._layers.module(block, site.consumer) for key, site in sites.items()
        }
        dense = {key: (module, (module.weight, module.bias)) for key, module in modules.items()}
        for key, module in modules.items():
            weight, bias = compensated[key]
            module.weight = self._between(module.weight, weight, share)
            if bias is not None:
                module.bias = self._between(module.bias, bias, share)
        try:
            yield dense
        finally:
            for key, module in modules.items():
                module.weight, module.bias = dense[key][1]

    def _between(self, dense: Tensor | None, pruned: Tensor, share: float) -> nn.Parameter:
        pruned = pruned.to(self._device)
        dense = torch.zeros_like(pruned) if dense is None else dense.detach()
        return nn.Parameter(dense.lerp(pruned, share), requires_grad=False)


def _note_cost(
    costs: dict[str, Tensor],
    key: str,
    dense: _Parameters,
    share: float,
    _: nn.Module,
    args: tuple[Tensor, ...],
    out: Tensor,
) -> None:
    """Add ⟨derivative by a consumer's output, its whole change⟩, weighted, once that is known."""
    # On the way by `share`, W is W₀ + share (W̃ − W₀): divided by it, the output's change is the
    # whole one, δ = (W̃ − W₀) x.
    change = (out.detach() - F.linear(args[0].detach(), *dense)) / share

    def add(gradient: Tensor) -> None:
        # The sum stays on the device: to read it would wait for it.
        costs[key] = costs[key] + _RULE[share] * (gradient * change).sum(dtype=torch.float64)

    out.register_hook(add)


@torch.no_grad()
def choose_blocks(
    plan: Plan, dense: Dense, windows: Int[Tensor, "n length"], progress: Progress | None
) -> tuple[dict[str, Tensor], JsonDict]:
    """Return the indices of `drop_blocks` blocks to leave out, ascending, as `blocks`; no facts.
    The first and the last block stay.

    Every turn removes the block whose removal, in addition to the blocks removed before, leaves
    the predictions nearest to the dense model's by KL over a few windows. A turn is one pass over
    the weights, in which one model advances per block that may be removed.

    Args:
        plan: says how many, where and in which dtype.
        dense: the model.
        windows: token ids; the first of them are run.
        progress: called with ("choosing blocks", done, all).

    Raises:
        NumericalError: without any block that may be removed, predictions are not finite.
    """
    windows, count = first_windows(windows, TRIED_TOKENS), plan.recipe.drop_blocks
    blocks = dense.layout.blocks
    layers = Layers(dense, device=plan.device, dtype=plan.forward)
    start = layers.embed({0: windows}, dense.outside_tensors())[0]
    head, gone = Head(dense, device=plan.device, dtype=plan.forward), set[int]()
    dense_state = start
    for turn in range(count):
        # The model so far, and from every block on the one without it, all through the same blocks
        so_far, without = start, dict[int, State]()
        for block in (b for b in blocks if b.index not in gone):
            layers.load(block, dense.tensors(block))
            before = so_far
            so_far = layers.advance(block.index, before)
            without = {n: layers.advance(block.index, state) for n, state in without.items()}
            if block.index not in (0, len(blocks) - 1):
                without[block.index] = before
            layers.drop(block.index)
            if progress:
                done = turn * len(blocks) + block.index + 1
                progress("choosing blocks", done, count * len(blocks))
        if turn == 0:
            dense_state = so_far
        scores = {n: head.predicted(state, dense_state, windows).kl for n, state in without.items()}
        finite = {n: score for n, score in scores.items() if math.isfinite(score)}
        if not finite:
            raise NumericalError(
                "no block can be left out: the model without it predicts nothing finite; leave "
                "drop_blocks out, or try another forward_dtype"
            )
        gone.add(min(finite, key=finite.__getitem__))
    return {"blocks": torch.tensor(sorted(gone))}, {}
