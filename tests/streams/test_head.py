"""The end of a model: means over predicted tokens, and the distance of two models' predictions."""

import math

import pytest
import torch

import tiny_models as tm
from coec import devices
from coec.models.dense import Dense
from coec.streams.head import Head, Prediction

P = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.2, 0.6]]).log()
Q = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
WANTED = torch.tensor([0, 1, 0])


@pytest.mark.parametrize("cuts", [[3], [1, 2], [1, 1, 1]])
def test_means_are_over_tokens_however_they_come(cuts):
    sums = Prediction()
    for p, wanted, q in zip(P.split(cuts), WANTED.split(cuts), Q.split(cuts), strict=True):
        sums.update(p, wanted, q)
    assert sums.cross_entropy == pytest.approx(-math.log(0.5 * 0.75 * 0.2) / 3)
    assert sums.baseline_cross_entropy == pytest.approx(-math.log(0.5 * 0.25 * 0.1) / 3)
    assert sums.agreement == pytest.approx(2 / 3)
    middle = 0.5 * math.log(4) + 0.25 * math.log(1 / 3) + 0.25 * math.log(2)
    last = 0.2 * math.log(0.5) + 0.8 * math.log(4 / 3)
    assert sums.kl == pytest.approx((middle + last) / 3)


def test_without_a_baseline_there_is_no_distance():
    sums = Prediction()
    sums.update(P[None], WANTED[None])
    assert sums.cross_entropy == pytest.approx(-math.log(0.5 * 0.75 * 0.2) / 3)
    assert sums.kl == sums.agreement == 0


def test_sums_of_parts_are_those_of_all():
    whole, total = Prediction(), Prediction()
    for p, wanted, q in zip(P.split(1), WANTED.split(1), Q.split(1), strict=True):
        part = Prediction()
        part.update(p, wanted, q)
        whole.update(p, wanted, q)
        total.merge(part)
    assert vars(total) == vars(whole)


@pytest.fixture(scope="module", params=["llama", "gemma2", "cohere2"])
def ended(request, tmp_path_factory):
    """A head, the model it is of, and hidden states of two models behind the last block."""
    folder = tm.save(tm.tiny(request.param), tmp_path_factory.mktemp("model") / "model")
    head = Head(Dense.open(folder), device=torch.device("cpu"), dtype=torch.float64)
    model, generator = tm.load(folder), torch.Generator().manual_seed(0)
    shape = (3, 5, model.config.hidden_size)
    dense, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return head, model, dense + 0.3 * noise, dense


def expected(model, state, dense):
    """`Σ_t KL(dense ‖ model)` of all logits at once, by the model's parts."""
    config = model.config

    def log_p(hidden):
        logits = model.lm_head(model.model.norm(hidden)) * getattr(config, "logit_scale", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return (logits if cap is None else cap * (logits / cap).tanh()).log_softmax(dim=-1)

    log_q = log_p(dense)
    return (log_q.exp() * (log_q - log_p(state))).sum()


@pytest.mark.parametrize("tokens", [1, 4, 15, 1000])
def test_a_divergence_is_that_of_all_logits_at_once_however_many_are_held(
    ended, tokens, monkeypatch
):
    head, model, moved, dense = ended
    monkeypatch.setattr(devices, "LOGITS_PER_PASS", tokens * model.config.vocab_size)
    own, other = (moved.clone().requires_grad_() for _ in range(2))
    value, oracle = head.divergence(own, dense), expected(model, other, dense)
    assert value.item() == pytest.approx(oracle.item(), rel=1e-6)
    (2.5 * value).backward()
    (2.5 * oracle).backward()
    torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert float(head.divergence(moved, dense)) == pytest.approx(value.item(), rel=1e-12)


def test_a_model_is_at_no_distance_from_itself(ended):
    head, _, _, dense = ended
    state = dense.clone().requires_grad_()
    value = head.divergence(state, dense)
    value.backward()
    assert abs(value.item()) < 1e-9
    assert state.grad.abs().max() < 1e-7


def test_derivatives_of_a_divergence_run_on_to_what_states_were_made_of(ended):
    head, model, moved, dense = ended
    scales = [torch.tensor(0.9, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    head.divergence(scales[0] * moved, dense).backward()
    expected(model, scales[1] * moved, dense).backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=1e-5, atol=1e-7)


def test_a_divergence_of_narrow_states_is_in_float32(ended):
    wide, model, moved, dense = ended
    opened = Dense.open(model.name_or_path)
    head = Head(opened, device=torch.device("cpu"), dtype=torch.bfloat16)
    state = moved.bfloat16().requires_grad_()
    value = head.divergence(state, dense.bfloat16())
    value.backward()
    assert value.dtype == torch.float32
    assert state.grad.dtype == torch.bfloat16
    assert value.item() == pytest.approx(float(wide.divergence(moved, dense)), rel=0.05)
