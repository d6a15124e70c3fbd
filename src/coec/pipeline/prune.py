"""Prune a model: a dense checkpoint in, a smaller dense one out, one block in memory at a time.

Open, resolve, measure, allocate, solve, write. Every stage is a module of its own; finished blocks
are in the journal, so that a run that was killed goes on with the first missing one.
"""

import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from coec.calibration.windows import by_source, text_notes
from coec.devices import computed_by, environment
from coec.distributed.backend import open_backend
from coec.events import Progress, record
from coec.execution.journal import Journal, journal, unfinished
from coec.execution.output import check_output, check_space, path_of
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict
from coec.models.folder import carried_files
from coec.pipeline.allocate import check_leader, measure_importances
from coec.pipeline.card import origin, write_card
from coec.pipeline.depth import shortened
from coec.pipeline.reconstruct import reconstruct
from coec.pipeline.report import Report
from coec.pipeline.solve import solve_block
from coec.pipeline.trials import choose
from coec.pipeline.write import Checkpoint, dtype_name, space_needed
from coec.planning import Plan
from coec.planning.recipe import Recipe
from coec.planning.run import Run
from coec.settings.typed import PruningSettings
from coec.streaming.passes import BlockSource, SavedPass, expect_unchanged
from coec.streaming.statistics import Statistics


def plan(
    model: str | Path | Description,
    recipe: Recipe | None = None,
    *,
    statistics: str | Path | Statistics | None = None,
    **settings: Unpack[PruningSettings],
) -> Plan:
    """Return what `prune` would do, from the configuration alone: no weights are read.

    Args:
        model: a model folder, a config.json, or a hub name.
        recipe: the recipe; or its settings, as in `prune`.
        statistics: as in `prune`; whether they are of this model, only its weights would tell.

    Raises:
        CoecError: the model or a setting cannot be used.
    """
    recipe = Recipe.or_of(recipe, settings)
    collected = None if statistics is None else Statistics.open(statistics)
    if collected is None:
        by_source(recipe.calibration)
    return Plan.of(Description.read(model), recipe, collected)


def prune(
    model: str | Path | Dense,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    statistics: str | Path | Statistics | None = None,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[PruningSettings],
) -> Report:
    """Prune a dense causal language model and write a smaller dense checkpoint.

    Every check comes before any work, and the output appears by one rename at the end. Killed or
    interrupted, the same call goes on with the first block that is not on the disk, and gives what
    an undisturbed run gives.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make.
        recipe: what to do; or give its fields and the compensation's options as `settings`
            (`sparsity=0.3, compensation="coec", alpha=0.8`).
        statistics: what `collect` made, or its folder, instead of a dense pass; the result is the
            same to the bit. The settings of the calibration are theirs.
        force: replace an existing model in `out`.
        restart: begin anew where an unfinished run into `out` was asked for something else. A run
            with functions of the user's own always does.
        progress: called with (phase, done, total); a run that goes on with an unfinished one says
            with ("resuming blocks", done, total) what is done.

    Returns:
        Report: also written to `out/coec.json`.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> report = coec.prune("llama", "llama-70", sparsity=0.3, calibration="wiki.txt")
        >>> report.plan["parameters"]
    """
    # Open: the recipe, what is to be pruned, and where it goes
    seconds = _Stopwatch()
    recipe = Recipe.or_of(recipe, settings)
    collected = None if statistics is None else Statistics.open(statistics)
    dense = Dense.open(model)
    carried_files(dense.folder)
    out = path_of(out)
    check_output(out, dense.folder, force=force or unfinished(out))
    # Resolve: plan, place of work and source of statistics, all checked before any work
    candidates = Plan.candidates(dense, recipe, collected)
    recipe = next(iter(candidates.values())).recipe
    dense = dense.counted_in(recipe.pruning.attention_units)
    with open_backend(recipe.runtime) as backend:
        device = backend.device(recipe.runtime.device)
        source: BlockSource = (
            SavedPass(collected, dense, device)
            if collected is not None
            else backend.dense_pass(dense, recipe.calibration, recipe.runtime, progress)
        )
        solve = backend.solve_dtype(recipe.pruning.solve_dtype, device)
        run = Run.of(dense, candidates, device, solve, collected=collected is not None)
        if not run.plan.decided or recipe.pruning.drop_blocks:
            check_leader(device)
        check_space(out, space_needed(out, run.plan, run.written))
        seconds.lap("checking")
        # Carry out, block by block in a journal: what is there is not done again
        restart = begins_anew(recipe, out, restart)
        with journal(out, _identity(run, source), force=force, restart=restart) as pieces:
            if pieces.finished:
                return replace(Report.read(out), model=dense.name)
            report = _pruned(pieces, dense, run, source, seconds, progress)
            report.write(pieces.new)
            write_card(report, pieces.new)
            pieces.complete()
    return report


def _pruned(
    pieces: Journal,
    dense: Dense,
    run: Run,
    source: BlockSource,
    seconds: "_Stopwatch",
    progress: Progress | None,
) -> Report:
    """Put everything but the report into the journal, and return the report."""
    expect_unchanged(pieces, dense, source)
    calibration = source.begin(pieces, progress)
    seconds.lap("reading text")
    if run.recipe.pruning.drop_blocks:
        run = shortened(pieces, dense, run, source, progress)
        seconds.lap("choosing blocks")
    if not run.plan.decided:
        run = run.allocated(measure_importances(pieces, dense, source, run, progress))
        seconds.lap("allocating")
    facts: JsonDict = {}
    if run.recipe.reconstruction.sequential:
        chosen, trials = choose(pieces, dense, run, source, progress)
        checkpoint = reconstruct(pieces, dense, chosen, source, progress)
        facts = checkpoint.facts | trials
        seconds.lap("reconstructing")
    else:
        checkpoint = Checkpoint(pieces, dense, run)
        checkpoint.say_resumed(progress)
        with checkpoint:
            blocks = source.map(partial(solve_block, run=run), checkpoint.solved, progress)
            for solved, host in blocks:
                if host:
                    seconds.lap("calibrating and solving")
                else:
                    solving = sum(row["seconds"] for row in solved.rows)
                    seconds.share("calibrating", "solving", solving)
                checkpoint.keep(solved.by(host))
                del solved  # before the next one is made
    dense.check_unchanged()
    checkpoint.write()
    seconds.lap("writing")
    base, unread = origin(dense.name, dense.folder)
    return Report(
        model=dense.name,
        model_sha256=dense.digest,
        out=str(pieces.out),
        recipe={
            **run.recipe.record(),
            "seq_len": checkpoint.plan.seq_len,
            "dtype": dtype_name(run.written),
            "forward_dtype": source.forward_dtype,
        },
        plan=checkpoint.plan.record()
        | {"notes": [*dense.notes, *checkpoint.plan.notes, *text_notes(calibration), *unread]},
        calibration=calibration | source.account(),
        sites=checkpoint.rows,
        seconds=dict(seconds.laps),
        environment=environment(str(run.device)),
        reconstruction=facts,
        origin=base,
    )


def _identity(run: Run, source: BlockSource) -> JsonDict:
    """Return all that determines the result to the bit; an unfinished run must agree in it."""
    settings = run.recipe.record()
    return {
        **{name: settings[name] for name in ("options", *run.recipe.pruning.record())},
        **run.recipe.reconstruction.record(),
        "kept": None if run.recipe.kept is None else run.recipe.kept.digest,
        "dtype": dtype_name(run.written),
        "own_functions": run.recipe.own_functions or None,
        "statistics": source.made_with,
        "computed_by": computed_by(source.device),
    }


def begins_anew(recipe: Recipe, out: Path, restart: bool) -> bool:
    """Return whether a run throws away an unfinished one into `out`; a warning says why unasked.

    Nothing tells whether a function of the user's own still does what it did.
    """
    if not recipe.own_functions:
        return restart
    if not restart and unfinished(out):
        own = " and ".join(recipe.own_functions)
        record(f"the unfinished run into '{out}' is begun anew: {own} was given as a function")
    return True


class _Stopwatch:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.laps: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        clock = time.perf_counter()
        self.laps[phase] += clock - self._last
        self._last = clock

    def share(self, phase: str, within: str, seconds: float) -> None:
        """Add the time since the last lap to `phase`, but for so many seconds to `within`."""
        self.lap(phase)
        self.laps[phase] -= seconds
        self.laps[within] += seconds
