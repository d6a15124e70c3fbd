"""The dense pass: from calibration text to the statistics of every block, kept if wanted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coec.calibration.self_text import sample_from_model
from coec.calibration.statistics import Statistics, fingerprint
from coec.calibration.stream import Block, DenseStream
from coec.calibration.tokens import (
    CHOICE,
    Stream,
    Windows,
    digest,
    hold_out,
    is_token_file,
    load_tokenizer,
    read_stream,
    sample_windows,
)
from coec.errors import OutputError
from coec.models.checkpoint import Checkpoint, check_space, find_model
from coec.planning import Plan, choose_device, choose_forward_dtype
from coec.recipe import Recipe

Progress = Callable[[str, int, int], None]


def collect(
    model: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Statistics:
    """Runs the dense pass once and keeps the statistics of every block in a folder.

    `prune(..., statistics=out)` then solves any sparsity, selection and compensation from them.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make: `8 Σ d²` bytes per block, d the columns of each consumer.
        recipe: or its settings; only those of the calibration matter.
        progress: called with (phase, done, total).

    Raises:
        CoecError: with one line that says what to change.
    """
    recipe = Recipe.or_of(recipe, settings)
    folder, out = find_model(model), Path(out)
    if out.exists():
        raise OutputError(f"'{out}' exists: choose another folder for the statistics")
    checkpoint = Checkpoint.open(folder)
    todo = Plan.of(checkpoint.config, recipe)
    device = choose_device(recipe.device)
    windows_from = calibration_source(recipe, folder, todo, progress)
    stored = checkpoint.check(todo.dense_shapes)
    check_space(out, int(todo.statistics_per_block * todo.dense.layers * 1.01) + 2**24)
    forward = choose_forward_dtype(recipe.forward_dtype, stored, device)
    windows = windows_from(device, forward, progress)
    return Statistics.write(
        out,
        dense_pass(checkpoint, windows, recipe, device, forward, progress),
        windows,
        made_with(recipe, todo, checkpoint, forward),
    )


def block_source(
    recipe: Recipe,
    checkpoint: Checkpoint,
    todo: Plan,
    statistics: str | Path | None,
    progress: Progress | None = None,
) -> Callable[[torch.device, torch.dtype, Progress | None], tuple[dict[str, Any], Iterator[Block]]]:
    """Checks text or saved statistics now; returns a function that starts to yield blocks.

    That gives the record of the calibration too.
    """
    if statistics is None:
        windows_from = calibration_source(recipe, checkpoint.folder, todo, progress)

        def fresh(
            device: torch.device, dtype: torch.dtype, progress: Progress | None
        ) -> tuple[dict[str, Any], Iterator[Block]]:
            windows = windows_from(device, dtype, progress)
            blocks = dense_pass(checkpoint, windows, recipe, device, dtype, progress)
            return windows.record(), blocks

        return fresh
    saved = Statistics.open(Path(statistics))

    def kept(
        device: torch.device, dtype: torch.dtype, progress: Progress | None
    ) -> tuple[dict[str, Any], Iterator[Block]]:
        saved.check(made_with(recipe, todo, checkpoint, dtype))
        return saved.calibration, saved.blocks(checkpoint, device)

    return kept


def dense_pass(
    checkpoint: Checkpoint,
    windows: Windows,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[Block]:
    """Every block with its statistics, those of held-out windows apart."""
    fit, held = hold_out(windows, recipe.holdout, recipe.seed)
    stream = DenseStream(
        checkpoint, fit, holdout=held, device=device, dtype=dtype, progress=progress
    )
    return stream.blocks()


def made_with(
    recipe: Recipe, todo: Plan, checkpoint: Checkpoint, dtype: torch.dtype
) -> dict[str, Any]:
    """Every setting that the statistics depend on, JSON-ready."""
    source = recipe.calibration
    return {
        "model": fingerprint(checkpoint),
        "calibration": digest(source) if isinstance(source, Tensor) else str(source),
        "text_column": recipe.text_column,
        "samples": recipe.samples,
        "seq_len": todo.seq_len,
        "seed": recipe.seed,
        "holdout": recipe.holdout,
        "forward_dtype": str(dtype).removeprefix("torch."),
    }


def calibration_source(
    recipe: Recipe, folder: Path, todo: Plan, progress: Progress | None = None
) -> Callable[[torch.device, torch.dtype, Progress | None], Windows]:
    """Checks the calibration text now, and returns a function that makes the windows."""
    sizes = {"samples": recipe.samples, "seq_len": todo.seq_len, "seed": recipe.seed}

    def tokenizer_from() -> Any:
        return load_tokenizer(folder, trust_remote_code=recipe.trust_remote_code)

    if recipe.calibration == "self" and isinstance(recipe.calibration, str):
        tokenizer = tokenizer_from()

        def from_model(
            device: torch.device, dtype: torch.dtype, progress: Progress | None
        ) -> Windows:
            dense: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            dense = dense.to(device).eval()
            return sample_from_model(dense, tokenizer, **sizes, progress=progress)

        return from_model
    if isinstance(recipe.calibration, Tensor):
        stream = Stream(recipe.calibration, "tensor", "")
    else:
        source = str(recipe.calibration)
        if not is_token_file(source):
            tokenizer_from()
        stream = read_stream(
            source,
            tokenizer_from,
            split="train",
            text_column=recipe.text_column,
            needed=CHOICE * recipe.samples * todo.seq_len,
            progress=progress,
        )
    windows = sample_windows(stream, **sizes, vocabulary=todo.vocabulary)
    return lambda device, dtype, progress: windows
