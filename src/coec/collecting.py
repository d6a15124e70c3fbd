"""The dense pass: from calibration text to the statistics of every block, kept if wanted."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.calibration.ids import token_ids
from coec.calibration.self_text import sample_from_model
from coec.calibration.sources import is_named
from coec.calibration.statistics import Statistics
from coec.calibration.stream import Block, DenseStream
from coec.calibration.tokens import (
    CHOICE,
    Stream,
    Windows,
    digest,
    held_out,
    hold_out,
    is_token_file,
    load_tokenizer,
    read_stream,
    sample_windows,
)
from coec.errors import CalibrationError, OutputError
from coec.models.dense import Dense
from coec.models.output import check_space
from coec.planning import (
    DEFAULT_SEQ_LEN,
    Plan,
    choose_device,
    choose_forward_dtype,
    resolve_seq_len,
)
from coec.recipe import Recipe

Progress = Callable[[str, int, int], None]


def collect(
    model: str | Path | Dense,
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
    out = Path(out)
    if out.exists():
        raise OutputError(f"'{out}' exists: choose another folder for the statistics")
    dense = Dense.open(model)
    plan = Plan.of(dense, recipe)
    device = choose_device(recipe.runtime.device)
    windows_from = calibration_source(recipe, dense, progress)
    dense.check_values()
    check_space(out, int(plan.statistics_per_block * dense.shape.layers * 1.01) + 2**24)
    forward = choose_forward_dtype(recipe.calibration.forward_dtype, dense.dtype, device)
    windows = windows_from(device, forward, progress)
    return Statistics.write(
        out,
        dense_pass(dense, windows, recipe, device, forward, progress),
        windows,
        made_with(recipe, dense, forward),
    )


def block_source(
    recipe: Recipe,
    dense: Dense,
    statistics: str | Path | None,
    progress: Progress | None = None,
) -> Callable[[torch.device, torch.dtype, Progress | None], tuple[dict[str, Any], Iterator[Block]]]:
    """Checks text or saved statistics now; returns a function that starts to yield blocks.

    That gives the record of the calibration too.
    """
    if statistics is None:
        windows_from = calibration_source(recipe, dense, progress)

        def fresh(
            device: torch.device, dtype: torch.dtype, progress: Progress | None
        ) -> tuple[dict[str, Any], Iterator[Block]]:
            windows = windows_from(device, dtype, progress)
            blocks = dense_pass(dense, windows, recipe, device, dtype, progress)
            return windows.record(), blocks

        return fresh
    saved = Statistics.open(Path(statistics))

    def kept(
        device: torch.device, dtype: torch.dtype, progress: Progress | None
    ) -> tuple[dict[str, Any], Iterator[Block]]:
        saved.check(made_with(recipe, dense, dtype))
        return saved.calibration, saved.blocks(dense, device)

    return kept


def dense_pass(
    dense: Dense,
    windows: Windows,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[Block]:
    """Every block with its statistics, those of held-out windows apart."""
    fit, held = hold_out(windows, recipe.calibration.holdout, recipe.calibration.seed)
    stream = DenseStream(dense, fit, holdout=held, device=device, dtype=dtype, progress=progress)
    return stream.blocks()


def made_with(recipe: Recipe, dense: Dense, dtype: torch.dtype) -> dict[str, Any]:
    """Every setting that the statistics depend on, JSON-ready; model and text by their content."""
    return {
        "model": dense.digest,
        **recipe.calibration.record(),
        "calibration": source_digest(recipe.calibration.source),
        "seq_len": resolve_seq_len(recipe.calibration.seq_len, dense.positions, DEFAULT_SEQ_LEN),
        "forward_dtype": str(dtype).removeprefix("torch."),
    }


def source_digest(source: str | Path | Tensor | np.ndarray) -> str:
    """What tells one calibration text from another: the SHA-256 of a file's or a tensor's content.

    A data set of the hub, and text sampled from the model, are known by their names.
    """
    if not isinstance(source, str | Path):
        return digest(token_ids(source))
    name = str(source)
    if source == "self" or (is_named(name) and not is_token_file(name)):
        return name  # also where a file of that name lies here: it is not what is read
    path = Path(source)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return str(source)
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror}") from error


def calibration_source(
    recipe: Recipe, dense: Dense, progress: Progress | None = None
) -> Callable[[torch.device, torch.dtype, Progress | None], Windows]:
    """Checks the calibration text now, and returns a function that makes the windows."""
    asked = recipe.calibration
    seq_len = resolve_seq_len(asked.seq_len, dense.positions, DEFAULT_SEQ_LEN)
    sizes = {"samples": asked.samples, "seq_len": seq_len, "seed": asked.seed}
    if isinstance(asked.source, str) and asked.source == "self":
        trusted = recipe.runtime.trust_remote_code
        tokenizer = load_tokenizer(dense.folder, trust_remote_code=trusted)
        return lambda device, dtype, progress: sample_from_model(
            dense.network(device, dtype), tokenizer, **sizes, progress=progress
        )
    stream = _stream(recipe, dense, CHOICE * asked.samples * seq_len, progress)
    windows = sample_windows(stream, **sizes, vocabulary=dense.vocabulary)
    return lambda device, dtype, progress: windows


def check_calibrations(recipes: list[Recipe], dense: Dense) -> None:
    """Checks one calibration text for all recipes that name it; it is tokenised once.

    Raises:
        CoecError: it cannot be read, or is too short for one of them.
    """
    wanted = {
        (c.samples, resolve_seq_len(c.seq_len, dense.positions, DEFAULT_SEQ_LEN), c.holdout): c
        for c in (recipe.calibration for recipe in recipes)
    }
    for samples, _, holdout in wanted:
        held_out(samples, holdout)
    source = recipes[0].calibration.source
    if isinstance(source, str) and source == "self":
        calibration_source(recipes[0], dense)
        return
    most = max(samples * seq_len for samples, seq_len, _ in wanted)
    stream = _stream(recipes[0], dense, CHOICE * most, None)
    for (samples, seq_len, _), asked in wanted.items():
        sample_windows(
            stream, samples=samples, seq_len=seq_len, seed=asked.seed, vocabulary=dense.vocabulary
        )


def _stream(recipe: Recipe, dense: Dense, needed: int, progress: Progress | None) -> Stream:
    """Tokens of the calibration text, `needed` of a long one."""
    if isinstance(recipe.calibration.source, Tensor):
        return Stream(recipe.calibration.source, "tensor", "")

    def tokenizer() -> PreTrainedTokenizerBase:
        return load_tokenizer(dense.folder, trust_remote_code=recipe.runtime.trust_remote_code)

    source = str(recipe.calibration.source)
    if not is_token_file(source):
        tokenizer()
    return read_stream(
        source,
        tokenizer,
        split="train",
        text_column=recipe.calibration.text_column,
        needed=needed,
        progress=progress,
    )
