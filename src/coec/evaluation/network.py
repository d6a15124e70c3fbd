"""Build models in memory for evaluation."""

import torch
from transformers import PreTrainedModel

from coec.devices import DTYPES, choose_forward_dtype
from coec.errors import OptionError
from coec.models.dense import Dense


def check_dtype(dtype: str | None) -> None:
    """Raise OptionError unless the dtype is None or a name in `DTYPES`."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def load_network(model: Dense, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """Build the model for forward passes on a device."""
    return model.network(device, choose_forward_dtype(dtype, model.dtype, device))
