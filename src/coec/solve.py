"""Solve a block: sums over its inputs → kept units → compensated weights → the block, trained."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from coec import parallel
from coec.config import nth_seed
from coec.devices import hand_back
from coec.errors import NumericalError, OptionError
from coec.events import record, recording
from coec.methods import compensate
from coec.methods.block_training import Example, Training, relative_error, train_block
from coec.methods.selection import (
    SELECTIONS,
    column_scores,
    expert_scores,
    keep_highest,
    unit_scores,
)
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import (
    Cut,
    cast,
    channel_units,
    cut_block,
    dtype_of,
    value_rows,
    without_experts,
)
from coec.planning.plan import Plan
from coec.streams.streams import BlockSums, ConsumerSums, Streams
from coec.types import Gram, KeptSet

RATE, PREDICTION_PASSES, GENTLER = 0.01, 2, 0.1
"""Learning rate of a block's training, relative to the size of a matrix; passes in which the last
block is then trained on predictions; and the share of the rate for these if the whole rate makes
predictions worse (docs/lab/LOG.md)."""
SINKS = "a thousandth of the tokens has more than half of the energy of the inputs"
UNSEEN = "no token was routed here: slice kept"
BY_MAGNITUDE = "no token was routed here: units chosen by magnitude"


@dataclass(frozen=True, eq=False)
class SolvedBlock:
    """A block after selection and compensation.

    Attributes:
        block: its layout.
        tensors: the tensors that the checkpoint stores of it, by full names, in the output dtype.
        kept: the kept units of every site that stays, by `Site.key`; if whole experts are removed,
            by `BlockLayout.experts_key` the experts that stay.
        rows: the report's row of every site, JSON-ready.
    """

    block: BlockLayout
    tensors: dict[str, Tensor]
    kept: dict[str, Tensor]
    rows: list[JsonDict]


def solve(blocks: Sequence[BlockLayout], streams: Streams, plan: Plan) -> list[SolvedBlock]:
    """Select, compensate and train: one block, or several that do not depend on each other.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    if not plan.sequential:
        measured = [streams.measure(block, to=number) for number, block in enumerate(blocks)]
        works = [
            partial(solve_measured, block, *of_block, plan)
            for block, of_block in zip(blocks, measured, strict=True)
        ]
        return parallel.each(works)
    [block] = blocks
    tensors = streams.open(block)
    if plan.propagates:
        solved = _solve_in_sequence(block, tensors, streams, plan)
    else:
        sums = streams.block_sums(block)
        solved = parallel.lead(solve_measured, block, tensors, sums, plan)
    if plan.trains and block.sites:
        solved = parallel.lead(_trained, solved, streams, *streams.examples(), plan)
    return [solved]


def unchanged(block: BlockLayout, dense: Dense, plan: Plan) -> SolvedBlock:
    """Return a block of which everything stays, in the dtype of the result."""
    read = dense.tensors(block).items()
    tensors = {n: cast(t, dtype_of(n, plan.written), n) for n, t in read}
    kept = {site.key: torch.arange(site.units) for site in block.sites}
    return SolvedBlock(block, tensors, kept, [_row(site, site.units, {}) for site in block.sites])


def solve_measured(
    block: BlockLayout, tensors: Mapping[str, Tensor], sums: BlockSums | None, plan: Plan
) -> SolvedBlock:
    """Select and compensate every site of a block from sums in the dense model."""
    assert sums is not None
    cuts, rows = [], []
    # Taken out of the sums, so that each Gram is freed as soon as it has been used.
    grams = {name: sums.pop(name).gram() for name in list(sums)}
    experts, scores = _kept_experts(block, grams, plan)
    staying = block.remaining(experts)
    for site in block.sites:
        gram = grams.pop(site.name)
        if site in staying:
            cut, row = solve_site(site, tensors, gram, plan)
            cuts.append(cut)
        else:
            row = _row(site, 0, {})
        del gram
        rows.append(row | scores.get(site.name, {}))
    small = cut_block(tensors, cuts, plan.written)
    hand_back()
    return _assembled(block, small, cuts, rows, plan, experts)


def _solve_in_sequence(
    block: BlockLayout, tensors: Mapping[str, Tensor], streams: Streams, plan: Plan
) -> SolvedBlock:
    """Select and compensate every site of a block on the inputs that the pruned model has there."""
    cuts, rows = [], []
    written = {n: tensor.to(dtype_of(n, plan.written)) for n, tensor in tensors.items()}
    for number, site in enumerate(block.sites):
        # No name for the sums here: they are freed before the next site is measured.
        cut, row = parallel.lead(_fitted, site, tensors, streams.site_sums(block, number), plan)
        small = cut_block(tensors, [cut], plan.written)
        written |= {name: small[name] for name in site.tensors if name in small}
        if site is not block.sites[-1]:  # `advance` runs the rest of the layer
            streams.advance_site(block, number, written)
        cuts.append(cut)
        rows.append(row)
    return _assembled(block, written, cuts, rows, plan)


def _fitted(
    site: Site, tensors: Mapping[str, Tensor], sums: ConsumerSums | None, plan: Plan
) -> tuple[Cut, JsonDict]:
    """Select and compensate a site towards the outputs that the hidden states want."""
    assert sums is not None
    with naming(site.consumer):
        gram, target = sums.statistics(tensors[site.weight])
    return solve_site(site, tensors, gram, plan, target=target)


@contextmanager
def naming(module: str) -> Iterator[None]:
    """Name the module in a NumericalError that the `with` block raises."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{module}: {error}") from error


def solve_site(
    site: Site,
    tensors: Mapping[str, Tensor],
    gram: Gram,
    plan: Plan,
    *,
    target: Tensor | None = None,
    units: KeptSet | None = None,
    written: torch.dtype | None = None,
) -> tuple[Cut, JsonDict]:
    """Return the kept units and compensated weights of one site, and its row for the report.

    Args:
        site: the site.
        tensors: of its block, as stored.
        gram: statistics of the consumer's inputs.
        plan: how it is solved.
        target: as in `compensate`; None if the inputs are the dense model's.
        units: the units that stay; the plan's selection chooses them by default.
        written: dtype of the weights whose errors are reported; the plan's by default.

    Raises:
        NumericalError: statistics or weights are not finite, naming the module.
    """
    began = time.perf_counter()
    with naming(site.consumer), recording() as events:
        gram.check_finite()
        if gram.tokens >= 1000 and (gram.top_token_energy or 0.0) > 0.5:
            record(SINKS)
        weight = tensors[site.weight].to(plan.device)
        units = _selected(site, weight, gram, plan) if units is None else units
        facts: JsonDict = {"top_token_energy": gram.top_token_energy}
        if site.routed:
            facts["tokens"] = gram.tokens
        result = None
        kept = site.kept_columns(units)
        if not gram.tokens:  # of no tokens there is no error
            record(UNSEEN)
            result = compensate(weight, gram, kept, method="none")
            unknown = {"error_before": None, "error_after": None}
            result = replace(result, diagnostics={**result.diagnostics, **unknown})
        # If nothing is removed and the inputs are the dense model's, tensors stay bit for bit.
        elif not units.everything or target is not None:
            values = value_rows(tensors, site, units) if "value" in plan.method.needs else None
            result = compensate(
                weight, gram, kept, method=plan.recipe.compensation, value_weight=values,
                target=target, solve_dtype=plan.solve, written=written or plan.written,
                **plan.recipe.options,
            )  # fmt: skip
        facts |= {} if result is None else result.diagnostics
    events = list(dict.fromkeys([*events, *facts.get("events", [])]))
    row = _row(site, len(units.indices), facts | {"events": events}, time.perf_counter() - began)
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the compensation has diagnostics for {site.consumer} that no report holds: {error}"
        ) from error
    return Cut(site, units, result), row


def _selected(site: Site, weight: Tensor, gram: Gram, plan: Plan) -> KeptSet:
    """Return the kept units: the units that the user named, or the units of the highest scores."""
    named = None if plan.kept is None else plan.kept.of_site(site)
    if named is not None:
        return KeptSet(named.indices.to(gram.x.device), named.size)
    if not gram.tokens:
        record(BY_MAGNITUDE)
    keep, selection = plan.widths.of(site), plan.recipe.selection
    score = SELECTIONS[selection] if isinstance(selection, str) else selection
    scores = column_scores(
        score if gram.tokens else SELECTIONS["magnitude"],
        weight.to(gram.xx),  # variances are differences of sums: scores want their float64
        gram,
        units=site.units,
        keep=keep,
        seed=nth_seed(plan.recipe.seed, site.block),
        ranges=site.ranges,
    )
    return keep_highest(unit_scores(scores, site.units), keep, site.ranges)


def _kept_experts(
    block: BlockLayout, grams: Mapping[str, Gram], plan: Plan
) -> tuple[KeptSet | None, dict[str, JsonDict]]:
    """Return the experts that stay, and what rows say of every expert by its site's name.

    None if no whole expert is removed.
    """
    keep = plan.widths.experts
    names = [site.name for site in block.sites if site.routed]
    if keep is None or not names:
        return None, {}
    scores = expert_scores([grams[name] for name in names])
    facts = {
        name: {"tokens": grams[name].tokens, "score": float(score)}
        for name, score in zip(names, scores, strict=True)
    }
    with naming(f"the experts of block {block.index}"):
        return keep_highest(scores, keep, plan.dense.expert_groups), facts


def _trained(
    solved: SolvedBlock,
    streams: Streams,
    examples: Sequence[Example],
    validation: Sequence[Example],
    plan: Plan,
) -> SolvedBlock:
    """Return a solved block, trained as a whole; its last row notes the training."""
    block, tensors, row = solved.block, solved.tensors, solved.rows[-1]
    began = time.perf_counter()
    written = {name: dtype_of(name, plan.written) for name in tensors}
    plain = Training(
        relative_error(examples, plan.device), plan.recipe.reconstruct, RATE,
        nth_seed(plan.recipe.seed, block.index), written,
    )  # fmt: skip
    stages = [("reconstruction", plain)]
    if block.index == len(plan.model.layout.blocks) - 1:
        predictions = replace(
            plain, objective=lambda out, dense, _: streams.head.divergence(out, dense),
            passes=PREDICTION_PASSES, ends_when_worse=True,
        )  # fmt: skip
        gentler = replace(predictions, rate=GENTLER * plain.rate)
        stages += [("predictions", predictions), ("predictions", gentler)]
    wide = torch.promote_types(plan.forward, torch.float32)
    with recording() as events:
        for name, training in stages:
            if row.get(name, {}).get("taken"):
                continue  # at the higher rate
            try:
                # AdamW's steps are of the size of a matrix: they must not depend on the units of
                # its channels.
                units = channel_units(tensors, block.sites)
                start = {
                    n: tensor.to(plan.device, wide) * units[n].to(plan.device, wide)
                    for n, tensor in tensors.items()
                }
                function = streams.pruned_function(block)
                trained = train_block(function, start, examples, validation, training)
                if trained.taken:
                    tensors = {
                        n: cast(p / units[n].to(p), written[n], n) for n, p in trained.theta.items()
                    }
                row[name] = trained.record() | {"rate": training.rate}
            except NumericalError as error:
                record(f"{name}: the block is not trained: {error}")
    row["events"] = [*row["events"], *events]
    row["seconds"] += time.perf_counter() - began
    return replace(solved, tensors=dict(tensors))


def _row(site: Site, units: int, facts: JsonDict, seconds: float = 0.0) -> JsonDict:
    """Return a site's row for the report, by the number of units that it keeps."""
    return {
        "module": site.consumer,
        "block": site.block,
        "site": site.kind,
        "units_before": site.units,
        "units_after": units,
        "error_before": None,
        "error_after": None,
        "top_token_energy": None,
        "events": [],
        **facts,
        "seconds": seconds,
    }


def _assembled(
    block: BlockLayout,
    tensors: dict[str, Tensor],
    cuts: Sequence[Cut],
    rows: list[JsonDict],
    plan: Plan,
    experts: KeptSet | None = None,
) -> SolvedBlock:
    """Return a solved block with exactly the tensors of the output format.

    A bias that the format demands and no method computed is 0. Raises AssertionError for a tensor
    that the plan did not foresee: none is ever dropped.
    """
    kept = {cut.site.key: cut.units.indices.cpu() for cut in cuts}
    if experts is not None:
        tensors = without_experts(tensors, block, experts)
        kept[block.experts_key] = experts.indices
    planned = {n: shape for n, shape in plan.pruned_shapes.items() if n.startswith(block.prefix)}
    zeros = {
        name: torch.zeros(shape, dtype=plan.written)
        for name, shape in planned.items()
        if name.endswith(".bias") and name not in tensors
    }
    tensors = tensors | zeros
    odd = {n for n in {*tensors, *planned} if n not in tensors or n not in planned
           or tensors[n].shape != planned[n]}  # fmt: skip
    assert not odd, f"{min(odd)}: planned {planned.get(min(odd))}"
    return SolvedBlock(block, tensors, kept, rows)
