"""What is refused before any work: what a model does not allow, and functions that fail."""

import json
from typing import Any

import torch

from coec.compensation import Method, compensate
from coec.config.recipe import Recipe
from coec.config.settings import without_effect
from coec.errors import OptionError
from coec.models.description import Description
from coec.selection import SELECTIONS, column_scores, kept_count
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
    if recipe.by_block and (model.around or architecture.blocks.experts):
        inside = "a language model inside another" if model.around else "a model of experts"
        raise OptionError(f"by_block is not supported for {inside} ({name}): leave it out")
    if recipe.reconstruct and forward == torch.float16:
        raise OptionError(
            "reconstruct sums over tokens in the dtype of the forward pass, which overflow in "
            "float16: set forward_dtype=bfloat16 or forward_dtype=float32"
        )
    if recipe.attention_units == "heads":
        _check_heads(model)
    if recipe.expert_sparsity:
        _check_experts(model, recipe.expert_sparsity)
    if recipe.drop_blocks > model.shape.layers - 2:
        raise OptionError(
            f"drop_blocks = {recipe.drop_blocks} leaves no block between the first and the last, "
            f"which are kept: this model has {model.shape.layers} blocks"
        )
    if recipe.drop_blocks and architecture.adds and not recipe.reconstruct:
        raise OptionError(
            "drop_blocks needs blocks that are solved on the states of the pruned model: set "
            f"reconstruct=4 for {name}"
        )


def _check_heads(model: Description) -> None:
    """Raise OptionError if no KV group has a query head to spare."""
    if model.architecture.attention_kept:
        raise without_effect("attention_units = heads", model.architecture.model_type)
    if min(model.shape.at(block).group for block in range(model.shape.layers)) == 1:
        raise OptionError(
            "attention_units = heads keeps one query head in every KV group at least, and this "
            "model has one: leave it out"
        )


def _check_experts(model: Description, sparsity: float) -> None:
    """Raise OptionError if whole experts cannot be removed, or too few would be left."""
    count, name = model.layout.experts, model.architecture.model_type
    if not count:
        raise OptionError(f"expert_sparsity removes whole experts, and {name} has none")
    if reason := model.architecture.experts_kept:
        raise OptionError(f"{name} keeps all experts ({reason}): leave expert_sparsity out")
    chosen, remaining = int(model.config["num_experts_per_tok"]), kept_count(count, sparsity)
    if remaining < chosen:
        raise OptionError(
            f"expert_sparsity = {sparsity:g} leaves {remaining} of {count} experts, and every "
            f"token goes to {chosen} (num_experts_per_tok): remove fewer"
        )


def _rehearse(recipe: Recipe) -> None:
    """Try the functions of a user on a 6×8 problem: what is wrong fails here, not after hours."""
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
            f"{' or '.join(recipe.own_functions)} fails on a small problem: {error}; a selection is "
            "(weight, gram) -> scores, with units, keep and seed by keyword if it declares them; "
            "options and diagnostics are ready for JSON"
        ) from error
    if not isinstance(scores, torch.Tensor) or scores.shape != (8,):
        got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise OptionError(
            f"selection must return one score per column, a tensor of shape (8,), got {got}"
        )
