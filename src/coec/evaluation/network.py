"""A checkpoint opened for evaluation: checked first, loaded when the checks are done."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coec.errors import OptionError
from coec.models.architectures import architecture_of
from coec.models.checkpoint import Checkpoint, read_config, skeleton
from coec.planning import choose_forward_dtype, stored_dtype
from coec.recipe import DTYPES


def checked(folder: Path) -> Path:
    """The folder, once its files are known to be whole (their headers; values are not read)."""
    checkpoint = Checkpoint.open(folder)
    architecture_of(checkpoint.config)
    return folder


def check_dtype(dtype: str | None) -> None:
    """Raises OptionError unless the dtype has a name in `DTYPES`, or none."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def sizes(folder: Path) -> tuple[int, int]:
    """Positions and vocabulary, from the configuration."""
    config = skeleton(read_config(folder)).config
    return int(config.max_position_embeddings), int(config.vocab_size)


def load_network(folder: Path, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """The model in memory, ready for a forward pass."""
    forward = choose_forward_dtype(dtype, stored_dtype(read_config(folder)), device)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=forward)
    return model.to(device).eval()
