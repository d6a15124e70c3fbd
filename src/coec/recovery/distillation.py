"""Distillation: the loss, the distance between the predictions of two models, and its Trainer.

    L = (1 − c) KL(p ‖ q) + c H(next token, q)

summed over the vocabulary and averaged over tokens, with the teacher's probabilities p and the
student's q, both at temperature 1. If only the teacher's k most probable tokens are known, p has
their probabilities, and the rest of its mass in the student's proportions: the sum of the rest is
compared, its shares are not.

Training is by transformers' Trainer; the loss, the names of saved states and the progress are here.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from coec.checkpoint.folder import free_space, sync, writing
from coec.checkpoint.journal import Journal
from coec.devices import tokens_per_pass
from coec.events import Progress, record
from coec.models.files import JsonDict, digests_in, write_tensors
from coec.recovery.job import Job
from coec.recovery.text import Examples, TopTokens

_SAVED = "model.safetensors"
_WRITER = "inline_container.cc"
"""File of torch that reports a failed write without its reason."""
_FULL = 2**20
"""A disk with fewer free bytes counts as full."""

Target = Float[Tensor, "*tokens v"] | TopTokens
"""The teacher's logits, or the part of them that is kept."""


def distillation_loss(
    logits: Float[Tensor, "windows length v"],
    target: Target,
    ids: Int[Tensor, "windows length"],
    cross_entropy: float = 0.0,
) -> Float[Tensor, ""]:
    """Return the mean loss over all tokens, in nats and in float32.

    Args:
        logits: the student's.
        target: the teacher's.
        ids: the windows, whose next tokens the cross-entropy takes; the last has none.
        cross_entropy: the share c of the cross-entropy.
    """
    # The last token of a window has no next one: -1, which counts for nothing.
    following = F.pad(ids[:, 1:], (0, 1), value=-1)
    flat = logits.flatten(0, 1)
    if isinstance(target, TopTokens):
        target = TopTokens(*(tensor.flatten(0, 1) for tensor in target))
    else:
        target = target.flatten(0, 1)
    loss: Tensor = _Loss.apply(flat, target, following.flatten(), cross_entropy)
    return loss


class _Loss(torch.autograd.Function):
    """The loss with its gradient, q − p for every token, made piece by piece in the forward pass.

    Autograd would hold the vocabulary's probabilities of every token in float32, several times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "tokens v"],
        target: Target,
        following: Int[Tensor, " tokens"],
        share: float,
    ) -> Float[Tensor, ""]:
        # Piece by piece: logits → log q, log p → loss and its derivative, in little memory
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        tokens, vocabulary = logits.shape
        # Counted only where it is divided by: to read the count waits for the device.
        counted = max(int((following >= 0).sum()), 1) if share else 1
        loss = logits.new_zeros((), dtype=torch.float32)
        for rows in torch.arange(tokens).split(tokens_per_pass(vocabulary)):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            log_q = logits[piece].float().log_softmax(dim=-1)
            log_p = _logarithms(target, piece, log_q)
            p, after = log_p.exp(), following[piece]
            # (1 − c) KL(p ‖ q) over all tokens, c H(next, q) over tokens with a next one
            loss += (1 - share) / tokens * (log_p.sub_(log_q).mul_(p)).sum()
            weight = (after >= 0).float()[:, None] * (share / counted)
            picked = after.clamp(min=0)[:, None]
            loss -= (weight * log_q.gather(-1, picked)).sum()
            # ∂L/∂logits = (1 − c)(q − p) + c (q − next), each over its number of tokens, in the
            # memory of q. It holds for TopTokens too: p of the other tokens follows q.
            difference = log_q.exp_().mul_((1 - share) / tokens + weight)
            difference.sub_(p.mul_((1 - share) / tokens)).scatter_add_(-1, picked, -weight)
            if gradient is not None:
                gradient[piece] = difference
        ctx.gradient = gradient
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Float[Tensor, ""]) -> tuple[Tensor, None, None, None]:
        return ctx.gradient * upstream, None, None, None


def _logarithms(
    target: Target, piece: slice, log_q: Float[Tensor, "rows v"]
) -> Float[Tensor, "rows v"]:
    """Log probabilities of a teacher for some tokens.

    Probabilities of unknown tokens are in proportion to the student's, so that only their sum has a
    gradient.
    """
    if not isinstance(target, TopTokens):
        return target[piece].float().log_softmax(dim=-1)
    token, log_p = target.token[piece].long(), target.log_p[piece].float()
    tiny = torch.finfo(log_p.dtype).tiny
    # log q of the other tokens, moved so that together they have the teacher's mass of these
    left_mass = (1 - log_p.exp().sum(dim=-1, keepdim=True)).clamp(min=tiny)
    mass = log_q.exp().scatter_(-1, token, 0.0).sum(dim=-1, keepdim=True).clamp(min=tiny)
    return (log_q + (left_mass.log() - mass.log())).scatter_(-1, token, log_p)


def loss_of(
    model: Any,
    teacher: PreTrainedModel | None,
    inputs: Mapping[str, Tensor],
    vocabulary: int,
    *,
    narrow: bool = False,
    cross_entropy: float = 0.0,
) -> tuple[Tensor, Any]:
    """Return the loss of some windows, and the model's outputs.

    Args:
        model: the student.
        teacher: predicts the windows; None if the inputs hold its predictions.
        inputs: the windows, as `Examples` have them.
        vocabulary: number of tokens that the teacher predicts; the student's further logits, which
            pad its vocabulary, do not count.
        narrow: True if products are bfloat16 and weights float32.
        cross_entropy: as in `distillation_loss`.
    """
    ids = inputs["input_ids"]
    if teacher is None:
        target: Target = TopTokens(inputs["log_p"], inputs["token"])
    else:
        with torch.no_grad():
            target = teacher(input_ids=ids, use_cache=False).logits
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=narrow):
        outputs = model(input_ids=ids, use_cache=False)
    logits = outputs.logits[..., :vocabulary]
    return distillation_loss(logits, target, ids, cross_entropy), outputs


@torch.no_grad()
def divergence(
    student: Any, teacher: PreTrainedModel | None, examples: Examples, vocabulary: int
) -> float:
    """Return the mean KL(teacher ‖ student) per token over windows, in nats.

    `vocabulary` is as in `loss_of`.
    """
    student.eval()
    total = 0.0
    for number in range(len(examples)):
        example = examples[number].items()
        inputs = {name: tensor[None].to(student.device) for name, tensor in example}
        total += float(loss_of(student, teacher, inputs, vocabulary)[0])
    return total / len(examples)


class Distillation(Trainer):
    """A Trainer whose loss is the distance from a teacher.

    Saved states have the names of the model in memory: a checkpoint's own names would not be read
    back. Products are narrowed here: the Trainer's own setting would return every token's logits in
    float32.

    Args:
        job: the training job.
        teacher: predicts the windows; None if the examples hold its predictions.
        options: as in `Trainer`.
    """

    def __init__(self, job: Job, teacher: PreTrainedModel | None, **options: Any) -> None:
        super().__init__(**options)
        self.remove_callback(PrinterCallback)  # progress goes through the caller's callback
        self._job, self._teacher = job, teacher

    def _get_train_sampler(self, *unused: Any, **more: Any) -> SequentialSampler:
        """Return the order of the examples, which are shuffled already."""
        return SequentialSampler(cast(Examples, self.train_dataset))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss of some windows; for validation windows the divergence alone."""
        share = self._job.recovery.cross_entropy if model.training else 0.0
        loss, outputs = loss_of(
            model, self._teacher, inputs, self._job.vocabulary, narrow=self._job.narrow,
            cross_entropy=share,
        )  # fmt: skip
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *unused: Any, **more: Any) -> Any:
        """Return the loss of some validation windows, without their logits."""
        prepared = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, prepared), None, None

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a state; raises OutputError if the disk refuses."""
        with writing(self._job.out):
            try:
                super()._save_checkpoint(*args, **kwargs)
            except RuntimeError as error:
                # torch's writer raises no OSError: the free space of the disk tells the reason.
                if _WRITER not in str(error):
                    raise
                full = free_space(self._job.out) < _FULL
                reason = os.strerror(errno.ENOSPC) if full else str(error)[:200]
                raise OSError(reason) from error

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder, model = Path(str(output_dir or self.args.output_dir)), cast(Any, self.model)
        folder.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:
            return  # weights divided among devices: accelerate writes its own file
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
        self, pieces: Journal | None, tokens_per_step: int, start: float, progress: Progress
    ) -> None:
        self._pieces, self._tokens, self._progress = pieces, tokens_per_step, progress
        self._most = max(2 * start, start + 1)
        self.diverged: int | None = None
        """Step at which the training diverged."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Tell a Trainer that resumes where its best state lies, in a folder that may have moved,
        and whether it diverged.
        """
        state.best_model_checkpoint = _here(state.best_model_checkpoint, Path(args.output_dir))
        for entry in state.log_history:
            self._watch(entry["step"], entry.get("eval_loss", 0.0))

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> Any:
        """Show how many tokens are done; look at the last state and save it in any case."""
        if self.diverged:  # resumed: the step after is not looked at
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False
        elif state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        steps = state.global_step, state.max_steps
        self._progress("training on tokens", *(count * self._tokens for count in steps))
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End a training that diverges: beyond twice the start's divergence, and a nat above it."""
        self._watch(state.global_step, kwargs["metrics"]["eval_loss"])
        control.should_training_stop = self.diverged is not None
        return control

    def _watch(self, step: int, kl: float) -> None:
        if not kl <= self._most:
            record(
                f"the training diverged (at step {step} KL {kl:.3g} on validation windows): ended; "
                "a lower learning_rate may help"
            )
            self.diverged = step

    def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Return when the state of this step is on the disk."""
        # Files → folder → its parent, synced before the journal says that the state is there
        args.distributed_state.wait_for_everyone()  # every process writes its own file
        if self._pieces is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)
            step = state.global_step
            self._pieces.note(f"state {step}", saved=(step, digests_in(folder)))


def curve_of(trainer: Trainer, tokens_per_step: int) -> list[dict[str, float]]:
    """Validation divergence against tokens, where it is finite, from the Trainer's own history."""
    return [
        {"tokens": entry["step"] * tokens_per_step, "kl": entry["eval_loss"]}
        for entry in trainer.state.log_history
        if entry["step"] > 0 and math.isfinite(entry.get("eval_loss", math.nan))
    ]


def last_state(folder: Path, saved: Mapping[int, JsonDict]) -> str | None:
    """Return the folder of the last state that is as it was saved, and so is the best until then.

    Every other state is removed before anything of it is read: partial states of a killed process,
    and states that were changed since, which are recorded.

    Args:
        saved: digests of the files of every state that was on the disk, by step.
    """
    # States in the journal → states whose files are unchanged → the others are removed
    intact: list[str] = []
    for step, digests in sorted(saved.items()):
        path = folder / f"checkpoint-{step}"
        if not path.is_symlink() and digests_in(path) == digests:
            intact.append(str(path))
        elif os.path.lexists(path):  # it did not just give way to later ones
            record(f"'{path}' is not what was saved: training goes on with an earlier state")
    for path in folder.glob("checkpoint-*"):
        if str(path) not in intact:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    # The Trainer loads the best state in the end: a state whose best one is lost is of no use.
    for name in reversed(intact):
        state = json.loads(Path(name, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        if _here(state["best_model_checkpoint"], folder) in (None, *intact):
            return name
    return None


def _here(state: str | None, folder: Path) -> str | None:
    """Return where a state lies now: its whole path was stored, and the folder may have moved."""
    return state and str(folder / Path(state).name)
