"""The loss of distillation: known answers, and its gradient beside autograd's."""

import pytest
import torch
from torch.nn import functional as F

from coec import devices
from coec.recovery.distillation import TopTokens, distillation_loss

WINDOWS, LENGTH, VOCABULARY = 2, 5, 11


@pytest.fixture
def student():
    return torch.randn(WINDOWS, LENGTH, VOCABULARY).requires_grad_()


@pytest.fixture
def teacher():
    return 2 * torch.randn(WINDOWS, LENGTH, VOCABULARY)


@pytest.fixture
def ids():
    return torch.randint(VOCABULARY, (WINDOWS, LENGTH))


def gradient(loss, logits):
    return torch.autograd.grad(3 * loss, logits)[0]


def divergence(logits, teacher):
    """As a textbook has it."""
    q, p = logits.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="sum") / (WINDOWS * LENGTH)


def cross_entropy(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_autograds(student, teacher, ids, share):
    expected = (1 - share) * divergence(student, teacher) + share * cross_entropy(student, ids)
    loss = distillation_loss(student, teacher, ids, share)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, student), gradient(expected, student))


def test_equal_predictions_have_no_loss_and_no_gradient(student, ids):
    loss = distillation_loss(student, student.detach(), ids)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert gradient(loss, student).abs().max() < 1e-7


def test_it_does_not_matter_how_many_logits_are_looked_at_together(
    student, teacher, ids, monkeypatch
):
    together = distillation_loss(student, teacher, ids, 0.2)
    monkeypatch.setattr(devices, "LOGITS_PER_PASS", 3 * VOCABULARY)
    apart = distillation_loss(student, teacher, ids, 0.2)
    torch.testing.assert_close(apart, together)
    torch.testing.assert_close(gradient(apart, student), gradient(together, student))


def test_all_tokens_of_the_teacher_are_its_logits(student, teacher, ids):
    for k in (VOCABULARY, VOCABULARY + 5):
        loss = distillation_loss(student, TopTokens.of(teacher, k), ids)
        torch.testing.assert_close(loss, distillation_loss(student, teacher, ids))


def test_what_is_not_known_counts_as_one_token(student, teacher, ids):
    """k outcomes and the rest: a divergence of k + 1 outcomes, and its gradient."""
    k = 4
    top = TopTokens.of(teacher, k)
    q = student.softmax(-1)
    known, rest = q.gather(-1, top.token), 1 - q.gather(-1, top.token).sum(-1, keepdim=True)
    outcomes = torch.cat([known, rest], -1)
    p = torch.cat([top.log_p.exp(), 1 - top.log_p.exp().sum(-1, keepdim=True)], -1)
    expected = (p * (p.log() - outcomes.log())).sum() / (WINDOWS * LENGTH)
    loss = distillation_loss(student, top, ids)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, student), gradient(expected, student))
    assert loss < distillation_loss(student, teacher, ids)


def test_probabilities_that_sum_to_more_than_one_leave_no_rest(student, ids):
    """As logarithms in float16 may."""
    top = TopTokens(torch.full((WINDOWS, LENGTH, 2), -0.69), torch.tensor([0, 1]).expand(2, 5, 2))
    loss = distillation_loss(student, top, ids)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(loss, student)).all()


def test_the_gradient_has_the_dtype_of_the_logits(teacher, ids):
    logits = torch.randn(WINDOWS, LENGTH, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    loss = distillation_loss(logits, teacher, ids)
    assert loss.dtype == torch.float32
    assert gradient(loss, logits).dtype == torch.bfloat16
