"""A model in memory, of any kind that transformers loads: quantised, or with an adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coec.devices import choose_forward_dtype
from coec.errors import ModelError, first_line
from coec.models.dense import Dense
from coec.models.folder import find_model

_UNLIMITED = 2**31
"""Positions of a model whose configuration names no number of them."""


def load_network(model: Dense, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """Build the model for forward passes on a device."""
    return model.network(device, choose_forward_dtype(dtype, model.dtype, device))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A causal model in memory, as `AutoModelForCausalLM` builds it.

    Attributes:
        folder: where it is from, whose tokenizer it has.
    """

    folder: Path
    network: PreTrainedModel

    @classmethod
    def open(
        cls, model: str | Path, device: torch.device, dtype: str | None, *, trust_remote_code: bool
    ) -> "Loaded":
        """Load a model; one that is quantised stays in its own dtypes.

        Raises:
            ModelError: it is missing, or transformers does not load it.
        """
        folder = find_model(model)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": "auto"}
        try:
            network: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        except Exception as error:  # models and quantisers may raise anything
            reason = first_line(error)
            if not trust_remote_code and "trust_remote_code" in str(error):
                reason = "Python code of its own builds it: trust_remote_code=True runs that"
            raise ModelError(f"transformers does not load '{folder}': {reason}") from error
        # Quantised weights stay in their dtypes, and where their loader has put them.
        if getattr(network, "hf_quantizer", None) is None:
            network = network.to(device, choose_forward_dtype(dtype, network.dtype, device))
        return cls(folder, network.eval())

    @property
    def positions(self) -> int:
        """Tokens that it takes at most."""
        return getattr(self.network.config, "max_position_embeddings", None) or _UNLIMITED

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it predicts."""
        return int(self.network.config.vocab_size)
