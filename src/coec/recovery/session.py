"""One training, from its text to the tensors of its result, in one process or in each of several.

Finished pieces are in the journal, which the first process alone has, and the Trainer's states next
to it.
"""

import gc
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from coec.checkpoint.folder import STATES, WORK
from coec.checkpoint.journal import Journal
from coec.config import nth_seed
from coec.devices import environment
from coec.errors import NumericalError
from coec.events import RESUMING, Progress, record
from coec.models.files import INDEX, JsonDict, write_tensors
from coec.models.folder import CONFIG, carry_files
from coec.planning.kept import KEPT
from coec.recovery import text as texts
from coec.recovery.distillation import (
    Distillation,
    TrainingMonitor,
    curve_of,
    divergence,
    last_state,
    loss_of,
)
from coec.recovery.job import Job
from coec.recovery.plan import KEPT_STATES, shards
from coec.recovery.text import Examples
from coec.streams.answers import Writer
from coec.text.tokens import load_tokenizer
from coec.text.windows import Windows

_T = TypeVar("_T")
EVALUATIONS = 4
"""Number of times that the validation error is measured, and a state saved, during training."""
_WARM_UP = 0.05
"""Share of the steps over which the learning rate rises, ten steps at most."""
_RATES = 1 / 3, 1.0, 3.0
"""Learning rates that are tried, relative to the rule's."""
_TRIAL_STEPS = 10
"""Smallest number of steps by which learning rates can be told apart (docs/lab/LOG.md)."""
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw-8bit": "adamw_torch_8bit"}
"""The Trainer's names of optimisers."""
_TIMED = 3
"""Number of batches that are timed, after one that sets things up."""
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)
"""Name of the setting in the installed Trainer."""


def agree(value: _T) -> _T:
    """Return the value of the first process, in all of them."""
    agreed: _T = broadcast_object_list([value])[0]
    return agreed


@dataclass(frozen=True)
class Schedule:
    """Steps of a training, and windows of each.

    Attributes:
        steps: number of steps of the optimiser.
        batch: windows for each step, over all processes.
        at_once: windows that a process takes through the model together.
        accumulated: batches of `at_once` for each step.
        every: steps between two measurements of the validation error.
    """

    steps: int
    batch: int
    at_once: int
    accumulated: int
    every: int

    @classmethod
    def of(
        cls, tokens: int, seq_len: int, batch: int, most_at_once: int, processes: int
    ) -> "Schedule":
        """Divide a budget into steps; the batch grows to a multiple of the processes."""
        # A process's share of the batch → as many at once as memory has room for
        share = math.ceil(batch / processes)
        at_once = next(n for n in range(min(share, most_at_once), 0, -1) if share % n == 0)
        batch = share * processes
        steps = max(1, round(tokens / (batch * seq_len)))
        return cls(steps, batch, at_once, share // at_once, max(1, math.ceil(steps / EVALUATIONS)))

    def shortened(self) -> "Schedule | None":
        """Return the schedule of a trial: a hundredth of the steps, at least ten.

        None if three trials would take more than a tenth of the steps.
        """
        steps = max(_TRIAL_STEPS, self.steps // 100)
        return replace(self, steps=steps, every=steps) if 30 * steps <= self.steps else None


class Session:
    """A training in this process.

    Args:
        job: the training job.
        pieces: the journal, which the first process alone has.
        progress: called with (phase, done, total).
    """

    def __init__(self, job: Job, pieces: Journal | None, progress: Progress | None) -> None:
        self.job, self.pieces, self._tell = job, pieces, progress or (lambda *step: None)
        self.text = job.partial / WORK / "text.npy"
        self.teacher: PreTrainedModel | None = None

    def train(self) -> JsonDict:
        """Train, put everything but the report into the journal, and return the account of it."""
        job, pieces, began = self.job, self.pieces, time.perf_counter()
        tokens = agree(self._prepare())
        gc.collect()  # a teacher whose predictions were stored
        trained, validation = self.examples = self._split()
        # Tokens and windows → steps → divergence of the start, which the rate depends on
        read = min(tokens, texts.most_tokens(len(trained), job.seq_len))
        batch = job.recovery.windows_per_step(job.seq_len, read)
        schedule = Schedule.of(read, job.seq_len, batch, job.at_once, job.processes.num_processes)
        resumed = pieces is not None and "start" in pieces
        if pieces is not None and not resumed:
            start = divergence(job.network(), self.teacher, validation, job.vocabulary)
            pieces.note("start", kl=start)
        before = float(agree(0.0 if pieces is None else pieces.facts("start")["kl"]))
        tried = self._tried_rates(schedule, job.rate(before, schedule.batch))
        rate = min(tried, key=lambda r: tried[r]) if tried else job.rate(before, schedule.batch)
        step_tokens = schedule.batch * job.seq_len
        monitor = TrainingMonitor(pieces, step_tokens, before, self._tell)
        trainer = self._trainer(schedule, rate, monitor)
        # Train from the last sound state → best state on the validation windows
        saved = {} if pieces is None else dict(pieces.every("saved"))
        last = agree(None if pieces is None else last_state(job.partial / STATES, saved))
        if last is not None or resumed:
            done = 0 if last is None else int(last.rpartition("-")[2])
            self._tell(f"{RESUMING} steps", done, schedule.steps)
        trainer.train(resume_from_checkpoint=last)
        state = trainer.accelerator.get_state_dict(trainer.model)
        curve, steps = curve_of(trainer, step_tokens), monitor.diverged or schedule.steps
        del trainer
        gc.collect()
        if pieces is None:
            return {}
        # The best state, merged and rounded as it would be written, must beat the start.
        tensors, after = self._validated(state)
        del state
        improved = after < before
        self._write(pieces, tensors if improved else None)
        kl = {"windows": len(validation), "before": before, "after": after if improved else before}
        return {
            **job.recovery.record("text"), **job.taught_by,
            "text": pieces.facts("text")["record"], "asked": tokens, "tokens": steps * step_tokens,
            "passes": steps * schedule.batch / len(trained), "steps": steps,
            "batch_size": schedule.batch, "seq_len": job.seq_len, "learning_rate": rate,
            "rates_tried": [{"learning_rate": rate, "kl": kl} for rate, kl in tried.items()],
            "processes": job.processes.num_processes, "held_out": kl, "improved": improved,
            "curve": curve, "start_sha256": job.pruned.digest,
            "seconds": time.perf_counter() - began, "environment": environment(str(job.device)),
        }  # fmt: skip

    def _prepare(self) -> int:
        """Return the tokens to train on, with the text, and the teacher or its predictions, made.

        The first process writes them; the others read the files after its answer.
        """
        stored, tokens = self.job.recovery.predictions == "stored", 0
        if self.pieces is None:
            self.teacher = None if stored else self.job.teacher_network()
            return tokens
        self.teacher = self.job.teacher_network()
        tokens = self._budget(self.pieces, self.teacher)
        if "text" not in self.pieces:
            self._put_text(self.pieces, self.teacher, tokens)
        if stored:
            self._put_predictions(self.pieces, self.teacher)
            self.teacher = None
        return tokens

    def _budget(self, pieces: Journal, teacher: PreTrainedModel) -> int:
        """Return the number of tokens to train on: as set, or as the minutes allow."""
        job = self.job
        if job.recovery.tokens is not None:
            return job.recovery.tokens
        if "budget" not in pieces:
            at_once = min(job.at_once, job.recovery.windows_per_step(job.seq_len, None))
            speed = job.processes.num_processes * tokens_per_second(job, teacher, at_once)
            tokens = max(1, int(60 * speed * (job.recovery.minutes or 0.0)))
            pieces.note("budget", tokens=tokens)
        return int(pieces.facts("budget")["tokens"])

    def _put_text(self, pieces: Journal, teacher: PreTrainedModel, tokens: int) -> None:
        """Put the windows of the text into the journal; the teacher's own text group by group."""
        job = self.job
        count = texts.windows_needed(tokens, job.seq_len)
        write = self._writer(pieces, teacher) if job.recovery.own else None
        windows = job.windows(count, write, self._tell)
        ids = windows.ids
        # Refused before the text is kept: a batch that is larger than the text
        trained = len(ids) - texts.windows_for_validation(len(ids))
        most = texts.most_tokens(trained, job.seq_len)
        job.recovery.windows_per_step(job.seq_len, min(tokens, most))
        origin = {
            "source": windows.source, "windows": len(ids), "bos": windows.bos,
            "text_sha256": windows.text_sha256,
        }  # fmt: skip
        pieces.put("text", self.text, partial(texts.save_windows, ids), record=origin)

    def _writer(self, pieces: Journal, teacher: PreTrainedModel) -> Callable[[int, int], Windows]:
        """Return a function that lets the teacher write the windows of a part of the text."""
        job = self.job
        prompts = texts.read_prompts(
            job.pruned, job.recovery, job.seq_len, job.positions, trust_remote_code=job.trust
        )
        tokenizer = load_tokenizer(job.pruned.folder, trust_remote_code=job.trust)
        writer = Writer(job.teacher, tokenizer, pieces.once, self._tell, teacher, fewer=True)

        def write(number: int, samples: int) -> Windows:
            return writer.windows(
                prompts[number], samples=samples, seq_len=job.seq_len, name=f"answers {number}",
                seed=nth_seed(job.recovery.seed, number + 1),
            )  # fmt: skip

        return write

    def _prediction_files(self, windows: int) -> list[Path]:
        """Return the files of the teacher's predictions, one for each group of windows."""
        numbers = range(math.ceil(windows / texts.GROUP))
        return [self.text.with_name(f"teacher-{number:05}.safetensors") for number in numbers]

    def _put_predictions(self, pieces: Journal, teacher: PreTrainedModel) -> None:
        """Put the teacher's predictions into the journal."""
        ids, done = texts.load_windows(self.text), 0
        files = self._prediction_files(len(ids))
        for number, (path, group) in enumerate(zip(files, ids.split(texts.GROUP), strict=True)):
            if f"teacher {number}" not in pieces:
                write = partial(texts.save_predictions, teacher, group)
                pieces.put(f"teacher {number}", path, write)
            done += len(group)
            self._tell("storing predictions", done, len(ids))

    def _split(self) -> tuple[Examples, Examples]:
        """Return the windows to train on, and those for validation."""
        ids = texts.load_windows(self.text)
        calibrated = frozenset(self.job.report.calibration.get("window_digests", ()))
        stored = [] if self.teacher is not None else self._prediction_files(len(ids))
        trained, validation = texts.split(ids, self.job.recovery.seed, calibrated)
        return Examples(self.text, trained, stored), Examples(self.text, validation, stored)

    def _tried_rates(self, schedule: Schedule, rule: float) -> dict[float, float]:
        """Return rates around the rule's, and the validation divergence after a short training.

        None are tried if the user gave a rate, or the budget is too small for it to pay.
        """
        pieces, short = self.pieces, schedule.shortened()
        if self.job.recovery.learning_rate is not None or short is None:
            return {}
        known = pieces.facts("rates")["tried"] if pieces is not None and "rates" in pieces else None
        known = agree(known)
        if known is None:
            known = []
            for number, factor in enumerate(_RATES):
                self._tell("trying learning rates", number, len(_RATES))
                trainer = self._trainer(short, factor * rule)
                trainer.train()
                kl = trainer.evaluate()["eval_loss"]
                if math.isfinite(kl):  # a rate that diverges is left out
                    known.append((factor * rule, kl))
                del trainer
                gc.collect()
            if pieces is not None:
                pieces.note("rates", tried=known)
        return dict(known)

    def _trainer(
        self, schedule: Schedule, rate: float, monitor: TrainingMonitor | None = None
    ) -> Distillation:
        """Return the Trainer of a student: AdamW, warm-up, linear decay to zero, states compared.

        Without a monitor, no state is kept.
        """
        job, kept = self.job, "no" if monitor is None else "steps"
        # `Distillation` narrows products itself, whatever `accelerate launch` was configured for.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        settings = TrainingArguments(
            output_dir=str(job.partial / STATES), max_steps=schedule.steps, learning_rate=rate,
            seed=job.recovery.seed % 2**32,  # numpy's generator takes no other
            per_device_train_batch_size=schedule.at_once, per_device_eval_batch_size=1,
            gradient_accumulation_steps=schedule.accumulated,
            optim=_OPTIMIZERS[job.recovery.optimizer], adam_beta1=0.9, adam_beta2=0.99,
            max_grad_norm=1.0, weight_decay=0.0,
            lr_scheduler_type="linear", warmup_steps=min(10, round(_WARM_UP * schedule.steps)),
            use_cpu=job.device.type == "cpu",
            eval_strategy=kept, eval_steps=schedule.every, save_strategy=kept,
            save_steps=schedule.every, save_total_limit=KEPT_STATES,
            load_best_model_at_end=monitor is not None,
            metric_for_best_model="eval_loss", greater_is_better=False, prediction_loss_only=True,
            logging_steps=schedule.every, report_to="none", disable_tqdm=True,
            remove_unused_columns=False, label_names=[],
            dataloader_pin_memory=job.device.type == "cuda", ddp_find_unused_parameters=False,
        )  # fmt: skip
        setattr(settings, CHECKPOINTING, job.checkpointing)
        # Weights that are divided among devices need not fit one of them whole.
        home = torch.device("cpu") if shards() > 1 else job.device
        trainer = Distillation(
            job, self.teacher, model=job.student(home), args=settings,
            train_dataset=self.examples[0].shuffled(
                schedule.steps * schedule.batch, job.recovery.seed % 2**63
            ),
            eval_dataset=self.examples[1],
            callbacks=[] if monitor is None else [monitor],
        )  # fmt: skip
        if plugin := getattr(trainer.accelerator.state, "fsdp_plugin", None):
            # A state of one file: with states in parts the Trainer does not know which is the best.
            plugin.state_dict_config = plugin.optim_state_dict_config = None
            plugin.set_state_dict_type("FULL_STATE_DICT")
        return trainer

    def _validated(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor] | None, float]:
        """Return a state as it would be written, and its divergence; None if it cannot be."""
        job, validation = self.job, self.examples[1]
        try:
            tensors = job.tensors({name: tensor.cpu() for name, tensor in state.items()})
            network = job.network(tensors)
            return tensors, divergence(network, self.teacher, validation, job.vocabulary)
        except NumericalError as error:
            record(f"the trained weights cannot be written: {error}")
            return None, math.inf

    def _write(self, pieces: Journal, tensors: dict[str, Tensor] | None) -> None:
        """Write everything but the report, with the format and the files of the pruned model.

        Its own weights are written if there are no others.
        """
        job, folder = self.job, pieces.new
        for file in sorted(set(job.pruned.files.values())):
            # File by file as the pruned model has them: its index then holds for the new weights.
            names = [name for name, place in job.pruned.files.items() if place == file]
            shard = {
                name: job.pruned.tensor(name) if tensors is None else tensors[name].contiguous()
                for name in names
            }
            if file not in pieces:
                shard = job.pruned.names.in_files(shard)
                write = partial(write_tensors, shard, metadata={"format": "pt"})
                pieces.put(file, folder / file, write)
        for name in filter(None, (CONFIG, KEPT, INDEX, job.report.plan.get("code"))):
            if (job.pruned.folder / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(job.pruned.folder / name, folder / name)
        carry_files(job.pruned.folder, folder)


def tokens_per_second(job: Job, teacher: PreTrainedModel, at_once: int) -> float:
    """Measure the speed of training on this process's device, on random tokens."""
    student, seconds = job.student(), []
    ids = torch.randint(job.vocabulary, (at_once, job.seq_len), device=student.device)
    inputs = {"input_ids": ids}
    for _ in range(_TIMED + 1):
        began = time.perf_counter()
        loss, _ = loss_of(student.train(), teacher, inputs, job.vocabulary, narrow=job.narrow)
        loss.backward()
        float(next(p.grad for p in student.parameters() if p.grad is not None).sum())  # waits
        seconds.append(time.perf_counter() - began)
        student.zero_grad(set_to_none=True)
    # The first batch sets things up; of the others the fastest was disturbed least.
    return at_once * job.seq_len / min(seconds[1:])
