"""Which of several plans is carried out: each is tried on a few blocks, without training.

Plans differ in how many KV groups stay (`kv_groups = held-out`), which mostly leaves one.
"""

import contextlib
import functools
import math

from coec.distributed.cluster import RETRIES, LostError, lost
from coec.events import Progress
from coec.execution.journal import Journal
from coec.models.dense import Dense
from coec.models.files import JsonDict, write_json
from coec.pipeline.reconstruct import BlockReconstruction
from coec.planning.run import Run
from coec.streaming.passes import BlockSource
from coec.streaming.worker_group import NothingKeptError


def choose(
    journal: Journal, dense: Dense, run: Run, source: BlockSource, progress: Progress | None = None
) -> tuple[Run, JsonDict]:
    """Return the run with the candidate of lowest KL on the validation windows, and every trial's.

    Perplexity of few windows is noisy: how likely their next tokens were says less about a model
    than all that the dense one expects there (docs/lab/LOG.md).
    """
    trials: dict[str, JsonDict] = {}
    for name in run.candidates if len(run.candidates) > 1 else ():
        piece = f"trial-{name}.json"
        if piece not in journal:
            brief = run.choosing(name).briefly()
            with source.worker_group(brief) as group:
                trial = BlockReconstruction(dense, brief, group)
                facts = _trial(trial, f"trying {name}", progress)
            facts["widths"] = brief.plan.record()["widths"]
            made_of = dense.digests_of(dense.layout.blocks)
            write = functools.partial(write_json, content=facts)
            journal.put(piece, journal.work / piece, write, made_of=made_of, trial=facts)
        trials[name] = journal.facts(piece)["trial"]
    chosen = min(trials or run.candidates, key=lambda name: _kl(trials.get(name, {})))
    return run.choosing(chosen), {"kv_groups": chosen, "candidates": trials}


def _trial(trial: BlockReconstruction, phase: str, progress: Progress | None) -> JsonDict:
    """Return how well a model predicts of which a few blocks are pruned; nothing of it is kept."""
    for _ in range(RETRIES + 1):
        with contextlib.suppress(NothingKeptError):
            for _ in trial.blocks(lambda index: None, (), phase, progress, few=True):
                pass
            return trial.end(lambda index: None)
    raise lost(LostError(phase))


def _kl(facts: JsonDict) -> float:
    """Return the KL to compare; one that is not finite is the worst."""
    kl: float | None = facts.get("kl")
    return math.inf if kl is None else kl
