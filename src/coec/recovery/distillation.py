"""The loss of distillation: how far a model's predictions are from those of another.

    L = (1 − c) KL(p ‖ q) + c H(next token, q)

summed over the vocabulary and averaged over tokens, where p are the teacher's probabilities, q the
student's, both at temperature 1. Where only the teacher's k most probable tokens are known, p has
their probabilities, and the rest of its mass where the student has its own: their sum is compared,
and their shares are left as they are.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from coec.streaming.head import LOGITS_PER_PASS


class TopTokens(NamedTuple):
    """A teacher's k most probable next tokens, and the logarithms of their probabilities."""

    log_p: Float[Tensor, "*tokens k"]
    token: Int[Tensor, "*tokens k"]

    @classmethod
    def of(cls, logits: Float[Tensor, "*tokens v"], k: int) -> "TopTokens":
        """Pick them; k is at most the vocabulary."""
        log_p, token = logits.float().log_softmax(dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
        return cls(log_p, token)


Target = Float[Tensor, "*tokens v"] | TopTokens
"""The teacher's logits, or what is kept of them."""


def distillation_loss(
    logits: Float[Tensor, "windows length v"],
    target: Target,
    ids: Int[Tensor, "windows length"],
    cross_entropy: float = 0.0,
) -> Float[Tensor, ""]:
    """Mean loss over all tokens, in nats and in float32; its gradient is in the logits' dtype.

    Args:
        logits: the student's.
        target: the teacher's.
        ids: the windows, whose next tokens the cross-entropy takes; the last has none.
        cross_entropy: the share c of the cross-entropy.
    """
    # The last token of a window has no next one: -1, which counts for nothing.
    following = F.pad(ids[:, 1:], (0, 1), value=-1)
    flat = logits.flatten(0, 1)
    if isinstance(target, TopTokens):
        target = TopTokens(*(tensor.flatten(0, 1) for tensor in target))
    else:
        target = target.flatten(0, 1)
    loss: Tensor = _Loss.apply(flat, target, following.flatten(), cross_entropy)
    return loss


class _Loss(torch.autograd.Function):
    """The loss with its gradient, q − p for every token, made piece by piece in the forward pass.

    Autograd would hold the vocabulary's probabilities of every token in float32, several times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "tokens v"],
        target: Target,
        following: Int[Tensor, " tokens"],
        share: float,
    ) -> Float[Tensor, ""]:
        # Piece by piece: logits → log q, log p → loss and its derivative, in little memory
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        tokens, vocabulary = logits.shape
        # Counted only where it is divided by: to read the count waits for the device.
        counted = max(int((following >= 0).sum()), 1) if share else 1
        loss = logits.new_zeros((), dtype=torch.float32)
        for rows in torch.arange(tokens).split(max(1, LOGITS_PER_PASS // vocabulary)):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            log_q = logits[piece].float().log_softmax(dim=-1)
            log_p = _logarithms(target, piece, log_q)
            p, after = log_p.exp(), following[piece]
            # (1 − c) KL(p ‖ q) over all tokens, c H(next, q) over those that have a next one
            loss += (1 - share) / tokens * (log_p.sub_(log_q).mul_(p)).sum()
            weight = (after >= 0).float()[:, None] * (share / counted)
            picked = after.clamp(min=0)[:, None]
            loss -= (weight * log_q.gather(-1, picked)).sum()
            # ∂L/∂logits = (1 − c)(q − p) + c (q − next), each over its number of tokens, in the
            # memory of q. It holds for TopTokens too: p of the other tokens follows q.
            difference = log_q.exp_().mul_((1 - share) / tokens + weight)
            difference.sub_(p.mul_((1 - share) / tokens)).scatter_add_(-1, picked, -weight)
            if gradient is not None:
                gradient[piece] = difference
        ctx.gradient = gradient
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Float[Tensor, ""]) -> tuple[Tensor, None, None, None]:
        return ctx.gradient * upstream, None, None, None


def _logarithms(
    target: Target, piece: slice, log_q: Float[Tensor, "rows v"]
) -> Float[Tensor, "rows v"]:
    """Log probabilities of a teacher for some tokens.

    Those of unknown tokens are in proportion to the student's, which leaves them without a gradient
    but for their sum.
    """
    if not isinstance(target, TopTokens):
        return target[piece].float().log_softmax(dim=-1)
    token, log_p = target.token[piece].long(), target.log_p[piece].float()
    tiny = torch.finfo(log_p.dtype).tiny
    # log q of the other tokens, moved so that together they have the teacher's mass of these
    left_mass = (1 - log_p.exp().sum(dim=-1, keepdim=True)).clamp(min=tiny)
    mass = log_q.exp().scatter_(-1, token, 0.0).sum(dim=-1, keepdim=True).clamp(min=tiny)
    return (log_q + (left_mass.log() - mass.log())).scatter_(-1, token, log_p)
