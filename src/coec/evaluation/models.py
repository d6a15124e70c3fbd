"""Models that are measured: read by coec, or any causal model that transformers loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coec.config.evaluation import TextEvaluation
from coec.devices import choose_forward_dtype
from coec.errors import ModelError, first_line
from coec.models.dense import Dense
from coec.models.folder import find_model

_UNLIMITED = 2**31
"""Positions of a model whose configuration does not name their number."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A causal model in memory, also quantised or with an adapter.

    Attributes:
        folder: its folder, whose tokenizer it has.
        network: as `AutoModelForCausalLM` builds it.
    """

    folder: Path
    network: PreTrainedModel

    @property
    def positions(self) -> int:
        """Largest number of tokens that it takes."""
        return getattr(self.network.config, "max_position_embeddings", None) or _UNLIMITED

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it predicts."""
        return int(self.network.config.vocab_size)


def opened(
    model: str | Path | Dense | PreTrainedModel,
    rules: TextEvaluation,
    device: torch.device,
    *,
    trust_remote_code: bool,
) -> Dense | Loaded:
    """Open the model that is measured, as `via` says; a model in memory is not changed.

    Raises:
        ModelError: it is missing, or transformers does not load it.
    """
    if isinstance(model, PreTrainedModel):
        return Loaded(Path(model.name_or_path or type(model).__name__), model.eval())
    if rules.via == "coec":
        return Dense.open(model)
    folder = model.folder if isinstance(model, Dense) else find_model(model)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": "auto"}
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # models and quantisers may raise anything
        reason = first_line(error)
        if not trust_remote_code and "trust_remote_code" in str(error):
            reason = "Python code of its own builds it: trust_remote_code=True runs that"
        raise ModelError(f"transformers does not load '{folder}': {reason}") from error
    # Quantised weights stay in their dtypes, and on the device that their loader chose.
    if getattr(network, "hf_quantizer", None) is None:
        network = network.to(device, choose_forward_dtype(rules.dtype, network.dtype, device))
    return Loaded(folder, network.eval())


def load_network(model: Dense, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """Build the model for forward passes on a device."""
    return model.network(device, choose_forward_dtype(dtype, model.dtype, device))
