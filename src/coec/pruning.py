"""Prune a model: a dense checkpoint in, a smaller dense one out, one block in memory at a time."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coec import parallel
from coec.checkpoint.checkpoint import Checkpoint
from coec.checkpoint.folder import check_output, path_of
from coec.checkpoint.journal import unfinished
from coec.checkpoint.report import Report
from coec.config import listing
from coec.config.recipe import Recipe
from coec.devices import versions
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.description import Description
from coec.planning.kept import is_foreign
from coec.planning.memory import placed
from coec.planning.plan import Plan
from coec.progress import showing
from coec.solve import solve, unchanged
from coec.streams.importances import choose_blocks, importances
from coec.streams.streams import Streams
from coec.streams.windows import CalibrationText
from coec.text.kept_tokens import VocabularyText


def plan(model: str | Path | Description, **settings: Any) -> Plan:
    """Return what `prune` would do, from the configuration alone: no weights are read, unless
    `kept` is a folder that another program pruned.

    Args:
        model: a model folder, a config.json, or a hub name.
        settings: as in `prune`.

    Raises:
        CoecError: the model or a setting cannot be used.
    """
    recipe = Recipe(**settings)
    if is_foreign(recipe.kept) and not isinstance(model, Description):
        model = Dense.open(model)  # whose weights tell which units are left
    return Plan.of(Description.read(model), recipe)


@listing(Recipe)
def prune(
    model: str | Path | Dense,
    out: str | Path,
    *,
    force: bool = False,
    restart: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Report:
    """Prune a dense causal language model and write a smaller dense checkpoint.

    Every check comes before any work, and the output appears by one rename at the end. Killed or
    interrupted, the same call resumes at the first block that is not on the disk, and gives what an
    undisturbed run gives. Under `torchrun` all processes share the work.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make.
        force: replace an existing model in `out`.
        restart: begin anew if an unfinished run into `out` was asked for something else.
        progress: called with (phase, done, total); None for bars in a terminal or notebook, False
            for nothing.
        settings: fields of `Recipe`, and options of the compensation
            (`sparsity=0.3, compensation="coec", alpha=0.8`).

    Returns:
        Report: also written to `out/coec.json`.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> report = coec.prune("llama", "llama-70", sparsity=0.3, calibration="wiki.txt")
        >>> report.plan["parameters"]
    """
    recipe, out, began = Recipe(**settings), path_of(out), time.perf_counter()
    with parallel.begun(), showing(progress) as progress:
        dense = Dense.open(model)
        parallel.agree({"model": dense.fingerprint, **versions()})
        parallel.lead(check_output, out, dense.folder, force or unfinished(out))
        plan = placed(Plan.of(dense, recipe))
        dense = replace(dense, layout=plan.model.layout)  # in the plan's units of attention
        vocabulary = VocabularyText.read(dense, recipe)
        text = CalibrationText.read(dense, recipe, progress)
        identity = text.identity | vocabulary.identity
        with Checkpoint.open(
            out, plan, dense, identity, force=force, restart=restart
        ) as checkpoint:
            if checkpoint.finished:
                return checkpoint.finished
            # Windows → blocks that stay → widths of every block
            windows = text.windows(plan, checkpoint.once, progress)
            renumbering = vocabulary.renumbering(checkpoint.once, progress)
            if recipe.drop_blocks:
                choose = partial(choose_blocks, plan, dense, windows.fit, progress)
                chosen, _ = checkpoint.once("blocks left out", choose)
                plan = plan.without(tuple(chosen["blocks"].tolist()))
            if not plan.decided:
                measure = partial(importances, plan, dense, windows.fit, progress)
                plan = plan.with_widths(checkpoint.once("importances", measure)[0])
            checkpoint.begin(plan)
            checkpoint.say_resumed(progress)
            seconds = {"before blocks": time.perf_counter() - began}
            if not checkpoint.complete and plan.keeps_blocks:
                for whole in plan.blocks:
                    if checkpoint.solved([whole]) is None:
                        checkpoint.keep([unchanged(whole, dense, plan)])
                checkpoint.note_predictions({})
            elif not checkpoint.complete:
                streams = Streams(plan, dense, windows.fit, windows.validation)
                for blocks in parallel.rounds(plan.blocks, alone=plan.sequential):
                    solved = checkpoint.solved(blocks)
                    if solved is None:
                        solved = solve(blocks, streams, plan)
                        checkpoint.keep(solved)
                    for block in solved:
                        streams.advance(block.block, block.tensors)
                    if progress:
                        progress("solving", blocks[-1].index + 1, plan.dense.layers)
                checkpoint.note_predictions(streams.predictions())
            seconds["blocks"] = time.perf_counter() - began - seconds["before blocks"]
            return checkpoint.finish(windows.record, seconds, renumbering)
