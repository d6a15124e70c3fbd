"""How well a model predicts tokens, and how far from another: sums over the tokens of a text."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


class Prediction:
    """Means per predicted token; sums run in float64, batch after batch."""

    def __init__(self) -> None:
        self._tokens = self._agreed = 0
        self._entropy = self._baseline = self._divergence = 0.0

    def update(
        self,
        log_p: Float[Tensor, "*tokens v"],
        next_tokens: Int[Tensor, "*tokens"],
        baseline: Float[Tensor, "*tokens v"] | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            log_p: log-probabilities of the model.
            next_tokens: the tokens that followed.
            baseline: log-probabilities of the model that it is compared with, in every batch or in
                none.
        """
        self._tokens += next_tokens.numel()
        self._entropy -= _picked(log_p, next_tokens)
        if baseline is not None:
            self._baseline -= _picked(baseline, next_tokens)
            divergences = F.kl_div(log_p, baseline, log_target=True, reduction="none")
            self._divergence += float(divergences.sum(dtype=torch.float64))
            self._agreed += int((log_p.argmax(dim=-1) == baseline.argmax(dim=-1)).sum())

    def add(self, sums: "Prediction") -> None:
        """Adds the sums of another."""
        for name, value in vars(sums).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def cross_entropy(self) -> float:
        """Cross-entropy of the model, in nats per token."""
        return self._entropy / self._tokens

    @property
    def baseline_cross_entropy(self) -> float:
        """Cross-entropy of the model that it is compared with, in nats per token."""
        return self._baseline / self._tokens

    @property
    def kl(self) -> float:
        """The mean of KL(baseline ‖ model), in nats per token."""
        return self._divergence / self._tokens

    @property
    def agreement(self) -> float:
        """The share of tokens for which both models find the same one the most probable."""
        return self._agreed / self._tokens


def _picked(log_p: Tensor, next_tokens: Tensor) -> float:
    return float(log_p.gather(-1, next_tokens[..., None]).sum(dtype=torch.float64))
