"""The end of a model: its final norm, the logits, and how well they predict a text."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from coec.devices import tokens_per_pass
from coec.models.calls import compute_buffers, decoder_of, imitate
from coec.models.dense import Dense

_LARGEST = 700
"""Cross-entropy beyond which there is no perplexity in float64."""


class Prediction:
    """Scores of a model per predicted token, and its distance from another.

    Sums run in float64, batch after batch.

    Attributes:
        tokens: number of predicted tokens.
    """

    def __init__(self) -> None:
        self.tokens = self._agreed = 0
        self._entropy = self._baseline = self._divergence = 0.0

    def update(
        self,
        logits: Float[Tensor, "*tokens v"],
        next_tokens: Int[Tensor, "*tokens"],
        baseline: Float[Tensor, "*tokens v"] | None = None,
    ) -> None:
        """Add a batch; `baseline` has the other model's logits, given in every batch or in none."""
        log_p = log_probabilities(logits)
        self.tokens += next_tokens.numel()
        self._entropy -= _picked(log_p, next_tokens)
        if baseline is not None:
            log_q = log_probabilities(baseline)
            self._baseline -= _picked(log_q, next_tokens)
            divergences = F.kl_div(log_p, log_q, log_target=True, reduction="none")
            self._divergence += float(divergences.sum(dim=-1).sum(dtype=torch.float64))
            self._agreed += int((log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum())

    def merge(self, sums: "Prediction") -> None:
        """Add the sums of another."""
        for name, value in vars(sums).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def cross_entropy(self) -> float:
        """Cross-entropy of the model, in nats per token."""
        return self._entropy / self.tokens

    @property
    def perplexity(self) -> float | None:
        """`exp` of the cross-entropy; None if it is not finite."""
        return _finite_exp(self.cross_entropy)

    @property
    def baseline_cross_entropy(self) -> float:
        """Cross-entropy of the model that it is compared with, in nats per token."""
        return self._baseline / self.tokens

    @property
    def baseline_perplexity(self) -> float | None:
        """`exp` of the baseline's cross-entropy; None if it is not finite."""
        return _finite_exp(self.baseline_cross_entropy)

    @property
    def kl(self) -> float:
        """The mean of KL(baseline ‖ model), in nats per token."""
        return self._divergence / self.tokens

    def record(self) -> dict[str, float | None]:
        """Return perplexity and KL, JSON-ready: None for values that are not finite."""
        return {"perplexity": self.perplexity, "kl": self.kl if math.isfinite(self.kl) else None}

    @property
    def agreement(self) -> float:
        """The share of tokens for which both models find the same one the most probable."""
        return self._agreed / self.tokens


class _Given(nn.Module):
    """Stand-in for a layer that returns hidden states it was given, whatever it is called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.state = torch.empty(0)
        self.in_tuple = False
        imitate(layer, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.state, None) if self.in_tuple else self.state


class Head:
    """The end of a dense model; hidden states may wait on another device than it computes on."""

    def __init__(self, dense: Dense, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        model: Any = dense.skeleton(dtype).requires_grad_(requires_grad=False)
        _, decoder = decoder_of(model)
        # No layers: a stand-in hands the final norm and the head whatever states are given. What is
        # embedded on the way plays no part, so that embeddings are zeros, which take no memory.
        self._given = _Given(decoder.layers[0])
        decoder.layers = nn.ModuleList([self._given])
        compute_buffers(decoder, device)
        nothing = torch.zeros(1, device=device, dtype=dtype)
        unused = {
            f"{name}.weight": nothing.expand(module.weight.shape)
            for name, module in decoder.named_modules()
            if isinstance(module, nn.Embedding)
        }
        decoder.load_state_dict(unused, strict=False, assign=True)
        layout = dense.layout
        head = dense.tensor(layout.embedding if dense.tied else layout.head).to(device, dtype)
        model.get_output_embeddings().weight = nn.Parameter(head, requires_grad=False)
        ends = {name for name, p in model.named_parameters() if p.is_meta}
        outside = (layout.head, *dense.outside) if not dense.tied else dense.outside
        weights = dense.names.in_model({name: dense.tensor(name) for name in outside})
        given = {n: t.to(device, dtype) for n, t in weights.items() if n in ends}
        model.load_state_dict(given, strict=False, assign=True)
        self._model = model.requires_grad_(requires_grad=False)
        self._tried = False

    @torch.no_grad()
    def _takes_first(self) -> bool:
        """Return whether the model takes the first of a tuple, and not a layer's output itself."""
        # The output of a layer differs by model and release: a run on the first states shows it.
        try:
            shape: torch.Size = self._run().shape
        except (IndexError, ValueError):  # the first of a tensor lacks a dimension
            return True
        return shape[:2] != self._given.state.shape[-3:-1]

    def _run(self) -> Tensor:
        """Return the logits of the states that are given."""
        ids = torch.zeros(self._given.state.shape[-3:-1], dtype=torch.int64, device=self._device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def predicted(
        self,
        state: Float[Tensor, "*_ n length h"],
        dense: Float[Tensor, "*_ n length h"],
        windows: Int[Tensor, "n length"],
    ) -> Prediction:
        """Return how well hidden states after the last layer predict the windows they come from.

        Args:
            state: of the model.
            dense: of the dense model.
            windows: token ids.
        """
        sums = Prediction()
        size = tokens_per_pass(self._model.config.vocab_size)
        # No token sees another here: any run of them can be taken.
        runs = [_tokens(states[..., :-1, :]).split(size, dim=-2) for states in (state, dense)]
        next_tokens = windows[:, 1:].flatten().split(size)
        for run, dense_run, ids in zip(*runs, next_tokens, strict=True):
            sums.update(self._logits(run), ids.to(self._device), self._logits(dense_run))
        return sums

    def divergence(
        self, state: Float[Tensor, "*_ n length h"], dense: Float[Tensor, "*_ n length h"]
    ) -> Float[Tensor, ""]:
        """Return `Σ_t KL(dense ‖ model)` of a batch, in nats; derivatives run to `state`.

        The logits of one run of tokens are in memory at a time: their derivatives are taken with
        them, and attached to the sum.
        """
        size = tokens_per_pass(self._model.config.vocab_size)
        runs = [_tokens(states).split(size, dim=-2) for states in (state, dense)]
        total, gradients = torch.zeros((), device=self._device), list[Tensor]()
        for run, dense_run in zip(*runs, strict=True):
            # Pruned states → logits → log p; dense states → log q, q → KL(q ‖ p)
            inputs = run.detach().to(self._device, self._dtype)
            inputs.requires_grad_(state.requires_grad)
            with torch.set_grad_enabled(state.requires_grad):
                logits = self._logits(inputs)
            with torch.no_grad():
                log_p = log_probabilities(logits)
                log_q = log_probabilities(self._logits(dense_run))
                q = log_q.exp()
                total += log_q.sub_(log_p).mul_(q).sum()
                if state.requires_grad:
                    # ∂KL/∂logits = p − q → ∂KL/∂states
                    gradients += torch.autograd.grad(logits, inputs, log_p.exp_().sub_(q))
        if not gradients:
            return total
        # A term of value 0 whose derivative by `state` is the one taken above: autograd goes on
        # from there without the logits.
        by_state = torch.cat(gradients, dim=-2).view_as(state)
        return total + ((state - state.detach()) * by_state).sum()

    def _logits(self, state: Float[Tensor, "*_ tokens h"]) -> Float[Tensor, "tokens v"]:
        self._given.state = state.unsqueeze(-3).to(self._device)
        if not self._tried:
            self._given.in_tuple, self._tried = self._takes_first(), True
        return self._run()[0]


def log_probabilities(logits: Float[Tensor, "*tokens v"]) -> Float[Tensor, "*tokens v"]:
    """Return log probabilities in float32 or wider."""
    # Logarithms of sums over the vocabulary need more digits than narrow logits have.
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits, dim=-1, dtype=wide)


def _tokens(state: Float[Tensor, "*_ n length h"]) -> Float[Tensor, "*_ tokens h"]:
    """Put the tokens of all windows in a row; a model may have several states of every token."""
    return state.flatten(-3, -2)


def _picked(log_p: Tensor, next_tokens: Tensor) -> float:
    return float(log_p.gather(-1, next_tokens[..., None]).sum(dtype=torch.float64))


def _finite_exp(mean: float) -> float | None:
    """Return `exp` of a cross-entropy; None if it is not finite."""
    return math.exp(mean) if mean < _LARGEST else None
