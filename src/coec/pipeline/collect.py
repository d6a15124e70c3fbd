"""Collect statistics once, and merge them: many prunings use them."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from coec.calibration.tokens import digest
from coec.calibration.windows import with_judges
from coec.devices import computed_by
from coec.distributed.backend import open_backend
from coec.errors import CalibrationError, OptionError, OutputError
from coec.events import RESUMING, Progress
from coec.execution.journal import Journal, journal, unfinished
from coec.execution.output import check_space, clear_remains, path_of, resolved
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.planning.recipe import Recipe
from coec.settings.typed import PruningSettings
from coec.streaming.passes import DensePass, expect_unchanged
from coec.streaming.statistics import (
    FIT,
    HELD_OUT,
    Grams,
    Statistics,
    block_file,
    finish,
    write_grams,
)
from coec.types import Gram


def collect(
    model: str | Path | Dense,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[PruningSettings],
) -> Statistics:
    """Run the dense pass once and keep the statistics of every block in a folder.

    `prune(..., statistics=out)` then solves any sparsity, selection and compensation from them, to
    the same bits as from the text. Killed or interrupted, the same call goes on with the first
    missing block.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make: `8 Σ d²` bytes per block, d the columns of each consumer.
        recipe: or its settings; only those of the calibration matter. No window is held out where
            neither `holdout` nor a preset says so.
        restart: begin anew where an unfinished run was asked for something else.
        progress: called with (phase, done, total).

    Raises:
        CoecError: with one line that says what to change.
    """
    if recipe is None:  # the default preset holds windows out for fits, which need the text
        settings = {"preset": "paper", **settings}
    recipe = Recipe.or_of(recipe, settings)
    out = _free(out)
    dense = Dense.open(model)
    calibration = with_judges(recipe.calibration, dense)
    recipe = replace(recipe, calibration=calibration)
    sums_per_site = 2 if calibration.held_out else 1
    size = 8 * sums_per_site * sum(site.columns**2 for site in dense.layout.sites)
    check_space(out, int(size * 1.01) + 2**24)
    with open_backend(recipe.runtime) as backend:
        source = backend.dense_pass(dense, calibration, recipe.runtime, progress)
        identity = {"statistics": source.made_with, "computed_by": computed_by(source.device)}
        with journal(out, identity, restart=restart) as pieces:
            if not pieces.finished:
                _collect(pieces, dense, source, recipe, progress)
                pieces.complete()
    return Statistics.open(out)


def _collect(
    pieces: Journal, dense: Dense, source: DensePass, recipe: Recipe, progress: Progress | None
) -> None:
    """Put the statistics of every block into the journal, and the record that completes them."""
    expect_unchanged(pieces, dense, source)
    record = source.begin(pieces, progress)
    finished = {b.index for b in dense.layout.blocks if block_file(b.index) in pieces}
    if progress and pieces.resumed:
        progress(f"{RESUMING} blocks", len(finished), len(dense.layout.blocks))
    for measured in source.blocks(finished, progress):
        grams = {FIT: measured.grams, HELD_OUT: measured.holdout}
        _keep(pieces, measured.index, grams, made_of=dense.digests_of([measured.block]))
    dense.check_unchanged()
    settings = recipe.record()
    settings = {name: settings[name] for name in recipe.calibration.record()}
    assert source.windows is not None
    made_of = dense.digests_of(dense.layout.blocks)
    finish(pieces, source.windows.ids, record, source.made_with, settings, made_of)


def merge(
    first: str | Path | Statistics,
    second: str | Path | Statistics,
    out: str | Path,
    *,
    restart: bool = False,
    progress: Progress | None = None,
) -> Statistics:
    """Add up two statistics of one model, as if their windows had been one calibration.

    The sums are those of one pass over all windows but for the last bits, as float64 sums depend on
    their order.

    Args:
        first, second: made by `collect` or by `merge`, with other windows and the same settings
            besides.
        out: the folder to make.
        restart: begin anew where an unfinished run was asked for something else.
        progress: called with ("merging", done, blocks).

    Raises:
        CoecError: they do not go together, or one of them is damaged.
    """
    first, second = Statistics.open(first), Statistics.open(second)
    out = _free(out)
    made_with, settings = _merged_settings(first, second)
    windows = _windows_of_both(first, second)
    blocks = len(first.files) - 1  # and the windows
    with journal(out, {"statistics": made_with}, restart=restart) as pieces:
        if not pieces.finished:
            for index in range(blocks):
                if block_file(index) not in pieces:
                    _keep(pieces, index, _add(first, second, index))
                if progress:
                    progress("merging", index + 1, blocks)
            record = first.calibration | {
                "source": settings["calibration"],
                "windows": len(windows),
                "sampled": sum(s.calibration.get("sampled", 0) for s in (first, second)),
                "windows_sha256": digest(windows),
                "text_sha256": made_with["calibration"],
                "tokens_available": first.calibration["tokens_available"]
                + second.calibration["tokens_available"],
                "merged": [first.record(), second.record()],
            }
            finish(pieces, windows, record, made_with, settings, first.made_of)
            pieces.complete()
    return Statistics.open(out)


def _free(out: str | Path) -> Path:
    """Return the folder to make; raises OutputError where something else is there."""
    out = path_of(out)
    clear_remains(resolved(out))
    if out.exists() and not unfinished(out):
        raise OutputError(f"'{out}' exists: choose another folder for the statistics")
    return out


def _keep(pieces: Journal, index: int, grams: Grams, **facts: Any) -> None:
    name = block_file(index)
    pieces.put(name, pieces.new / name, lambda path: write_grams(path, grams), **facts)


def _add(first: Statistics, second: Statistics, index: int) -> Grams:
    """Return the sums of one block; raises CalibrationError where either is damaged.

    Where only one of the two had windows that judge repairs, its judges judge for both.
    """
    a, b = (statistics.grams(index, torch.device("cpu")) for statistics in (first, second))
    judged = _judging(first) == _judging(second)
    if any(a[windows].keys() != b[windows].keys() for windows in a if judged or windows == FIT):
        raise CalibrationError(
            f"statistics of block {index} cannot be merged: '{first.folder}' and "
            f"'{second.folder}' have sums of other sites: collect them again"
        )

    def added(windows: str) -> dict[str, Gram]:
        x, y = a[windows], b[windows]
        return {**x, **y, **{site: x[site] + y[site] for site in x.keys() & y.keys()}}

    return {windows: added(windows) for windows in a}


_SHARED = (
    "model", "tokenizer", "text_column", "seq_len", "holdout", "guard", "self_samples", "bos",
    "forward_dtype",
)  # fmt: skip
"""Settings in which two statistics must agree to be merged."""


def _merged_settings(first: Statistics, second: Statistics) -> tuple[JsonDict, JsonDict]:
    """Return what the sums depend on, and the settings of their calibration as one.

    Raises OptionError where they do not go together.
    """
    for name in _SHARED:
        a, b = (_made(statistics).get(name) for statistics in (first, second))
        if a != b:
            raise OptionError(
                f"'{first.folder}' and '{second.folder}' cannot be merged: they were collected "
                f"with {name} = {a!r} and {b!r}"
            )
    if first.made_of != second.made_of:
        raise OptionError(
            f"'{first.folder}' and '{second.folder}' cannot be merged: the model was changed "
            "between: collect one of them again"
        )
    pair = (first, second)
    dependences = [statistics.made_with for statistics in pair]
    samples = sum(made_with["samples"] for made_with in dependences)
    made_with = first.made_with | {
        "samples": samples,
        "judging": max(_judging(first), _judging(second)),
        "calibration": hashlib.sha256(json.dumps(dependences).encode()).hexdigest(),
    }
    sources = " + ".join(str(statistics.settings["calibration"]) for statistics in pair)
    return made_with, first.settings | {"samples": samples, "calibration": sources}


def _made(statistics: Statistics) -> JsonDict:
    """Return what statistics were made with; of bos what was chosen."""
    return statistics.made_with | {"bos": statistics.calibration.get("bos", False)}


def _judging(statistics: Statistics) -> float:
    """Return the fraction of the windows that judge repairs, where tokens were few."""
    return float(statistics.made_with["judging"])


def _windows_of_both(first: Statistics, second: Statistics) -> Tensor:
    """Return all windows; raises OptionError where one is in both, as it would count twice."""
    windows = first.windows, second.windows
    shared = set.intersection(*(set(map(tuple, ids.tolist())) for ids in windows))
    if shared:
        raise OptionError(
            f"'{first.folder}' and '{second.folder}' have {len(shared)} windows in common, which "
            "would count twice: collect one of them from other text"
        )
    return torch.cat(windows)
