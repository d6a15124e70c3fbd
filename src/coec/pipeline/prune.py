"""The story: a dense checkpoint in, a smaller dense one out, one block in memory at a time.

open → measure → allocate → solve → write. Every stage is a module of its own; what is finished is
in the journal, so that a run that was killed goes on where it was.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coec.compensation import Method
from coec.devices import computed_by, environment
from coec.distributed.scheduler import BlockScheduler
from coec.distributed.shares import DistributedPass, sourced
from coec.errors import OptionError
from coec.events import Progress
from coec.execution.code import code_digest
from coec.execution.journal import Journal, journal, unfinished
from coec.execution.output import check_output
from coec.execution.places import check_space
from coec.execution.remote import Remote, destination
from coec.models.companion_files import carried_files
from coec.models.dense import Dense
from coec.models.description import Description
from coec.pipeline.allocate import check_leader, importances
from coec.pipeline.card import origin
from coec.pipeline.reconstruct import rebuilt
from coec.pipeline.report import Report
from coec.pipeline.solve import solve_block
from coec.pipeline.write import Checkpoint, dtype_name, space_needed
from coec.planning import ComputeConfig, FreeMemory, Plan, check_room, within
from coec.planning.recipe import Recipe
from coec.settings import PRESETS, with_preset
from coec.streaming.measure import Source, adopted, expect_unchanged
from coec.streaming.statistics import Statistics


def plan(
    model: str | Path | Description,
    recipe: Recipe | None = None,
    *,
    statistics: str | Path | Statistics | None = None,
    **settings: Any,
) -> Plan:
    """What `prune` would do, from the configuration alone: no weights are read.

    Args:
        model: a model folder, a config.json, or a hub name.
        recipe: or its settings, as in `prune`.
        statistics: as in `prune`; whether they are of this model, only its weights would tell.

    Raises:
        CoecError: the model or a setting cannot be used.
    """
    given = settings.keys() if recipe is None else None
    if statistics is not None:
        statistics = Statistics.open(statistics)
    recipe, described = _asked(recipe, settings, statistics), Description.read(model)
    if statistics is not None:
        recipe = _calibrated(recipe, statistics, described, given)
    return Plan.of(described, recipe)


def prune(
    model: str | Path | Dense,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    statistics: str | Path | Statistics | None = None,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Prunes a dense causal language model and writes a smaller dense checkpoint.

    Every check comes before any work, and the output appears by one rename at the end. Killed or
    interrupted, the same call goes on with the first block that is not on the disk, and gives what
    an undisturbed run gives.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make, or its URL: that of a server (`s3://bucket/name`) is made in a
            cache of this machine, and copied there when it is whole.
        recipe: what to do; or give its fields and the compensation's options as `settings`
            (`sparsity=0.3, compensation="coec", alpha=0.8`).
        statistics: what `collect` made, or its folder, instead of a dense pass; the result is the
            same to the bit. The settings of the calibration are theirs.
        force: replace an existing model in `out`.
        restart: begin anew where an unfinished run into `out` was asked for something else.
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
    seconds = _Stopwatch()
    given = settings.keys() if recipe is None else None
    if statistics is not None:
        statistics = Statistics.open(statistics)
    recipe = _asked(recipe, settings, statistics)
    dense = Dense.open(model)
    carried_files(dense.folder)
    place = destination(out, dense.folder, force=force, restart=restart)
    remote = place if isinstance(place, Remote) else None
    out = place.staged if isinstance(place, Remote) else place
    check_output(out, dense.folder, force=force or unfinished(out))
    if statistics is not None:
        recipe = _calibrated(recipe, statistics, dense, given)
    plan = Plan.of(dense, recipe)
    recipe = plan.recipe  # its kept units are read
    with sourced(dense, recipe.calibration, recipe.runtime, statistics, progress) as source:
        recipe = _with_dtype(recipe, source)
        plan = replace(plan, recipe=recipe)
        how = ComputeConfig.of(plan, source.device, dense.dtype, measured=statistics is not None)
        room = FreeMemory.of(source.device)
        check_room(plan, within(plan, how, room), room)
        if recipe.reconstruction.reconstruct and source.forward_dtype == "float16":
            raise OptionError(
                "reconstruct sums over tokens in the dtype of the forward pass, which overflow in "
                "float16: set forward_dtype=bfloat16 or forward_dtype=float32"
            )
        if not plan.decided:
            check_leader(source)
        dtype = how.written
        check_space(out, space_needed(out, plan, dtype))
        seconds.lap("checking")
        identity = _identity(plan, source, dtype)
        with journal(out, identity, force=force, restart=restart) as done:
            if done.finished:
                return replace(Report.read(out), model=dense.name)
            if remote is not None:
                remote.check(done, force)
            if remote is not None and remote.whole(done):
                report = replace(Report.read(done.new), model=dense.name)
            else:
                report = _pruned(done, dense, plan, source, dtype, seconds, progress)
                report.write(done.new)
            if remote is None:
                done.complete()
            else:
                remote.put(done, force)
                done.elsewhere()
    return report if remote is None else replace(report, out=remote.url)


def _pruned(
    done: Journal,
    dense: Dense,
    plan: Plan,
    source: Source,
    dtype: torch.dtype,
    seconds: "_Stopwatch",
    progress: Progress | None,
) -> Report:
    """Everything but the report, into the journal; and the report."""
    recipe, device = plan.recipe, source.device
    expect_unchanged(done, dense, source)
    calibration = source.begin(done, progress)
    seconds.lap("reading text")
    plans = Plan.candidates(dense, recipe)
    if not plan.decided:
        found = importances(done, dense, source, plan, device, progress)
        plans = {name: one.allocated(found) for name, one in plans.items()}
        plan = next(iter(plans.values()))
        seconds.lap("allocating")
    reconstruction: dict[str, Any] = {}
    if recipe.reconstruction.in_order:
        checkpoint, reconstruction = rebuilt(done, dense, plans, source, device, dtype, progress)
        plan = checkpoint.plan
        seconds.lap("reconstructing")
    elif isinstance(source, DistributedPass):
        checkpoint = Checkpoint(done, dense, plan, dtype)
        checkpoint.say_resumed(progress)
        handing = BlockScheduler(source, dense, plan, dtype)
        for solved in handing.blocks(checkpoint.solved, progress):
            checkpoint.keep(solved)
        seconds.lap("calibrating and solving")
    else:
        checkpoint = Checkpoint(done, dense, plan, dtype)
        checkpoint.say_resumed(progress)
        for measured in source.blocks(checkpoint.solved, progress):
            seconds.lap("calibrating")
            checkpoint.keep(solve_block(measured, plan, device, dtype))
            seconds.lap("solving")
            if progress:
                progress("solving", measured.block.index + 1, plan.dense.layers)
    dense.check_unchanged()
    checkpoint.write()
    seconds.lap("writing")
    known, unread = origin(dense.name, dense.folder)
    return Report(
        model=dense.name,
        model_sha256=dense.digest,
        out=str(done.out),
        recipe={
            **recipe.record(),
            "seq_len": plan.seq_len,
            "dtype": dtype_name(dtype),
            "forward_dtype": source.forward_dtype,
        },
        plan=plan.record() | {"notes": [*dense.notes, *plan.notes, *unread]},
        calibration=calibration | source.account(),
        sites=checkpoint.rows,
        seconds=seconds.laps,
        environment=environment(str(device)),
        reconstruction=reconstruction,
        origin=known,
    )


def _asked(
    recipe: Recipe | None, settings: dict[str, Any], statistics: Statistics | None
) -> Recipe:
    """The recipe given, or one of settings; statistics bring their held-out windows to those.

    Where they have none, `_calibrated` says so: first comes whether statistics do at all.
    """
    if recipe is None and statistics is not None:
        holdout = statistics.settings["holdout"] or PRESETS["best"].amounts["holdout"]
        settings = {"holdout": holdout, **with_preset(settings)}
    return Recipe.or_of(recipe, settings)


def _calibrated(
    recipe: Recipe, statistics: Statistics, model: Description, given: Collection[str] | None
) -> Recipe:
    """The recipe with the calibration that statistics were made with."""
    recipe.check_for_statistics()
    how = adopted(statistics, recipe.calibration, model, given)
    return replace(recipe, calibration=how)


def _with_dtype(recipe: Recipe, source: Source) -> Recipe:
    """The recipe with the dtype of the compensation decided, for the journal and the report."""
    double = source.solve_dtype(recipe.pruning.solve_dtype) == torch.float64
    pruning = replace(recipe.pruning, solve_dtype="float64" if double else "float32")
    return replace(recipe, pruning=pruning)


def _identity(plan: Plan, source: Source, dtype: torch.dtype) -> dict[str, Any]:
    """All that determines the result to the bit: an unfinished run of another is not continued."""
    record, pruning = plan.recipe.record(), plan.recipe.pruning
    return {
        **{name: record[name] for name in ("options", *pruning.record())},
        **plan.recipe.reconstruction.record(),
        "kept": None if plan.recipe.kept is None else plan.recipe.kept.digest,
        "dtype": dtype_name(dtype),
        "selecting": _code(pruning.selection),
        "compensating": _code(pruning.compensation),
        "statistics": source.made_with,
        "computed_by": computed_by(source.device),
    }


def _code(choice: Any) -> Any:
    """What a user's own function does and declares; a name says it with the version."""
    if isinstance(choice, str):
        return None
    if isinstance(choice, Method):
        declared = {
            "adds_bias": choice.adds_bias,
            "needs": sorted(choice.needs),
            "shrinks": choice.shrinks,
        }
        return {"code": code_digest(choice.function), **declared}
    return {"code": code_digest(choice)}


@dataclass
class _Stopwatch:
    """Wall-clock seconds by phase."""

    def __post_init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now
