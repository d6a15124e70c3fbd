"""A recovery, checked: its models, its settings, and the networks that are made of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coec.checkpoint.card import public_name
from coec.checkpoint.folder import check_space, partial_of
from coec.checkpoint.report import Report
from coec.config.recovery import Recovery
from coec.devices import choose_device, computed_by
from coec.errors import CalibrationError, ModelError, OptionError, check_installed
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict, read_tensors
from coec.models.folder import REPORT, generation_digest, tokenizer_digest
from coec.models.renumbering import VOCABULARY, Renumbering
from coec.models.surgery import cast
from coec.planning.kept import KEPT
from coec.recovery import plan
from coec.recovery.text import read_prompts, read_windows
from coec.text.sources import mixture
from coec.text.tokens import check_same_tokenizer, holds_tokens, source_of
from coec.text.windows import Windows, source_digest

RATE, LORA_FACTOR = 0.55, 10
"""The learning rate is RATE · rms(W) · √(windows · KL) / width, with the windows of a step and the
divergence of the start in nats, at most one; low-rank additions have LORA_FACTOR times that.

Adam changes every entry of a matrix by about its rate, and a row of `width` such changes adds up in
an output; a start that is close, and gradients of few windows, need shorter steps
(docs/RECOVER.md).
"""


@dataclass(frozen=True, eq=False)
class Job:
    """A recovery, checked.

    Attributes:
        dense, pruned: the models.
        teacher: the model to learn from; the dense one unless another is set.
        report: of the pruning.
        recovery: the settings.
        seq_len: tokens per window.
        device: where it is trained.
        checkpointing: True if activations are recomputed.
        out: the folder to make, without links.
        trust: lets the tokenizer run its own code.
    """

    dense: Dense
    pruned: Dense
    teacher: Dense
    report: Report
    recovery: Recovery
    seq_len: int
    device: torch.device
    checkpointing: bool
    out: Path
    trust: bool

    @classmethod
    def checked(
        cls, dense: Dense, pruned: Dense, out: Path, recovery: Recovery, *, trust: bool
    ) -> "Job":
        """Check everything that can be known before work; raises CoecError."""
        teacher = Dense.open(recovery.teacher or dense)
        for model in (dense, teacher):
            check_alone(model)
        report = _check_kinship(dense, pruned, trust=trust)
        _check_teacher(teacher, dense, report, trust=trust)
        seq_len = plan.window_length(teacher, pruned, recovery)
        way = plan.check_plan(teacher, pruned, recovery)
        check_space(out, way.disk)
        # If no setting says whether activations are recomputed, the plan does.
        job = cls(
            dense, pruned, teacher, report, recovery, seq_len, choose_device(recovery.device),
            bool(way.recovery.checkpointing), out, trust,
        )  # fmt: skip
        renumbered = VOCABULARY in report.plan["widths"]
        text = check_text(
            pruned, recovery, seq_len, job.positions, renumbered=renumbered, trust=trust
        )
        if text is not None:
            job.within(text)
        return job

    @property
    def processes(self) -> Any:
        """The processes that `torchrun` or `accelerate launch` started, or this one alone."""
        from accelerate import PartialState

        return PartialState(cpu=self.device.type == "cpu")

    @property
    def narrow(self) -> bool:
        """True if weights are float32 and products bfloat16."""
        return plan.pass_dtype(self.pruned, self.recovery, self.device).itemsize == 2

    @property
    def at_once(self) -> int:
        """Largest number of windows whose logits are in memory together."""
        return plan.windows_per_pass(self.teacher, self.seq_len, self.device)

    @property
    def positions(self) -> int:
        """Largest number of tokens that both models take."""
        return min(self.teacher.positions, self.pruned.positions)

    @property
    def partial(self) -> Path:
        """The folder of unfinished work."""
        return partial_of(self.out)

    @property
    def identity(self) -> JsonDict:
        """Settings, models and machine; an unfinished run must agree in them."""
        return {
            "recovery": identity_of(self.recovery),
            "dense": self.dense.digest,
            "pruned": self.pruned.digest,
            "teacher": self.teacher.digest,
            "computed_by": computed_by(self.device),
            **(self._writing if self.recovery.own else {}),
        }

    @property
    def _writing(self) -> JsonDict:
        """Files that decide what the teacher writes."""
        return {
            "tokenizer": tokenizer_digest(self.pruned.folder),
            "generation_config": generation_digest(self.teacher.folder),
        }

    def rate(self, start: float, batch: int) -> float:
        """Return the peak learning rate: the given one, or one by the first block's weights.

        Args:
            start: divergence of the pruned model on the validation windows.
            batch: windows for each step.
        """
        if self.recovery.learning_rate is not None:
            return self.recovery.learning_rate
        sizes = [
            float(tensor.float().square().mean().sqrt())
            for tensor in self.pruned.tensors(self.pruned.layout.blocks[0]).values()
            if tensor.ndim == 2
        ]
        rate = RATE * math.sqrt(batch * min(start, 1.0)) / self.dense.shape.hidden * median(sizes)
        return rate * (1 if self.recovery.lora is None else LORA_FACTOR)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that are compared: the shorter of the two models' vocabularies.

        If the pruning changed the vocabulary, the teacher gets the new one.
        """
        if VOCABULARY in self.report.plan["widths"]:
            return self.pruned.vocabulary
        return min(self.teacher.vocabulary, self.pruned.vocabulary)

    @property
    def taught_by(self) -> JsonDict:
        """The teacher's name and digest for the report; no name if it is the dense model."""
        name = self.recovery.teacher and public_name(self.teacher.name, self.teacher.folder)
        return {"teacher": name, "teacher_sha256": self.teacher.digest}

    def windows(
        self, count: int, write: Callable[[int, int], Windows] | None, progress: Progress
    ) -> Windows:
        """Return the first windows of the text, which begin as the calibration's do.

        `write` is as in `read_windows`. Raises CalibrationError for ids without a token.
        """
        windows = read_windows(
            self.pruned, self.recovery, self.seq_len, count, write=write, progress=progress,
            bos=bool(self.report.calibration.get("bos")), trust_remote_code=self.trust,
        )  # fmt: skip
        assert windows is not None  # no part is left out
        return self.within(windows)

    def within(self, windows: Windows) -> Windows:
        """Return windows; raises CalibrationError for ids that are not compared."""
        if (largest := int(windows.ids.max())) >= self.vocabulary:
            raise CalibrationError(
                f"'{windows.source}' has the token id {largest}, the teacher's vocabulary has "
                f"{self.vocabulary}: give a text or a teacher with the same tokens"
            )
        return windows

    def teacher_network(self) -> PreTrainedModel:
        """Build the teacher, which is not trained, with the tokens that are compared."""
        network = self._loaded(self.teacher, self.device).requires_grad_(requires_grad=False)
        # Tokens of the pruned model, or the first ones if only the padding differs
        before, size = self.teacher.vocabulary, self.vocabulary
        kept = torch.arange(min(before, size))
        changed = VOCABULARY in self.report.plan["widths"]
        if changed:
            kept = read_tensors(self.pruned.folder / KEPT).get(VOCABULARY, kept)
        if changed or size < before:
            Renumbering(kept, before, size).cut(network)
        return network

    def network(self, tensors: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
        """Build the pruned model for use, with its own weights or others by their stored names."""
        network = self._loaded(self.pruned, self.device)
        if tensors is not None:
            state = self.pruned.names.in_model(tensors)
            network.load_state_dict(state, strict=not self.pruned.tied)
        return network

    def student(self, device: torch.device | None = None) -> Any:
        """Build the pruned model for training, with low-rank additions if these are set."""
        device, rank = device or self.device, self.recovery.lora
        if rank is None:
            # Trained weights are float32: small steps would vanish in a narrow dtype.
            return self.pruned.network(device, torch.float32)
        import peft

        network: Any = self._loaded(self.pruned, device)
        added = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        # Additions begin at random numbers, which are drawn from the seed in every process.
        with torch.random.fork_rng():
            torch.manual_seed(self.recovery.seed % 2**63)
            return peft.get_peft_model(network, added)

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a student's state as the tensors of a checkpoint, in the dtypes of the start."""
        # State → network without additions → names of a checkpoint → dtypes of the start
        student = self.student(torch.device("cpu"))
        student.load_state_dict(state, assign=True)
        if self.recovery.lora is not None:
            student = student.merge_and_unload()
        tensors = self.pruned.names.from_model(student.state_dict())
        files = self.pruned.files
        return {name: cast(tensors[name], self.pruned.tensor(name).dtype, name) for name in files}

    def _loaded(self, model: Dense, device: torch.device) -> PreTrainedModel:
        """Build a model in the dtype of forward passes."""
        return model.network(device, plan.pass_dtype(model, self.recovery, self.device))


def recovery_of(settings: Mapping[str, Any]) -> Recovery:
    """Check the settings of a recovery, and that the packages which it needs are installed."""
    recovery = Recovery(**settings)
    needed = {"peft": recovery.lora is not None, "torchao": recovery.optimizer == "adamw-8bit"}
    check_installed("training", "accelerate", "accelerate")
    for package in (package for package, is_needed in needed.items() if is_needed):
        check_installed("training", package, package)
    return recovery.model_copy(update={"text": source_of(recovery.text, recovery.text_column)})


def check_alone(model: Dense) -> None:
    """Raise OptionError for a language model inside another, which no training writes back."""
    if model.around is not None:
        raise OptionError(
            f"recover takes models of language alone, and '{model.name}' is one inside "
            f"{model.around.name}: give another model"
        )


def check_text(
    model: Dense,
    recovery: Recovery,
    seq_len: int,
    positions: int,
    *,
    renumbered: bool,
    trust: bool,
) -> Windows | None:
    """Return the first windows of the text, but for parts that the teacher writes.

    Raises:
        CoecError: the text or the prompts cannot be read, or it holds ids of tokens and the pruning
            `renumbered` them.
    """
    if renumbered and any(holds_tokens(source) for source, _ in mixture(recovery.text)):
        raise CalibrationError(
            "the text to train on holds token ids, and the pruning with a vocabulary gives tokens "
            "other ids: give a text"
        )
    if recovery.own:
        read_prompts(model, recovery, seq_len, positions, trust_remote_code=trust)
    return read_windows(model, recovery, seq_len, 2, trust_remote_code=trust)


def identity_of(recovery: Recovery) -> JsonDict:
    """Return the settings that determine a result, but for models; the text by its content."""
    return recovery.record("device", "text", "teacher") | {"text": source_digest(recovery.text)}


def _check_kinship(dense: Dense, pruned: Dense, *, trust: bool) -> Report:
    """Return the report of the pruned model; raises ModelError unless it was made from `dense`."""
    if not (pruned.folder / REPORT).is_file():
        raise ModelError(
            f"no {REPORT} in '{pruned.folder}': PRUNED must be a folder that coec made"
        )
    report = Report.read(pruned.folder)
    if VOCABULARY not in report.plan["widths"]:
        advice = "give the dense model that it was pruned from"
        check_same_tokenizer(pruned.folder, dense.folder, advice, trust_remote_code=trust)
    if dense.digest != report.model_sha256:
        raise ModelError(
            f"'{pruned.folder}' was not made from '{dense.folder}', whose weights are others: give "
            f"the dense model that its {REPORT} names ('{report.model}')"
        )
    pruned.check_values()
    return report


def _check_teacher(teacher: Dense, dense: Dense, report: Report, *, trust: bool) -> None:
    """Raise ModelError unless a teacher has the tokens of the dense model."""
    advice = "the teacher must have the tokenizer of the dense model"
    check_same_tokenizer(teacher.folder, dense.folder, advice, trust_remote_code=trust)
    if VOCABULARY in report.plan["widths"] and teacher.vocabulary != dense.vocabulary:
        raise ModelError(
            f"the teacher '{teacher.name}' has a vocabulary of {teacher.vocabulary}, the dense "
            f"model one of {dense.vocabulary}: they must be equal if the pruning changed it"
        )
