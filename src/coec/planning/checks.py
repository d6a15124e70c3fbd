"""Refusals before any work, and notes of a plan: on the model, widths and functions."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from coec.config import without_effect
from coec.config.recipe import Recipe
from coec.errors import OptionError
from coec.methods import Method, compensate
from coec.methods.selection import SELECTIONS, column_scores, kept_count
from coec.models.description import LAYER, Description
from coec.models.files import JsonDict
from coec.models.formats import renumbered, stand_in, without_blocks
from coec.models.layout import Site
from coec.planning.kept import KeptUnits
from coec.planning.widths import OF_EXPERTS, Shares, Widths, parameters
from coec.types import Gram, KeptSet


def check_model(model: Description, recipe: Recipe, forward: torch.dtype) -> None:
    """Raise OptionError if the recipe asks for something that the model does not allow.

    `forward` is the dtype of the forward passes.
    """
    architecture, given = model.architecture, recipe.model_fields_set
    if recipe.own_functions:
        _rehearse(recipe)
    name = architecture.model_type
    if recipe.propagate and architecture.adds and "propagate" in given:
        raise OptionError(
            f"propagate is not supported for {name} (its blocks add {architecture.adds}): set "
            "propagate=False"
        )
    if architecture.attention_kept and recipe.attention_sparsity:
        raise OptionError(
            f"attention of {name} is kept whole ({architecture.attention_kept}), got "
            f"attention_sparsity = {recipe.attention_sparsity:g}: leave it out"
        )
    if recipe.by_block:
        _check_by_block(model)
    if model.reads_tokens:
        _check_tokens(name, recipe)
    if recipe.reconstruct and forward == torch.float16:
        raise OptionError(
            "reconstruct sums over tokens in the dtype of the forward pass, which overflow in "
            "float16: set forward_dtype=bfloat16 or forward_dtype=float32"
        )
    _check_vocabulary(model, recipe)
    if recipe.attention_units == "heads":
        _check_heads(model)
    _check_experts(model, recipe)
    if recipe.drop_blocks and recipe.drop_blocks > model.shape.layers - 2:
        raise OptionError(
            f"drop_blocks = {recipe.drop_blocks} leaves no block between the first and the last, "
            f"which are kept: this model has {model.shape.layers} blocks"
        )
    if recipe.drop_blocks and architecture.adds and not recipe.reconstruct:
        raise OptionError(
            "drop_blocks needs blocks that are solved on the states of the pruned model: set "
            f"reconstruct=4 for {name}"
        )
    for index in range(1, model.shape.layers - 1) if recipe.drop_blocks else ():
        without_blocks(model.config, (index,))  # refuses what cannot be


def check_dropped(
    model: Description, config: JsonDict, shapes: Mapping[str, torch.Size], dropped: Collection[int]
) -> None:
    """Raise OptionError unless a class builds the blocks that stay as they are.

    Args:
        model: the dense model.
        config: the configuration that is written, dropped blocks included.
        shapes: shapes of its tensors.
        dropped: blocks that are left out.
    """
    expected = {new: shape for name, shape in shapes.items() if (new := renumbered(name, dropped))}
    if Description.of(without_blocks(config, dropped), model.architecture).shapes != expected:
        raise OptionError(
            f"drop_blocks is not supported for {model.architecture.model_type}: which of its "
            "blocks have experts follows from their numbers; leave it out"
        )


def _check_by_block(model: Description) -> None:
    """Raise OptionError unless a format holds the model with a width for every block."""
    name = model.architecture.model_type
    if model.around or model.architecture.blocks.experts:
        inside = "a language model inside another" if model.around else "a model of experts"
        raise OptionError(f"by_block is not supported for {inside} ({name}): leave it out")
    if not (model.listed or model.architecture.by_block):
        key = model.architecture.widths["ffn"]
        raise OptionError(
            f"by_block needs a width for every block in config.json, and {key} of {name} is one "
            "number for all: leave it out"
        )


def _check_tokens(name: str, recipe: Recipe) -> None:
    """Raise OptionError for settings that run layers apart from the tokens that they read."""
    for setting in ("reconstruct", "drop_blocks"):
        if setting in recipe.model_fields_set and getattr(recipe, setting):
            raise OptionError(f"{setting} is not supported for {name} ({_READS}): set {setting}=0")


_READS = "its layers get more of the tokens than the hidden states"


def check_widths(model: Description, widths: Widths, built: Mapping[str, torch.Size]) -> None:
    """Raise OptionError unless a class builds the tensors that widths leave.

    Args:
        model: the dense model.
        widths: the widths.
        built: shapes of all tensors of the class, with the configuration that is written.
    """
    expected = {name: list(shape) for name, shape in model.shapes.items()}
    for site in model.layout.sites:
        gone = site.units - widths.of(site)
        for rows in site.producers:
            expected[rows.tensor][0] -= rows.count // site.units * gone
        expected[site.weight][1] -= site.columns_per_unit * gone
        if not widths.stays(site):
            for name in site.tensors & expected.keys():
                del expected[name]
    for rows in (rows for block in model.layout.blocks for rows in block.router):
        expected[rows.tensor][rows.dim] = widths.experts or rows.stop
    for name in sorted(expected.keys() | built.keys()):
        new, wanted = built.get(name), expected.get(name)
        # A key that gives consumers a bias may give one to producers, which is written as zeros
        if name not in model.shapes and LAYER.match(name) and name.endswith(".bias"):
            continue
        if new is None or wanted is None or list(new) != wanted:
            shapes = [None if s is None else tuple(s) for s in (wanted, new)]
            raise OptionError(
                f"a {model.architecture.model_type} of these widths is built otherwise: {name} is "
                f"to be {shapes[0]}, and its class makes it {shapes[1]}: choose another sparsity "
                "or multiple_of"
            )


def _check_vocabulary(model: Description, recipe: Recipe) -> None:
    """Raise OptionError if the vocabulary would not be smaller, or the padded one not larger."""
    cut, padded, before = recipe.vocabulary, recipe.pad_vocabulary, model.vocabulary
    if model.around is not None and (cut or padded):
        raise OptionError(
            f"the vocabulary of a language model inside another stays ({model.around.name}): leave "
            "out vocabulary and pad_vocabulary"
        )
    if (cut or padded) and model.reads_tokens:
        raise OptionError(
            f"the vocabulary of {model.architecture.model_type} stays ({_READS}): leave out "
            "vocabulary and pad_vocabulary"
        )
    if cut is not None and cut >= before:
        raise OptionError(
            f"vocabulary must be less than this model's {before:,} tokens, got {cut:,}"
        )
    if padded is not None and (padded <= before if cut is None else padded >= before):
        bound = "more" if cut is None else "less"
        raise OptionError(
            f"pad_vocabulary must be {bound} than this model's {before:,} tokens, got {padded:,}: "
            f"leave it out, or {'set' if cut is None else 'leave out'} vocabulary"
        )


def _check_heads(model: Description) -> None:
    """Raise OptionError if no KV group has a query head to spare."""
    if model.architecture.attention_kept:
        raise without_effect("attention_units = heads", f"with {model.architecture.model_type}")
    if min(model.shape.at(block).group for block in range(model.shape.layers)) == 1:
        raise OptionError(
            "attention_units = heads keeps one query head in every KV group at least, and this "
            "model has one: leave it out"
        )


_LEAST_OF_GROUP = 2
"""Experts by which routers rank a group."""


def _check_experts(model: Description, recipe: Recipe) -> None:
    """Raise OptionError if there are no experts to count or remove, or too few would be left."""
    count, name, sparsity = (
        model.layout.experts,
        model.architecture.model_type,
        recipe.expert_sparsity,
    )
    if recipe.budget_active is not None and not count:
        raise OptionError(
            f"budget_active counts the experts that a token passes, and {name} has none: give "
            f"budget = {recipe.budget_active} instead"
        )
    if not sparsity:
        return
    if not count:
        raise OptionError(f"expert_sparsity removes whole experts, and {name} has none")
    groups, chosen = model.shape.expert_groups, model.chosen
    each = kept_count(count // groups, sparsity)
    reachable = each * (int(model.config["topk_group"]) if groups > 1 else 1)
    if reachable < chosen:
        raise OptionError(
            f"expert_sparsity = {sparsity:g} leaves {each * groups} of {count} experts, "
            f"{reachable} of them within a token's reach, and every token goes to {chosen} "
            "(num_experts_per_tok): remove fewer"
        )
    if groups > 1 and each < _LEAST_OF_GROUP:
        raise OptionError(
            f"expert_sparsity = {sparsity:g} leaves one expert in each of {groups} groups, and "
            f"{name} ranks groups by the best {_LEAST_OF_GROUP} of each: remove fewer"
        )


def _rehearse(recipe: Recipe) -> None:
    """Try the functions of a user on a 6×8 problem: errors appear here, not after hours."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(8, 32, generator=generator, dtype=torch.float64)
    W = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    gram, kept = Gram(X @ X.T, X.sum(dim=1), X.shape[1]), KeptSet(torch.tensor([0, 2, 3, 5, 6]), 8)
    score: Any = recipe.selection
    score = SELECTIONS[score] if isinstance(score, str) else score
    method = Method.of(recipe.compensation)
    try:
        scores = column_scores(score, W, gram, units=4, keep=3, seed=0)
        result = compensate(W, gram, kept, method=method, value_weight=W[:5, :4], **recipe.options)
        json.dumps([recipe.options, result.diagnostics], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{' or '.join(recipe.own_functions)} fails on a small problem: {error}; a selection "
            "is (weight, gram) -> scores, with units, keep and seed by keyword if declared; "
            "options and diagnostics must be ready for JSON"
        ) from error
    if not isinstance(scores, torch.Tensor) or scores.shape != (8,):
        got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise OptionError(
            f"selection must return one score per column, a tensor of shape (8,), got {got}"
        )


PLENTY = 64
"""Tokens for every fitted column up to which a doubling of the text took 2 to 5 % off the error of
a real model's consumer on other windows (docs/lab/LOG.md)."""


def notes_of(
    model: Description,
    recipe: Recipe,
    kept: KeptUnits | None,
    shares: Shares,
    widths: Widths,
    tokens: int,
) -> Iterator[str]:
    """Yield the notes on a plan, one sentence each; the arguments are fields of the plan."""
    if recipe.propagate and (adds := model.architecture.adds):
        name = model.architecture.model_type
        yield f"compensations are for the dense model's inputs: blocks of {name} add {adds}"
    if recipe.reconstruct and model.reads_tokens:
        yield f"blocks of {model.architecture.model_type} are not trained: {_READS}"
    if reason := model.architecture.attention_kept:
        yield f"attention is kept whole: {reason}"
    if kept is not None:
        sites = "every site keeps" if kept.covers(model.layout) else f"{len(kept.units)} sites keep"
        yield f"{sites} the units of '{kept.source}'"
    if recipe.expert_sparsity and widths.experts is None:
        yield f"no whole expert is removed: {recipe.expert_sparsity:g} of them is less than one"
    if widths.experts is not None:
        yield "nothing compensates the loss of whole experts, and the errors of sites leave it out"
    for site in model.layout.kinds:
        counts = Counter(widths.of(s) for s in model.layout.sites if s.kind == site.kind)
        usual, blocks = counts.most_common(1)[0]
        if site.routed and usual % OF_EXPERTS:
            yield (
                f"experts keep {usual:,} {site.unit}s, no multiple of {OF_EXPERTS}: transformers "
                'runs them in narrow dtypes with experts_implementation="eager" only'
            )
        if cost := stand_in(site, usual):
            yield cost
        if len(counts) == 1 and (kept is None or site.key not in kept.units):
            of_unit = blocks * parameters(site, model.shapes)
            yield from _rounding(site, shares.of(site), usual, of_unit)
    widest = max(site.columns for site in model.layout.sites)
    fitted = recipe.compensation != "none" and any(map(widths.removes_from, model.layout.sites))
    if fitted and tokens < PLENTY * widest:
        windows = math.ceil(recipe.samples * PLENTY * widest / tokens)
        yield (
            f"{tokens:,} tokens for up to {widest:,} columns: more text lowers the error still; "
            f"{windows} windows give {PLENTY} for each"
        )


def _rounding(site: Site, share: float, width: int, of_unit: int) -> Iterator[str]:
    """Yield what rounding does to a width; `of_unit` parameters has a unit in all blocks."""
    if not share:
        return
    per_range, units = site.units // site.ranges, f"{site.unit}s"
    by_fraction = site.ranges * kept_count(per_range, share)
    if width == site.units:
        rounded = "tensor_parallel" if site.value is not None else "multiple_of"
        why = "is less than one" if by_fraction == site.units else f"is rounded up by {rounded}"
        yield f"nothing is removed at {site.kind}: {share:.4g} of {per_range:,} {units} {why}"
    elif site.value is None and (more := (width - by_fraction) * of_unit / 1e6) >= 0.01:
        yield (
            f"{by_fraction:,} {units} are rounded up to {width:,}: {more:,.2f}M parameters more "
            "(multiple_of)"
        )
