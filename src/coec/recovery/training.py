"""Training by transformers' Trainer: ours are the loss, the checkpoints' names and the progress."""

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from coec.events import Progress, record
from coec.execution.journal import Journal
from coec.execution.output import STATES, free_space, sync, writing
from coec.models.files import JsonDict, digests_in, write_tensors
from coec.recovery.distillation import Target, TopTokens, distillation_loss
from coec.recovery.job import Job
from coec.recovery.plan import KEPT_STATES
from coec.recovery.processes import shards
from coec.recovery.text import Examples
from coec.settings.recovery import OptimizerName

EVALUATIONS = 4
"""How often the validation error is measured, and a state saved, during training."""
_WARM_UP = 0.05
"""Share of the steps over which the learning rate rises, ten steps at most."""
_BETAS = 0.9, 0.99
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)
"""What the installed Trainer calls the setting."""
_SAVED = "model.safetensors"
_OPTIMIZERS: dict[OptimizerName, str] = {
    "adamw": "adamw_torch_fused", "adamw-8bit": "adamw_torch_8bit",
}  # fmt: skip
"""The Trainer's names of optimisers."""
_WRITER = "inline_container.cc"
"""Where torch says that it cannot write a file; it does not say why."""
_FULL = 2**20
"""Bytes below which a disk is called full."""
_TRIAL_STEPS = 10
"""Steps by which learning rates are told apart, at least (docs/lab/LOG.md)."""
_TIMED = 3
"""Batches that are timed, behind one that sets things up."""


@dataclass(frozen=True)
class Schedule:
    """Steps of a training, and windows of each.

    Attributes:
        steps: of the optimiser.
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
        """Return that of a trial by a hundredth of the steps, ten at least; None where those of
        three trials are more than a tenth.
        """
        steps = max(_TRIAL_STEPS, self.steps // 100)
        return replace(self, steps=steps, every=steps) if 30 * steps <= self.steps else None


@torch.no_grad()
def _target(teacher: PreTrainedModel | None, inputs: Mapping[str, Tensor]) -> Target:
    """Predictions of a teacher for some windows, or those that were stored with them."""
    if teacher is None:
        return TopTokens(inputs["log_p"], inputs["token"])
    logits: Tensor = teacher(input_ids=inputs["input_ids"], use_cache=False).logits
    return logits


class Distillation(Trainer):
    """A Trainer whose loss is the distance from a teacher, and which saves states under the names
    of the model that runs: a checkpoint's own names would not be read back.

    Args:
        teacher: predicts the windows; None where the examples hold its predictions.
        cross_entropy: as in `distillation_loss`.
        narrow: True where weights are float32 and products bfloat16. The Trainer's own setting
            would hand over every token's logits in float32.
        out: the folder that is made, for errors of the disk.
        options: what `Trainer` takes.
    """

    def __init__(
        self,
        *,
        teacher: PreTrainedModel | None,
        cross_entropy: float,
        narrow: bool,
        out: Path,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        # Progress goes through the callback that the caller gave.
        self.remove_callback(PrinterCallback)
        self._teacher, self._cross_entropy, self._out = teacher, cross_entropy, out
        self._narrow = narrow

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean loss of some windows; on validation windows the divergence alone."""
        ids = inputs["input_ids"]
        target = _target(self._teacher, inputs)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._narrow):
            outputs = model(input_ids=ids, use_cache=False)
        share = self._cross_entropy if model.training else 0.0
        loss = distillation_loss(outputs.logits, target, ids, share)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[Tensor, None, None]:
        """Loss of some validation windows; their logits go nowhere."""
        prepared = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, prepared), None, None

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a state; raises OutputError where the disk refuses."""
        with writing(self._out):
            try:
                super()._save_checkpoint(*args, **kwargs)
            except RuntimeError as error:
                # torch's writer raises no OSError: the reason is found by the room on the disk.
                if _WRITER not in str(error):
                    raise
                full = free_space(self._out) < _FULL
                reason = os.strerror(errno.ENOSPC) if full else str(error)[:200]
                raise OSError(reason) from error

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder, model = Path(str(output_dir or self.args.output_dir)), cast(Any, self.model)
        folder.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:
            return  # weights divided among devices: accelerate writes a file of its own
        if hasattr(model, "peft_config"):
            super()._save(output_dir)
        elif self.args.should_save:
            write_tensors(_distinct(model.state_dict()), folder / _SAVED)


def _distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of a state that stand under a second name too, as files need them."""
    places: set[int] = set()
    tensors = {}
    for name, tensor in state.items():
        tensors[name] = tensor.clone() if tensor.data_ptr() in places else tensor.contiguous()
        places.add(tensor.data_ptr())
    return tensors


class TrainingMonitor(TrainerCallback):
    """Shows progress, notes saved states that are on the disk, and ends a training that diverges.

    Args:
        pieces: the journal, which the first process alone has.
        tokens_per_step: over all processes.
        start: divergence of the start on the validation windows, in nats.
    """

    def __init__(
        self, pieces: Journal | None, tokens_per_step: int, start: float, progress: Progress | None
    ) -> None:
        self._pieces, self._tokens, self._progress = pieces, tokens_per_step, progress
        self._most = max(2 * start, start + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> Any:
        """Show how many tokens are done; look at the last state and save it in any case."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        if self._progress:
            steps = state.global_step, state.max_steps
            self._progress("training on tokens", *(count * self._tokens for count in steps))
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End a training that diverges: beyond twice the start's divergence, and a nat above it."""
        kl = kwargs["metrics"]["eval_loss"]
        if not kl <= self._most:
            record(
                f"the training diverged (at step {state.global_step} KL {kl:.3g} on validation "
                "windows): ended; a lower learning_rate may help"
            )
            control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Return when the state of this step is on the disk."""
        # Files → folder → its parent, synced before the journal says that the state is there
        args.distributed_state.wait_for_everyone()  # every process writes a file of its own
        if self._pieces is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)
            step = state.global_step
            self._pieces.note(f"state {step}", saved=(step, digests_in(folder)))


def trainer_of(
    job: Job,
    schedule: Schedule,
    rate: float,
    teacher: PreTrainedModel | None,
    examples: tuple[Examples, Examples],
    monitor: TrainingMonitor | None = None,
) -> Distillation:
    """Return the Trainer of a student: AdamW, warm-up, linear decay to zero, states compared.

    Args:
        teacher: as in `Distillation`.
        examples: windows to train on, and validation windows.
        monitor: of a training whose states are kept and compared; None keeps none.
    """
    kept = "no" if monitor is None else "steps"
    # `Distillation` narrows products itself, whatever `accelerate launch` was configured for.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    settings = TrainingArguments(
        output_dir=str(job.partial / STATES), max_steps=schedule.steps, learning_rate=rate,
        seed=job.recovery.seed % 2**32,  # numpy's generator takes no other
        per_device_train_batch_size=schedule.at_once,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=schedule.accumulated,
        optim=_OPTIMIZERS[job.recovery.optimizer],
        adam_beta1=_BETAS[0], adam_beta2=_BETAS[1], max_grad_norm=1.0, weight_decay=0.0,
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
        teacher=teacher, cross_entropy=job.recovery.cross_entropy, narrow=job.narrow,
        out=job.out, model=job.student(home), args=settings, train_dataset=examples[0],
        eval_dataset=examples[1], callbacks=[] if monitor is None else [monitor],
    )  # fmt: skip
    if plugin := getattr(trainer.accelerator.state, "fsdp_plugin", None):
        # A state of one file: of states in parts the Trainer loses track which is the best.
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("FULL_STATE_DICT")
    return trainer


def last_state(folder: Path, saved: Mapping[int, JsonDict]) -> str | None:
    """Return the folder of the last state that is as it was saved, and so is the best until then.

    Every other one is removed before anything of it is read: what a killed process left in part,
    and what was changed since, which is recorded.

    Args:
        saved: digests of the files of every state that was on the disk, by step.
    """
    # States in the journal → those whose files are as they were saved → the others are removed
    intact: dict[str, Path] = {}
    for step, digests in sorted(saved.items()):
        path = folder / f"checkpoint-{step}"
        if not os.path.lexists(path):
            continue  # it gave way to later ones
        if not path.is_symlink() and digests_in(path) == digests:
            intact[str(path)] = path
        else:
            record(f"'{path}' is not what was saved: training goes on with an earlier state")
    if folder.is_dir():
        for path in folder.glob("checkpoint-*"):
            if str(path) not in intact:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    # The Trainer loads the best state in the end: a state whose best one is lost is of no use.
    for name, path in reversed(intact.items()):
        state = json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        if state["best_model_checkpoint"] in (None, *intact):
            return name
    return None


def tokens_per_second(
    student: PreTrainedModel, teacher: PreTrainedModel, at_once: int, seq_len: int, *, narrow: bool
) -> float:
    """Speed of training on this process's device, from batches whose gradients are thrown away."""
    ids = torch.randint(student.config.vocab_size, (at_once, seq_len), device=student.device)
    seconds = []
    for _ in range(_TIMED + 1):
        began = time.perf_counter()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=narrow):
            target = _target(teacher, {"input_ids": ids})
            logits = student.train()(input_ids=ids, use_cache=False).logits
        distillation_loss(logits, target, ids).backward()
        float(next(p.grad for p in student.parameters() if p.grad is not None).sum())  # waits
        seconds.append(time.perf_counter() - began)
        student.zero_grad(set_to_none=True)
    # The first batch sets things up; of the others the fastest was disturbed least.
    return at_once * seq_len / min(seconds[1:])


@torch.no_grad()
def divergence(
    student: PreTrainedModel, teacher: PreTrainedModel | None, examples: Examples
) -> float:
    """Mean KL(teacher ‖ student) per token over windows, in nats."""
    total, device = 0.0, student.device
    student.eval()
    for number in range(len(examples)):
        example = {name: tensor[None].to(device) for name, tensor in examples[number].items()}
        ids = example["input_ids"]
        logits = student(input_ids=ids, use_cache=False).logits
        total += float(distillation_loss(logits, _target(teacher, example), ids))
    return total / len(examples)


def curve(trainer: Trainer, tokens_per_step: int) -> list[dict[str, float]]:
    """Validation divergence against tokens, where it is finite, from the Trainer's own history.

    A Trainer that goes on with its last state takes one step more, whose learning rate is zero.
    """
    return [
        {"tokens": entry["step"] * tokens_per_step, "kl": entry["eval_loss"]}
        for entry in trainer.state.log_history
        if 0 < entry["step"] <= trainer.args.max_steps
        and math.isfinite(entry.get("eval_loss", math.nan))
    ]
