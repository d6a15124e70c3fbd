"""What follows a model's last layer: its final norm, and the logits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from coec.models.dense import Dense
from coec.models.description import compute_buffers
from coec.streaming.layers import imitate
from coec.streaming.prediction import Prediction

LOGITS_PER_PASS = 2**24
"""Logits held at once."""
_LARGEST = 700
"""Cross-entropy beyond which there is no perplexity in float64."""


@dataclass(frozen=True)
class PredictionScore:
    """Score of a model on windows.

    Attributes:
        perplexity: `exp` of the mean cross-entropy; None where it is not finite.
        kl: the mean of KL(dense ‖ model), in nats per token; None where it is not finite.
    """

    perplexity: float | None
    kl: float | None

    @classmethod
    def of(cls, sums: Prediction) -> "PredictionScore":
        """Return the means of some sums."""
        mean, kl = sums.cross_entropy, sums.kl
        return cls(math.exp(mean) if mean < _LARGEST else None, kl if math.isfinite(kl) else None)


class _Given(nn.Module):
    """Stands in for a layer, and returns hidden states that it has, whatever it is called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.state = torch.empty(0)
        self.in_tuple = False
        imitate(layer, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.state,) if self.in_tuple else self.state


class Head:
    """The end of a dense model, from the hidden states behind its last layer.

    Args:
        dense: the model.
        device: where to compute; hidden states may wait elsewhere.
        dtype: of the forward pass.
    """

    def __init__(self, dense: Dense, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        model: Any = dense.skeleton(dtype).requires_grad_(requires_grad=False)
        compute_buffers(model, device)
        self._given = _Given(model.base_model.layers[0])
        model.base_model.layers = nn.ModuleList([self._given])
        layout = dense.layout
        head = layout.embedding if dense.tied else layout.head
        for module, name in (
            (model.base_model.norm, layout.norm), (model.get_output_embeddings(), head)
        ):  # fmt: skip
            module.weight = nn.Parameter(dense.tensor(name).to(device, dtype), requires_grad=False)
        self._model = model
        self._given.in_tuple = not self._returns_all()

    @torch.no_grad()
    def _returns_all(self) -> bool:
        """Return whether the model takes a layer's output itself, and not the first of a tuple."""
        norm = self._model.base_model.norm
        self._given.state = torch.ones(1, 2, len(self.norm)).to(norm.weight)
        try:
            out = self._model.base_model(inputs_embeds=self._given.state, use_cache=False)
        except IndexError:  # the first of a tensor is a row, which lacks a dimension
            return False
        shape: torch.Size = out.last_hidden_state.shape
        return shape == self._given.state.shape

    @property
    def norm(self) -> Float[Tensor, " h"]:
        """The final norm's weight."""
        return cast(Tensor, self._model.base_model.norm.weight)

    @torch.no_grad()
    def normed(self, state: Float[Tensor, "n length h"]) -> Float[Tensor, "n length h"]:
        """Return hidden states after the final norm, its weight taken as 1."""
        ones = {"weight": torch.ones_like(self.norm)}
        out: Tensor = functional_call(self._model.base_model.norm, ones, state.to(self._device))
        return out

    @torch.no_grad()
    def score(
        self,
        states: Sequence[Float[Tensor, "_ length h"]],
        dense: Sequence[Float[Tensor, "_ length h"]],
        windows: Int[Tensor, "w length"],
        norm: Float[Tensor, " h"] | None = None,
    ) -> PredictionScore:
        """Return how well hidden states behind the last layer predict the windows they come from.

        Args:
            states: of the model.
            dense: of the dense model, on the same windows.
            windows: token ids.
            norm: another weight of the final norm, for the model alone.
        """
        sums = Prediction()
        batches = windows.split([len(state) for state in states])
        for state, dense_state, ids in zip(states, dense, batches, strict=True):
            sums.add(self.predicted(state, dense_state, ids, norm))
        return PredictionScore.of(sums)

    @torch.no_grad()
    def predicted(
        self,
        state: Float[Tensor, "n length h"],
        dense: Float[Tensor, "n length h"],
        windows: Int[Tensor, "n length"],
        norm: Float[Tensor, " h"] | None = None,
    ) -> Prediction:
        """Return the sums of one batch."""
        sums = Prediction()
        size = max(1, LOGITS_PER_PASS // self._model.config.vocab_size)
        # No token sees another here: any run of them can be taken.
        runs = [states[:, :-1].flatten(0, 1).split(size) for states in (state, dense)]
        next_tokens = windows[:, 1:].flatten().split(size)
        for run, dense_run, wanted_ids in zip(*runs, next_tokens, strict=True):
            sums.update(
                self._log_probabilities(run, norm),
                wanted_ids.to(self._device),
                self._log_probabilities(dense_run, None),
            )
        return sums

    def norm_sums(
        self, state: Float[Tensor, "n length h"], dense: Float[Tensor, "n length h"]
    ) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
        """`Σ n̂ n` and `Σ n̂²` of a batch, for `rescaled_norm`."""
        n_hat, n = self.normed(state), self.normed(dense)
        product = (n_hat * n).sum(dim=(0, 1), dtype=torch.float64).cpu()
        return product, n_hat.square().sum(dim=(0, 1), dtype=torch.float64).cpu()

    def _log_probabilities(
        self, state: Float[Tensor, "tokens h"], norm: Tensor | None
    ) -> Float[Tensor, "tokens v"]:
        self._given.state = state[None].to(self._device)
        changed = {} if norm is None else {f"{self._norm_name}.weight": norm.to(self.norm)}
        out: Any = functional_call(
            self._model, changed, kwargs={"inputs_embeds": self._given.state, "use_cache": False}
        )
        logits: Tensor = out.logits[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.log_softmax(logits.to(wide), dim=-1)

    @property
    def _norm_name(self) -> str:
        """Name of the final norm's module in the model."""
        norm = self._model.base_model.norm
        return next(name for name, module in self._model.named_modules() if module is norm)


def rescaled_norm(
    norm: Float[Tensor, " h"],
    sums: Iterable[tuple[Float[Tensor, " h"], Float[Tensor, " h"]]],
) -> Float[Tensor, " h"]:
    """The final norm's weight, every channel rescaled to fit the dense model's (METHODS §8).

    `γ_i ← γ_i · Σ n̂_i n_i / Σ n̂_i²` over the normed states n̂ of the pruned and n of the dense
    model; a channel that is 0 stays as it is.

    Args:
        norm: γ.
        sums: of every batch, by `Head.norm_sums`.
    """
    product = square = torch.zeros((), dtype=torch.float64)
    for batch_product, batch_square in sums:
        product, square = product + batch_product, square + batch_square
    factor = torch.where(square > 0, product / square, torch.ones_like(square))
    return norm.detach().cpu().double() * factor
