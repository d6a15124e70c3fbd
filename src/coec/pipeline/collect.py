"""Collect statistics once: many prunings use them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from coec.calibration.windows import with_validation
from coec.devices import computed_by
from coec.distributed.backend import open_backend
from coec.errors import OutputError
from coec.events import RESUMING, Progress
from coec.execution.journal import Journal, journal, unfinished
from coec.execution.output import check_space, clear_remains, path_of, resolved
from coec.models.dense import Dense
from coec.planning.recipe import Recipe
from coec.settings.typed import PruningSettings
from coec.streaming.passes import DensePass, expect_unchanged
from coec.streaming.statistics import (
    FIT,
    VALIDATION,
    Statistics,
    block_file,
    finish,
    write_grams,
)


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
        recipe: or its settings; only those of the calibration matter. No window is set aside where
            neither `holdout` nor a preset says so.
        restart: begin anew where an unfinished run was asked for something else.
        progress: called with (phase, done, total).

    Raises:
        CoecError: with one line that says what to change.
    """
    # Settings → calibration → room on the disk, then the pass
    if recipe is None:  # the default preset holds windows out for fits, which need the text
        settings = {"preset": "paper", **settings}
    recipe = Recipe.or_of(recipe, settings)
    out = _free(out)
    dense = Dense.open(model)
    calibration = with_validation(recipe.calibration, dense)
    recipe = replace(recipe, calibration=calibration)
    sums_per_site = 2 if calibration.validation else 1
    # A float64 matrix for every site and kind of windows; a hundredth and 16 MB for all else.
    size = 8 * sums_per_site * sum(site.columns**2 for site in dense.layout.sites)
    check_space(out, int(size * 1.01) + 2**24)
    with open_backend(recipe.runtime) as backend:
        source = backend.dense_pass(dense, calibration, recipe.runtime, progress)
        # Another machine or thread count sums in another order: an unfinished run goes on only
        # where the bits come out the same.
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
        grams = {FIT: measured.grams, VALIDATION: measured.holdout}
        name, digests = block_file(measured.index), dense.digests_of([measured.block])
        pieces.put(name, pieces.new / name, partial(write_grams, grams=grams), made_of=digests)
    # Checked before the record that makes the folder complete: all blocks are of one model.
    dense.check_unchanged()
    settings = recipe.record()
    settings = {name: settings[name] for name in recipe.calibration.record()}
    assert source.windows is not None
    finish(
        pieces, source.windows.ids, calibration=record, made_with=source.made_with,
        settings=settings, made_of=dense.digests_of(dense.layout.blocks),
    )  # fmt: skip


def _free(out: str | Path) -> Path:
    """Return the folder to make; raises OutputError where something else is there."""
    out = path_of(out)
    clear_remains(resolved(out))
    if out.exists() and not unfinished(out):
        raise OutputError(f"'{out}' exists: choose another folder for the statistics")
    return out
