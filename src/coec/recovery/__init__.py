"""Recover what pruning lost: train a pruned model to predict as its dense model, or another, does.

Check, read the text, store the teacher's predictions if it is not kept in memory, train, compare
with the start on the validation windows, write. A run that was killed resumes at its last state.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from coec import parallel
from coec.checkpoint.card import write_card
from coec.checkpoint.folder import STATES, check_output, path_of, resolved
from coec.checkpoint.journal import Journal, journal, unfinished
from coec.checkpoint.report import Report
from coec.config import listing
from coec.config.recipe import Recipe
from coec.config.recovery import PassDtypeName, Recovery
from coec.devices import computed_by
from coec.errors import OptionError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.folder import tokenizer_digest
from coec.planning.plan import Plan
from coec.progress import showing
from coec.pruning import prune
from coec.recovery.job import Job, check_alone, check_text, identity_of, recovery_of
from coec.recovery.plan import check_plan
from coec.text.kept_tokens import VocabularyText


@listing(Recovery)
def recover(
    dense: str | Path | Dense,
    pruned: str | Path | Dense,
    out: str | Path,
    *,
    force: bool = False,
    restart: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Report:
    """Train a pruned model to predict as its dense model, or a teacher, does; write the best state.

    The loss is the divergence of the predictions at every token; transformers' Trainer trains. The
    state that is best on validation windows, which are not trained on, is written; if none is
    better than the start, the start is. If the run is killed, the same call resumes at the last
    state that was saved.

    Args:
        dense: the dense model's folder or hub name.
        pruned: the model that coec made from it.
        out: the folder to make, of the same format as `pruned`.
        force: replace an existing model in `out`.
        restart: discard an unfinished run into `out`.
        trust_remote_code: let the tokenizer run its own Python code.
        progress: called with (phase, done, total); None for bars in a terminal or notebook, False
            for nothing.
        settings: fields of `Recovery`: `text`, `tokens` or `minutes`, `lora`, …

    Returns:
        Report: that of the pruning, with this training at the end of `recoveries`; also written to
        `out/coec.json`.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> coec.recover("llama", "llama-70", "llama-70-recovered", text="wiki.txt", tokens="20M")
    """
    recovery = recovery_of(settings)
    dense, pruned, target = Dense.open(dense), Dense.open(pruned), resolved(path_of(out))
    for model in (dense, pruned):
        check_output(target, model.folder, force=force or unfinished(target))
    job = Job.checked(dense, pruned, target, recovery, trust=trust_remote_code)
    check_output(target, job.teacher.folder, force=force or unfinished(target))
    with contextlib.ExitStack() as stack:
        pieces = None
        if job.processes.is_main_process:  # it alone has the journal
            identity = {**job.identity, "processes": job.processes.num_processes}
            pieces = stack.enter_context(journal(target, identity, force=force, restart=restart))
        return _recovered(job, pieces, progress)


def prune_and_recover(
    model: str | Path | Dense,
    out: str | Path,
    tokens: int | str,
    *,
    force: bool = False,
    restart: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Report:
    """Prune a model, and train the result on the calibration text, into `out`.

    The pruned model is in `OUT.partial/` meanwhile. If the run is killed, the same call resumes.

    Args:
        model, out, force, restart, progress, settings: as in `prune`.
        tokens: budget of the training, as in `recover`.

    Raises:
        CoecError: with one line that says what to change; the needs of training are checked first.
            Under `torchrun` prune and recover are two calls.
    """
    # Everything that can be refused is refused before the pruning, the training's needs too.
    recipe = Recipe(**settings)
    if parallel.launched() > 1:
        raise OptionError(
            "pruning and training in one call take one process: torchrun coec prune without "
            "recover first, then torchrun coec recover"
        )
    dense, target = Dense.open(model), resolved(path_of(out))
    check_alone(dense)
    check_output(target, dense.folder, force=force or unfinished(target))
    recovery, trust = recovery_of(settings_like(recipe, tokens)), recipe.trust_remote_code
    planned = Plan.of(dense, recipe)
    check_text(
        dense, recovery, planned.seq_len, dense.positions,
        renumbered=recipe.vocabulary is not None, trust=trust,
    )  # fmt: skip
    if planned.decided:
        check_plan(dense, planned.pruned_model, recovery)
    asked = {name: str(value) for name, value in recipe.record("device").items()}
    asked |= VocabularyText.read(dense, recipe).identity
    identity: JsonDict = {
        "pruning": asked | {"kept": None if planned.kept is None else planned.kept.identity},
        "recovery": identity_of(recovery), "dense": dense.fingerprint,
        "tokenizer": tokenizer_digest(dense.folder), "computed_by": computed_by(planned.device),
    }  # fmt: skip
    restart = restart or bool(recipe.own_functions)
    with journal(target, identity, force=force, restart=restart) as pieces:
        if pieces.finished:
            return replace(Report.read(target), model=dense.name)
        # A folder that exists is complete; an unfinished pruning resumes by its own journal.
        folder = pieces.partial / STATES / "pruned"
        if not folder.exists():
            if "pruning" not in pieces:
                pieces.note("pruning")  # the finished part of a killed pruning is kept
            folder.parent.mkdir(exist_ok=True)
            prune(dense, folder, progress=progress, **settings)
        job = Job.checked(dense, Dense.open(folder), target, recovery, trust=trust)
        return _recovered(job, pieces, progress)


def settings_like(recipe: Recipe, tokens: int | str) -> JsonDict:
    """Return the settings of a training on the text of a calibration."""
    # Training takes two of the dtypes of a calibration; float16 would overflow.
    forward = recipe.forward_dtype
    return {
        "forward_dtype": forward if forward in get_args(PassDtypeName) else None,
        "text": recipe.calibration, "text_column": recipe.text_column, "tokens": tokens,
        "seq_len": recipe.seq_len, "seed": recipe.seed, "device": recipe.device,
        "answer_tokens": recipe.answer_tokens,
    }  # fmt: skip


def _recovered(job: Job, pieces: Journal | None, progress: Progress | bool | None) -> Report:
    """Train, and put the result in place."""
    from coec.recovery.session import Session, agree  # needs accelerate

    _ = job.processes  # `agree` takes them as they were begun
    if agree(pieces is not None and pieces.finished):
        return replace(Report.read(job.out), model=job.dense.name)
    # The Trainer seeds the global generator: the caller's is left as it was.
    with torch.random.fork_rng(), showing(progress) as shown:
        account = Session(job, pieces, shown).train()
    report = replace(
        job.report, model=job.dense.name, out=str(job.out),
        recoveries=[*job.report.recoveries, account],
    )  # fmt: skip
    if pieces is not None:
        report.write(pieces.new)
        write_card(report, pieces.new)
        pieces.complete()
    return report
