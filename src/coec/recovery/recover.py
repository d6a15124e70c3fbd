"""Recover what pruning lost: train a pruned model to predict as its dense model does.

Check, read the text, keep the teacher's predictions where it is not to stay, train, compare with
the start on the validation windows, write. A run that was killed goes on with its last state.
"""

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Unpack, get_args

import torch

from coec.events import Progress, record
from coec.execution.journal import Journal, journal, unfinished
from coec.execution.output import STATES, check_output, path_of, resolved
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict, digests_in
from coec.models.folder import tokenizer_digest
from coec.pipeline.card import write_card
from coec.pipeline.prune import begins_anew, plan, prune
from coec.pipeline.report import Report
from coec.planning.recipe import Recipe
from coec.recovery.job import Job, check_alone, check_text, checked, identity_of, settings_of
from coec.recovery.plan import check_plan
from coec.recovery.processes import Processes
from coec.recovery.session import train
from coec.settings.recovery import PassDtypeName
from coec.settings.typed import PruningSettings, RecoverySettings


class TrustedSettings(RecoverySettings, total=False):
    """Settings of a training, and whether its tokenizer may run its own Python code."""

    trust_remote_code: bool


def recover(
    dense: str | Path | Dense,
    pruned: str | Path | Dense,
    out: str | Path,
    *,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[TrustedSettings],
) -> Report:
    """Train a pruned model to predict as its dense model does, and write what is best.

    The loss is the divergence of the predictions at every token, by transformers' Trainer. Windows
    that are not trained on decide: the best state on them is written, and where none is better
    than the start, the start itself. Killed or interrupted, the same call goes on with the last
    state that was saved.

    Args:
        dense: the dense model's folder or hub name.
        pruned: what coec made of it.
        out: the folder to make, of the same format as `pruned`.
        force: replace an existing model in `out`.
        restart: begin anew where an unfinished run into `out` was asked for something else.
        progress: called with (phase, done, total).
        settings: of `Recovery`: `text`, `tokens` or `minutes`, `lora`, …; and `trust_remote_code`,
            which lets the tokenizer run its own Python code.

    Returns:
        Report: that of the pruning, with this training at the end of `recoveries`; also written to
        `out/coec.json`.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> coec.recover("llama", "llama-70", "llama-70-recovered", text="wiki.txt", tokens="20M")
    """
    # Settings → models → job, checked → processes → the journal, which the first process alone has
    trust = settings.pop("trust_remote_code", False)
    recovery = settings_of(settings)
    dense, pruned, target = Dense.open(dense), Dense.open(pruned), resolved(path_of(out))
    for model in (dense, pruned):
        check_output(target, model.folder, force=force or unfinished(target))
    job = checked(dense, pruned, target, recovery, trust=trust)
    processes = Processes.here(job.device)
    with contextlib.ExitStack() as stack:
        pieces = None
        if processes.rank == 0:
            identity = {**job.identity, "processes": processes.count}
            pieces = stack.enter_context(journal(target, identity, force=force, restart=restart))
        return _recovered(job, pieces, processes, progress)


def _recovered(
    job: Job, pieces: Journal | None, processes: Processes, progress: Progress | None
) -> Report:
    """Train, and put the result in place; only the first process has the journal."""
    if processes.agree(pieces is not None and pieces.finished):
        return replace(Report.read(job.out), model=job.dense.name)
    # The Trainer seeds the global generator: the caller's is left as it was.
    with torch.random.fork_rng():
        account = train(job, pieces, processes, progress)
    report = replace(
        job.report, model=job.dense.name, out=str(job.out),
        recoveries=[*job.report.recoveries, account],
    )  # fmt: skip
    if pieces is not None:
        report.write(pieces.new)
        write_card(report, pieces.new)
        pieces.complete()
    return report


def prune_and_recover(
    model: str | Path | Dense,
    out: str | Path,
    tokens: int | str,
    *,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[PruningSettings],
) -> Report:
    """Prune a model, and train the result on the text that it was calibrated on: `out` is that.

    The pruned model is in `OUT.partial/` meanwhile. Killed or interrupted, the same call goes on.

    Args:
        model, out, force, restart, progress, settings: as in `prune`.
        tokens: budget of the training, as in `recover`.

    Raises:
        CoecError: with one line that says what to change; what training needs is checked first.
    """
    # All that can be refused is refused before the pruning, the training's needs too.
    recipe = Recipe(**settings).opened()
    dense, target = Dense.open(model), resolved(path_of(out))
    check_alone(dense)
    check_output(target, dense.folder, force=force or unfinished(target))
    recovery, trust = settings_of(settings_like(recipe, tokens)), recipe.runtime.trust_remote_code
    planned = plan(dense, recipe)
    check_text(dense, recovery, planned.seq_len, trust=trust)
    if planned.decided:
        check_plan(dense, Description.of(planned.output.config), recovery)
    pruning = {name: str(value) for name, value in recipe.record().items() if name != "device"}
    identity: JsonDict = {
        "pruning": pruning | {"kept": None if recipe.kept is None else recipe.kept.digest},
        "recovery": identity_of(recovery), "dense": dense.fingerprint,
        "tokenizer": tokenizer_digest(dense.folder),
    }  # fmt: skip
    restart = begins_anew(recipe, target, restart)
    with journal(target, identity, force=force, restart=restart) as pieces:
        if pieces.finished:
            return replace(Report.read(target), model=dense.name)
        # Prune into a folder of its own, with a journal of its own → note its files → train from it
        folder = pieces.partial / STATES / "pruned"
        if "pruned" not in pieces or pieces.facts("pruned")["files"] != digests_in(folder):
            if "pruned" in pieces:
                record(f"'{folder}' is not what was written: it is made again")
                shutil.rmtree(folder, ignore_errors=True)
            # A folder that is there is complete; an unfinished pruning goes on by its own journal.
            if not folder.exists():
                if "pruning" not in pieces:
                    pieces.note("pruning")  # what a killed pruning finished stays
                folder.parent.mkdir(exist_ok=True)
                prune(dense, folder, recipe, progress=progress)
            pieces.note("pruned", files=digests_in(folder))
        job = checked(dense, Dense.open(folder), target, recovery, trust=trust)
        return _recovered(job, pieces, Processes.here(job.device), progress)


def settings_like(recipe: Recipe, tokens: int | str) -> JsonDict:
    """Return the settings of a training on the text of a calibration."""
    calibration = recipe.calibration
    # Of the dtypes of a calibration training takes two; float16 would overflow.
    forward = calibration.forward_dtype
    return {
        "forward_dtype": forward if forward in get_args(PassDtypeName) else None,
        "text": calibration.source, "text_column": calibration.text_column, "tokens": tokens,
        "seq_len": calibration.seq_len, "seed": calibration.seed, "device": recipe.runtime.device,
    }  # fmt: skip
