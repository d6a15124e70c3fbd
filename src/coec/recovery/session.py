"""One training, from its text to the tensors of its result, in one process or in each of several.

Finished pieces are in the journal and the Trainer's states beside it.
"""

import gc
import math
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coec.allocation.kept import KEPT
from coec.calibration.tokens import load_tokenizer
from coec.devices import environment
from coec.errors import NumericalError
from coec.events import RESUMING, Progress, record
from coec.execution.journal import Journal
from coec.execution.output import STATES, WORK
from coec.models.files import INDEX, JsonDict, write_tensors
from coec.models.folder import CONFIG, carry_files
from coec.recovery import text as texts
from coec.recovery import training
from coec.recovery.job import Job
from coec.recovery.processes import Processes
from coec.recovery.text import Examples, WindowFile
from coec.recovery.training import Schedule
from coec.settings.fields import nth_seed
from coec.streaming.self_text import sample_from_model, windows_that_fit

_RATES = 1 / 3, 1.0, 3.0
"""Learning rates that are tried, over that of the rule."""


def train(
    job: Job, pieces: Journal | None, processes: Processes, progress: Progress | None
) -> JsonDict:
    """Train, put everything but the report into the journal, and return the account of it."""
    began = time.perf_counter()
    calibrated = frozenset(job.report.calibration.get("window_digests", ()))
    text = WindowFile(job.partial / WORK / "text.npy", job.recovery.seed, calibrated)
    tokens, teacher = _prepared(job, pieces, text, processes, progress)
    gc.collect()  # a teacher whose predictions were stored
    files = [] if teacher is not None else _prediction_files(job.partial, text)
    trained, validation = (Examples(text, rows, files) for rows in text.split())
    # Tokens and windows → steps → divergence of the start, which the rate depends on
    read = min(tokens, texts.most_tokens(len(trained), job.seq_len))
    batch = job.recovery.windows_per_step(job.seq_len, read)
    schedule = Schedule.of(read, job.seq_len, batch, job.at_once, processes.count)
    resumed = pieces is not None and "start" in pieces
    if pieces is not None and not resumed:
        pieces.note("start", kl=training.divergence(job.network(), teacher, validation))
    before = float(processes.agree(0.0 if pieces is None else pieces.facts("start")["kl"]))
    examples = trained, validation
    tried = _tried_rates(job, pieces, schedule, before, teacher, examples, processes, progress)
    rate = min(tried, key=lambda rate: tried[rate]) if tried else job.rate(before, schedule.batch)
    step_tokens = schedule.batch * job.seq_len
    monitor = training.TrainingMonitor(pieces, step_tokens, before, progress)
    trainer = training.trainer_of(job, schedule, rate, teacher, examples, monitor)
    # Train from the last sound state → best state on the validation windows
    saved = {} if pieces is None else dict(pieces.every("saved"))
    last = None if pieces is None else training.last_state(job.partial / STATES, saved)
    last = processes.agree(last)
    if progress and (last is not None or resumed):
        steps_done = 0 if last is None else int(last.rpartition("-")[2])
        progress(f"{RESUMING} steps", steps_done, schedule.steps)
    trainer.train(resume_from_checkpoint=last)
    state = trainer.accelerator.get_state_dict(trainer.model)
    curve = training.curve(trainer, step_tokens)
    steps = min(trainer.state.global_step, schedule.steps)
    del trainer
    gc.collect()
    if pieces is None:
        return {}
    # The best state, merged and rounded as it would be written, must beat the start.
    tensors, after = _validated(job, state, teacher, validation)
    del state
    improved = after < before
    _write(pieces, job, tensors if improved else None)
    kl = {
        "windows": len(validation),
        "before": before,
        "after": after if improved else before,
    }
    return {
        **job.recovery.record(),
        "text": pieces.facts("text")["record"],
        "tokens": steps * step_tokens,
        "asked": tokens,
        "passes": steps * schedule.batch / len(trained),
        "steps": steps,
        "batch_size": schedule.batch,
        "seq_len": job.seq_len,
        "learning_rate": rate,
        "rates_tried": [{"learning_rate": rate, "kl": kl} for rate, kl in tried.items()],
        "processes": processes.count,
        "held_out": kl,
        "improved": improved,
        "curve": curve,
        "start_sha256": job.pruned.digest,
        "seconds": time.perf_counter() - began,
        "environment": environment(str(job.device)),
    }


def _tried_rates(
    job: Job,
    pieces: Journal | None,
    schedule: Schedule,
    start: float,
    teacher: PreTrainedModel | None,
    examples: tuple[Examples, Examples],
    processes: Processes,
    progress: Progress | None,
) -> dict[float, float]:
    """Return rates about that of the rule, and the validation divergence after a short training.

    None are tried where the user gave a rate, or the budget is too small for it to pay.
    """
    short = schedule.shortened()
    if job.recovery.learning_rate is not None or short is None:
        return {}
    known = None
    if pieces is not None and "rates" in pieces:
        known = pieces.facts("rates")["tried"]
    known = processes.agree(known)
    if known is None:
        known = []
        for number, factor in enumerate(_RATES):
            if progress:
                progress("trying learning rates", number, len(_RATES))
            rate = factor * job.rate(start, schedule.batch)
            trainer = training.trainer_of(job, short, rate, teacher, examples)
            trainer.train()
            kl = trainer.evaluate()["eval_loss"]
            if math.isfinite(kl):  # one that diverges is out of the question, and of the record
                known.append((rate, kl))
            del trainer
            gc.collect()
        if pieces is not None:
            pieces.note("rates", tried=known)
    return dict(known)


def _prepared(
    job: Job,
    pieces: Journal | None,
    text: WindowFile,
    processes: Processes,
    progress: Progress | None,
) -> tuple[int, PreTrainedModel | None]:
    """Return the tokens to train on, and the teacher, unless its predictions were stored.

    The first process writes the text and the predictions. The others wait for its answer here: the
    files that they read next are there by then.
    """
    stored, tokens = job.recovery.teacher == "stored", 0
    teacher = None if stored and pieces is None else job.teacher()
    if pieces is not None and teacher is not None:
        tokens = _budget(job, pieces, teacher, processes)
        _put_text(job, pieces, text, tokens, teacher, progress)
        if stored:
            _put_predictions(pieces, text, teacher, progress)
    tokens = processes.agree(tokens)
    return tokens, None if stored else teacher


def _validated(
    job: Job, state: dict[str, Tensor], teacher: PreTrainedModel | None, validation: Examples
) -> tuple[dict[str, Tensor] | None, float]:
    """Return a state as it would be written, and its divergence; None if it cannot be written."""
    try:
        tensors = job.tensors({name: tensor.cpu() for name, tensor in state.items()})
        return tensors, training.divergence(job.network(tensors), teacher, validation)
    except NumericalError as error:
        record(f"the trained weights cannot be written: {error}")
        return None, math.inf


def _budget(job: Job, pieces: Journal, teacher: PreTrainedModel, processes: Processes) -> int:
    """Return the tokens to train on: as asked, or as many as the minutes are enough for."""
    if job.recovery.minutes is None:
        return int(job.recovery.tokens)
    if "budget" not in pieces:
        at_once = min(job.at_once, job.recovery.windows_per_step(job.seq_len, None))
        speed = processes.count * training.tokens_per_second(
            job.student(), teacher, at_once, job.seq_len, narrow=job.narrow
        )
        pieces.note("budget", tokens=max(1, int(60 * speed * job.recovery.minutes)))
    return int(pieces.facts("budget")["tokens"])


def _put_text(
    job: Job,
    pieces: Journal,
    text: WindowFile,
    tokens: int,
    teacher: PreTrainedModel,
    progress: Progress | None,
) -> None:
    """Put the windows of the text into the journal; those of the model's own group by group."""
    if "text" in pieces:
        return
    count = texts.windows_needed(tokens, job.seq_len)
    if not job.recovery.own:
        ids, record = texts.read_windows(
            job.dense, job.recovery, job.seq_len, count, trust_remote_code=job.trust,
            progress=progress,
        )  # fmt: skip
    else:
        files = []
        for number, first in enumerate(range(0, count, texts.GROUP)):
            size = min(texts.GROUP, count - first)
            files.append(pieces.work / f"text-{number:05}.npy")
            if f"text {number}" not in pieces:
                write = partial(WindowFile.write, _written_group(job, teacher, number, size))
                pieces.put(f"text {number}", files[-1], write)
            if progress:
                progress("writing text", first + size, count)
        ids = torch.from_numpy(np.concatenate([np.load(path) for path in files])).long()
        record = {"source": "self", "windows": len(ids), "text_sha256": ""}
    pieces.put("text", text.path, partial(WindowFile.write, ids), record=record)


def _written_group(job: Job, teacher: PreTrainedModel, number: int, size: int) -> Tensor:
    """Let the dense model write a group of windows; every group has a seed of its own."""
    return sample_from_model(
        teacher, load_tokenizer(job.dense.folder, trust_remote_code=job.trust), samples=size,
        seq_len=job.seq_len, seed=nth_seed(job.recovery.seed, number + 1),
        at_once=windows_that_fit(job.dense, teacher, job.seq_len),
    ).ids  # fmt: skip


def _prediction_files(folder: Path, text: WindowFile) -> list[Path]:
    """Return the files that keep the teacher's predictions, one for each group of windows."""
    count = math.ceil(len(text.windows) / texts.GROUP)
    return [folder / WORK / f"teacher-{number:05}.safetensors" for number in range(count)]


def _put_predictions(
    pieces: Journal, text: WindowFile, teacher: PreTrainedModel, progress: Progress | None
) -> None:
    """Put what is kept of the teacher's predictions into the journal."""
    stored, files = 0, _prediction_files(pieces.partial, text)
    for number, (path, ids) in enumerate(zip(files, text.groups, strict=True)):
        if f"teacher {number}" not in pieces:
            write = partial(texts.save_predictions, teacher, ids)
            pieces.put(f"teacher {number}", path, write)
        stored += len(ids)
        if progress:
            progress("storing predictions", stored, len(text.windows))


def _write(pieces: Journal, job: Job, tensors: dict[str, Tensor] | None) -> None:
    """Write everything but the report, with the format and the files of the pruned model.

    Its own weights where there are no others.
    """
    source, folder = job.pruned.folder, pieces.new
    for file in sorted(set(job.pruned.files.values())):
        # File by file as the pruned model has them: its index then holds for the new weights too.
        names = [name for name, place in job.pruned.files.items() if place == file]
        shard = {
            name: job.pruned.tensor(name) if tensors is None else tensors[name].contiguous()
            for name in names
        }
        if file not in pieces:
            write = partial(write_tensors, shard, metadata={"format": "pt"})
            pieces.put(file, folder / file, write)
    for name in filter(None, (CONFIG, KEPT, INDEX, job.report.plan.get("code"))):
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    carry_files(source, folder)
