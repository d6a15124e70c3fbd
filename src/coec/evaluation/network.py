"""A model in memory for evaluation."""

import torch
from transformers import PreTrainedModel

from coec.devices import DTYPES, choose_forward_dtype
from coec.errors import OptionError
from coec.models.dense import Dense


def check_dtype(dtype: str | None) -> None:
    """Raises OptionError unless the dtype has a name in `DTYPES`, or none."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def load_network(model: Dense, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """The model ready for a forward pass."""
    return model.network(device, choose_forward_dtype(dtype, model.dtype, device))
