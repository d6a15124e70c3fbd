"""Statistics as an end of their own: collected once, merged, used by many prunings."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.calibration.tokens import digest
from coec.calibration.windows import with_judges
from coec.devices import computed_by
from coec.distributed.shares import sourced
from coec.errors import CalibrationError, OptionError, OutputError
from coec.events import RESUMING, Progress
from coec.execution.journal import Journal, journal, unfinished
from coec.execution.output import clear_remains
from coec.execution.places import check_space, resolved
from coec.models.dense import Dense
from coec.planning.recipe import Recipe
from coec.streaming.measure import DensePass, Source, expect_unchanged
from coec.streaming.statistics import (
    FIT,
    HELD_OUT,
    Grams,
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
    **settings: Any,
) -> Statistics:
    """Runs the dense pass once and keeps the statistics of every block in a folder.

    `prune(..., statistics=out)` then solves any sparsity, selection and compensation from them, to
    the same bits as from the text. Killed or interrupted, the same call goes on with the first
    missing block.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make: `8 Σ d²` bytes per block, d the columns of each consumer.
        recipe: or its settings; only those of the calibration matter.
        restart: begin anew where an unfinished run was asked for something else.
        progress: called with (phase, done, total).

    Raises:
        CoecError: with one line that says what to change.
    """
    recipe = Recipe.or_of(recipe, settings)
    out = _free(out)
    dense = Dense.open(model)
    calibration = with_judges(recipe.calibration, dense)
    recipe = replace(recipe, calibration=calibration)
    kinds = 2 if calibration.held_out else 1
    size = 8 * kinds * sum(site.columns**2 for site in dense.layout.sites)
    check_space(out, int(size * 1.01) + 2**24)
    with sourced(dense, calibration, recipe.runtime, progress=progress) as source:
        identity = {"statistics": source.made_with, "computed_by": computed_by(source.device)}
        with journal(out, identity, restart=restart) as done:
            if not done.finished:
                _collected(done, dense, source, recipe, progress)
                done.complete()
    return Statistics.open(out)


def _collected(
    done: Journal, dense: Dense, source: Source, recipe: Recipe, progress: Progress | None
) -> None:
    """The statistics of every block, and what makes them complete."""
    assert isinstance(source, DensePass)  # there are no others to begin with
    expect_unchanged(done, dense, source)
    record = source.begin(done, progress)
    finished = {b.index for b in dense.layout.blocks if block_file(b.index) in done}
    if progress and done.resumed:
        progress(f"{RESUMING} blocks", len(finished), len(dense.layout.blocks))
    for measured in source.blocks(finished, progress):
        grams = {FIT: measured.grams, HELD_OUT: measured.holdout}
        _keep(done, measured.index, grams, made_of=dense.digests_of([measured.block]))
    dense.check_unchanged()
    settings = recipe.record()
    kept = {name: settings[name] for name in recipe.calibration.record()}
    assert source.windows is not None
    made_of = dense.digests_of(dense.layout.blocks)
    finish(done, source.windows.ids, record, source.made_with, kept, made_of)


def merge(
    one: str | Path | Statistics,
    other: str | Path | Statistics,
    out: str | Path,
    *,
    restart: bool = False,
    progress: Progress | None = None,
) -> Statistics:
    """Adds up two statistics of one model, as if their windows had been one calibration.

    The sums are those of one pass over all windows but for the last bits, as float64 sums depend on
    their order.

    Args:
        one, other: made by `collect` or by `merge`, with other windows and the same settings
            besides.
        out: the folder to make.
        restart: begin anew where an unfinished run was asked for something else.
        progress: called with ("merging", done, blocks).

    Raises:
        CoecError: they do not go together, or one of them is damaged.
    """
    first, second = Statistics.open(one), Statistics.open(other)
    out = _free(out)
    made_with, settings = _merged_settings(first, second)
    windows = _windows_of_both(first, second)
    blocks = len(first.files) - 1  # and the windows
    with journal(out, {"statistics": made_with}, restart=restart) as done:
        if not done.finished:
            for index in range(blocks):
                if block_file(index) not in done:
                    _keep(done, index, _sums_of_both(first, second, index))
                if progress:
                    progress("merging", index + 1, blocks)
            record = first.calibration | {
                "source": settings["calibration"],
                "windows": len(windows),
                "sampled": sum(one.calibration.get("sampled", 0) for one in (first, second)),
                "windows_sha256": digest(windows),
                "text_sha256": made_with["calibration"],
                "tokens_available": first.calibration["tokens_available"]
                + second.calibration["tokens_available"],
                "merged": [first.record(), second.record()],
            }
            finish(done, windows, record, made_with, settings, first.made_of)
            done.complete()
    return Statistics.open(out)


def _free(out: str | Path) -> Path:
    """The folder to make; raises OutputError where something else is there."""
    out = Path(out)
    clear_remains(resolved(out))
    if out.exists() and not unfinished(out):
        raise OutputError(f"'{out}' exists: choose another folder for the statistics")
    return out


def _keep(done: Journal, index: int, grams: Grams, **facts: Any) -> None:
    name = block_file(index)
    done.put(name, done.new / name, lambda path: write_grams(path, grams), **facts)


def _sums_of_both(first: Statistics, second: Statistics, index: int) -> Grams:
    """Return those of one block; raises CalibrationError where one of the two is damaged.

    Where only one of the two had windows that judge repairs, its judges judge for both.
    """
    a, b = (one.grams(index, torch.device("cpu")) for one in (first, second))
    judged = _judging(first) == _judging(second)
    if any(a[kind].keys() != b[kind].keys() for kind in a if judged or kind == FIT):
        raise CalibrationError(
            f"statistics of block {index} cannot be merged: '{first.folder}' and "
            f"'{second.folder}' have sums of other sites: collect them again"
        )
    sums: Grams = {}
    for kind in a:
        both = a[kind].keys() & b[kind].keys()
        sums[kind] = {
            **a[kind],
            **b[kind],
            **{s: a[kind][s] + b[kind][s] for s in a[kind] if s in both},
        }
    return sums


SHARED = (
    "model", "tokenizer", "text_column", "seq_len", "holdout", "guard", "self_samples",
    "forward_dtype",
)  # fmt: skip
"""What two statistics must have been made with alike to be merged."""


def _merged_settings(
    first: Statistics, second: Statistics
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the sums of both depend on, and their calibration as one; raises OptionError."""
    for name in SHARED:
        one, other = first.made_with.get(name), second.made_with.get(name)
        if one != other:
            raise OptionError(
                f"'{first.folder}' and '{second.folder}' cannot be merged: they were collected "
                f"with {name} = {one!r} and {other!r}"
            )
    if first.made_of != second.made_of:
        raise OptionError(
            f"'{first.folder}' and '{second.folder}' cannot be merged: the model was changed "
            "between: collect one of them again"
        )
    pair = (first, second)
    parts = [statistics.made_with for statistics in pair]
    samples = sum(part["samples"] for part in parts)
    made_with = first.made_with | {
        "samples": samples,
        "judging": max(_judging(first), _judging(second)),
        "calibration": hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
    }
    sources = " + ".join(str(statistics.settings["calibration"]) for statistics in pair)
    return made_with, first.settings | {"samples": samples, "calibration": sources}


def _judging(statistics: Statistics) -> float:
    """The fraction of the windows that judge repairs, where tokens were few."""
    return float(statistics.made_with["judging"])


def _windows_of_both(first: Statistics, second: Statistics) -> Tensor:
    """Raises OptionError where a window is in both: it would count twice."""
    one, other = first.windows, second.windows
    shared = set(map(tuple, one.tolist())) & set(map(tuple, other.tolist()))
    if shared:
        raise OptionError(
            f"'{first.folder}' and '{second.folder}' have {len(shared)} windows in common, which "
            "would count twice: collect one of them from other text"
        )
    return torch.cat([one, other])
