"""How far an error behind a block moves the dense model's predictions, by its direction.

A hidden state may move far in most directions and change little of what is said next. The Fisher
information `E g gᵀ` knows the others: g is the gradient, by a token's hidden state, of the log
probability of a token drawn from the model's own prediction (METHODS §8). It takes one pass forward
and one back over a few windows, with one block in memory at a time.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.errors import NumericalError
from coec.models.dense import Dense, Prefetcher
from coec.models.layout import BlockLayout
from coec.streaming.dense_stream import batch_size, first_windows
from coec.streaming.head import Head
from coec.streaming.layers import Layers, State, to_host
from coec.streaming.token_weights import least_square, squares_of


class FisherStream:
    """The dense model over the first few windows, forward and back.

    Args:
        dense: the model.
        windows: token ids.
        tokens: about so many are run; their hidden states before every block wait at once.
        device: where blocks run; hidden states wait on the CPU.
        dtype: of the passes.
        weighted: tokens have the weights of `token_weights`.
    """

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        weighted: bool,
    ) -> None:
        self._dense, self._device, self._dtype, self._weighted = dense, device, dtype, weighted
        self._batches = first_windows(windows, tokens).split(batch_size(windows.shape[1]))
        self._layers = Layers(dense, device=device, dtype=dtype)

    def information(self, seed: int) -> Iterator[tuple[BlockLayout, Float[Tensor, "h h"]]]:
        """Yield every block, the last first, with the Fisher information behind it, in float32.

        It is a mean over tokens, each divided by its weight, and then divided by that of its
        diagonal. `seed` draws the tokens.

        Raises:
            NumericalError: gradients are not finite.
        """
        before = self._forward()
        states = before.pop()
        head = Head(self._dense, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(seed)
        gradients = [to_host(head.drawn_gradient(state, generator)) for state in states]
        del head
        for block in reversed(self._dense.layout.blocks):
            yield block, self._mean(gradients, states)
            states = before.pop()
            if before:
                self._layers.load(block, self._dense.tensors(block))
                gradients = [
                    self._back(block, state, g) for state, g in zip(states, gradients, strict=True)
                ]
                self._layers.drop(block.index)

    @torch.no_grad()
    def _forward(self) -> list[Sequence[State]]:
        """Return the hidden states before every block, and those behind the last."""
        blocks = self._dense.layout.blocks
        embedding = self._dense.tensor(self._dense.layout.embedding)
        states: list[Sequence[State]] = [self._layers.embed(self._batches, embedding)]
        with Prefetcher(self._dense, last=len(blocks) - 1) as ahead:
            for block in blocks:
                self._layers.load(block, ahead.tensors(block))
                states.append([self._layers.advance(block.index, state) for state in states[-1]])
                self._layers.drop(block.index)
        return states

    def _back(self, block: BlockLayout, state: State, gradient: State) -> State:
        """Return the gradient by the states before a block, from that by those behind it."""
        inputs = state.detach().to(self._device).requires_grad_()
        out = self._layers.call(self._layers.modules[block.index], block.index, inputs)
        [before] = torch.autograd.grad(out, inputs, gradient.to(out))
        return to_host(before)

    def _mean(self, gradients: Sequence[State], states: Sequence[State]) -> Float[Tensor, "h h"]:
        squares = [squares_of(state) for state in states]
        least = least_square(squares)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient, square in zip(gradients, squares, strict=True):
            g = gradient.flatten(0, -2).to(self._device, torch.float64)
            if self._weighted:  # `Σ_t r_tᵀ g_t g_tᵀ r_t` is to be near `Σ_t w_t r_tᵀ M r_t`
                g = g * square.clamp_min(least).sqrt().reshape(-1, 1).to(g)
            total = total + g.T @ g
        mean = float(total.diagonal().mean())
        if not 0 < mean < float("inf"):
            raise NumericalError(
                "what an error costs the predictions cannot be told by its direction: their "
                "gradients vanish or are not finite; set fisher = 0"
            )
        return (total / mean).float().cpu()


def root(information: Float[Tensor, "h h"], share: float) -> Float[Tensor, "h h"]:
    """Return S, upper triangular, with `SᵀS = share · M + (1 − share) · I`, in float64."""
    metric = share * information.double()
    metric.diagonal().add_(1 - share)
    return torch.linalg.cholesky(metric).mT.contiguous()
