"""Costs of a recovery: memory by purpose, operations and disk, from the two configurations."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coec import parallel
from coec.config.recovery import Recovery
from coec.devices import (
    LOGITS_PER_PASS,
    FreeMemory,
    choose_device,
    choose_forward_dtype,
    resident_bytes,
    stored_dtype,
)
from coec.errors import OptionError
from coec.models.description import Description
from coec.planning.memory import weights_met
from coec.planning.widths import parameters_inside
from coec.recovery.text import TOP, windows_needed
from coec.text.windows import DEFAULT_SEQ_LEN, resolve_seq_len

USUAL_RANK = 16
"""Rank of the low-rank additions that a refusal proposes."""
_TRAINED, _STATE = 8, 4
"""Bytes of a trained number in memory (itself and its derivative, in float32), and in a saved state
(itself), in addition to the optimiser's moments."""
_MOMENTS = {"adamw": 8, "adamw-8bit": 2}
"""Bytes of the two moments of a trained number, by optimiser."""
KEPT_STATES = 2
"""Saved states that stay on the disk, the best and the last; a third is being written meanwhile,
and later the result."""
_REFUSED = 0.8
"""Part of an estimate from which a run is refused: less than it needs in any case."""
_ROOM = 0.9
"""Fraction of free memory that activations may fill before gradient checkpointing starts."""
_LOGITS_ON_A_GPU = 2**28
"""Logits of a training pass on a GPU, about 1.6 GB of them in bfloat16."""
_HIDDEN, _QUERIES, _CHANNELS = 8, 4, 4
"""Activations that a block keeps for its derivatives, for each token, in hidden sizes, in sizes of
all query heads, and in MLP channels."""


@dataclass(frozen=True)
class Footprint:
    """Memory, operations and disk of one way to train.

    Attributes:
        recovery: the settings, `checkpointing` decided.
        memory: bytes on the device that computes at its fullest moment, by purpose.
        disk: bytes of unfinished work.
        operations: floating-point operations of all tokens; 0 where minutes are the budget.
        dtype: of the forward passes.
    """

    recovery: Recovery
    memory: dict[str, int]
    disk: int
    operations: float
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Memory at its fullest moment."""
        return sum(self.memory.values())

    @property
    def flags(self) -> str:
        """The settings that make this way, in words."""
        rank, stored = self.recovery.lora, self.recovery.predictions == "stored"
        weights = "all weights" if rank is None else f"lora={rank}"
        kept = ", activations recomputed" if self.recovery.checkpointing else ""
        moments = "" if self.recovery.optimizer == "adamw" else ", optimizer=adamw-8bit"
        return f"{weights}{moments}{', predictions=stored' if stored else ''}{kept}"


def pass_dtype(model: Description, recovery: Recovery, device: torch.device) -> torch.dtype:
    """Return the dtype of a model's forward passes; float16 would overflow in training."""
    stored = stored_dtype(model.config)
    return choose_forward_dtype(recovery.forward_dtype, stored, device, summed=True)


def windows_per_pass(model: Description, seq_len: int, device: torch.device) -> int:
    """Return the largest number of windows that go through a model together, by their logits.

    Few tokens at a time leave a GPU waiting for launches; a CPU is as fast with one window.
    """
    logits = LOGITS_PER_PASS if device.type == "cpu" else _LOGITS_ON_A_GPU
    return max(1, logits // (seq_len * model.vocabulary))


def window_length(teacher: Description, pruned: Description, recovery: Recovery) -> int:
    """Return the tokens of a window; raises OptionError if a model has fewer positions."""
    positions = min(teacher.positions, pruned.positions)
    return resolve_seq_len(recovery.seq_len, positions, DEFAULT_SEQ_LEN)


def footprints(
    teacher: str | Path | Description,
    pruned: str | Path | Description,
    recovery: Recovery,
    device: torch.device,
    free: int | None,
) -> list[Footprint]:
    """Estimate the way that the settings ask for, then ways that take less memory.

    Activations are recomputed if they would not fit and no setting decides it.

    Args:
        teacher, pruned: models, by folder or description.
        recovery: the settings.
        device: where it is trained.
        free: free bytes of the device; None if they are not known.
    """
    models = Description.read(teacher), Description.read(pruned)
    seq_len = window_length(*models, recovery)
    # As asked, with moments of a byte, with additions, with stored predictions
    additions, stored = {"lora": recovery.lora or USUAL_RANK}, {"predictions": "stored"}
    changes: list[dict[str, Any]] = [{}, additions]
    if recovery.minutes is None:
        changes.append(additions | stored)
        if recovery.lora is None and shards() == 1:
            changes.insert(1, {"optimizer": "adamw-8bit"} | stored)
    ways: dict[str, Footprint] = {}
    for change in changes:
        way = recovery.model_copy(update=change)
        decided = [way] if way.checkpointing is not None else [
            way.model_copy(update={"checkpointing": again}) for again in (False, True)
        ]  # fmt: skip
        first, *again = (_estimate(*models, way, seq_len, device) for way in decided)
        if again and free is not None and first.bytes > _ROOM * free:
            first = again[0]
        ways.setdefault(first.flags, first)
    return list(ways.values())


def check_plan(teacher: Description, pruned: Description, recovery: Recovery) -> Footprint:
    """Return the estimate of the requested training.

    Raises:
        OptionError: memory is short, or a setting cannot be combined with weights that are divided
            among devices.
    """
    if shards() > 1 and recovery.minutes is not None:
        raise OptionError("minutes are measured with all weights on one device: give tokens")
    if shards() > 1 and recovery.optimizer == "adamw-8bit":  # torchao fails at uneven parts
        raise OptionError("adamw-8bit needs every weight on one device: leave out optimizer")
    device = choose_device(recovery.device)
    free = FreeMemory.of(device).computing
    chosen, *smaller = footprints(teacher, pruned, recovery, device, free)
    if free is None or _REFUSED * chosen.bytes <= free:
        return chosen
    # A refusal names the other ways that fit.
    fitting = [way for way in smaller if way.bytes <= free and way.bytes < chosen.bytes]
    advice = "shorter windows (seq_len=N), or a GPU with more memory"
    if fitting:
        advice = " or ".join(f"{way.flags} ({way.bytes / 1e9:.1f} GB)" for way in fitting)
    raise OptionError(
        f"training {chosen.flags} needs about {chosen.bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
        f"free: take {advice}"
    )


def _estimate(
    teacher: Description,
    pruned: Description,
    recovery: Recovery,
    seq_len: int,
    device: torch.device,
) -> Footprint:
    # Numbers that are trained → weights and activations of a step → content of the disk
    on_host, stored, processes = device.type == "cpu", recovery.predictions == "stored", shards()
    compute = 2 if pass_dtype(pruned, recovery, device).itemsize == 2 else 4
    teacher_compute = pass_dtype(teacher, recovery, device).itemsize
    batch = recovery.windows_per_step(seq_len, recovery.tokens)
    tokens = min(batch, windows_per_pass(teacher, seq_len, device)) * seq_len
    trained = pruned.parameters if recovery.lora is None else _added(pruned, recovery.lora)
    moments = _MOMENTS[recovery.optimizer]
    weights = (_TRAINED + moments) * trained
    if recovery.lora is not None or compute == 2:
        weights += pruned.parameters * compute
    if processes > 1:
        # Each has its part of everything, and gathers two blocks and the embeddings.
        weights = weights // processes + 4 * _gathered(pruned)
    program, whole = resident_bytes() if on_host else 0, teacher.parameters * teacher_compute
    live = 0 if stored else whole
    # Logits and their derivatives, and the teacher's
    logits = (2 * compute + (0 if stored else teacher_compute)) * teacher.vocabulary
    pieces = 3 * 4 * min(LOGITS_PER_PASS, tokens * teacher.vocabulary)
    window = seq_len * teacher.vocabulary * (2 * 4 + teacher_compute)
    training = {
        "program": program, "student": weights, "teacher": live,
        "activations": tokens * _active(pruned, compute, recovery),
        "logits": tokens * logits + pieces,
    }  # fmt: skip
    # One process has the whole teacher while it stores predictions, and the whole pruned model
    # while it validates, also if weights are divided during training.
    storing = {"program": program, "teacher": whole, "logits": window} if stored else {}
    validating = {
        "program": program, "student": pruned.parameters * compute, "teacher": live,
        "logits": window,
    }  # fmt: skip
    count = windows_needed(recovery.tokens or 0, seq_len)
    text = (4 + (6 * TOP if stored else 0)) * count * seq_len
    state = (_STATE + moments) * trained
    result = pruned.parameters * stored_dtype(pruned.config).itemsize
    return Footprint(
        recovery, max(training, storing, validating, key=lambda sizes: sum(sizes.values())),
        text + KEPT_STATES * state + max(state, result),
        (recovery.tokens or 0) * _token_operations(teacher, pruned, recovery),
        torch.bfloat16 if compute == 2 else torch.float32,
    )  # fmt: skip


def _gathered(model: Description) -> int:
    """Number of parameters that a process of several has whole: two blocks and the embeddings."""
    blocks = [parameters_inside(block, model.shapes) for block in model.layout.blocks]
    return model.parameters - sum(blocks) + 2 * max(blocks)


def _added(model: Description, rank: int) -> int:
    """Number of parameters of low-rank additions to every linear layer of the blocks."""
    return sum(rank * sum(shape) for shape in _linear_layers(model).values())


def _linear_layers(model: Description) -> Mapping[str, torch.Size]:
    """Shapes of the matrices in the blocks, except matrices of experts, by name."""
    blocks = tuple(block.prefix for block in model.layout.blocks)
    return {
        name: shape for name, shape in model.shapes.items()
        if len(shape) == 2 and name.startswith(blocks) and ".experts." not in name
    }  # fmt: skip


def _active(model: Description, compute: int, recovery: Recovery) -> int:
    """Sum the activations of one token, in bytes: of all blocks, or of one if computed again."""
    hidden, norms = model.shape.hidden, 2 * 4 * model.shape.hidden if compute < 4 else 0
    added = {} if recovery.lora is None else _linear_layers(model)
    blocks = []
    for block in model.layout.blocks:
        size = sum(
            site.columns * (_CHANNELS if site.value is None else _QUERIES) for site in block.sites
        )
        # Low-rank additions to a matrix write to a copy of its outputs.
        size += sum(rows for name, (rows, _) in added.items() if name.startswith(block.prefix))
        blocks.append(compute * (_HIDDEN * hidden + size) + norms)
    if recovery.checkpointing:
        return max(blocks) + len(blocks) * compute * hidden
    return sum(blocks)


def _token_operations(teacher: Description, pruned: Description, recovery: Recovery) -> float:
    """Train on one token: forward, back through the products and, for all weights, to these too."""
    passes = (3 if recovery.lora is None else 2) + bool(recovery.checkpointing)
    return sum(
        2 * times * (weights_met(model, model.shapes) + model.shape.hidden * model.vocabulary)
        for model, times in ((pruned, passes), (teacher, int(recovery.predictions == "live")))
    )


def shards() -> int:
    """Return the number of processes among which the trained weights are divided; 1 without FSDP.

    Raises:
        OptionError: accelerate was asked for FSDP 1, whose states cannot be resumed here.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return 1
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise OptionError(
            "weights are divided by FSDP 2 alone: set fsdp_version of accelerate to 2"
        )
    return parallel.launched()
