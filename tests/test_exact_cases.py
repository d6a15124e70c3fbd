"""Where nothing is lost, nothing may be lost: the pruned model computes the dense one."""

import pytest
import torch

import coec
import tiny_models as tm

LOST = torch.arange(28, 40)
"""The channels that go; their information is in those that stay, or they have none."""

FAITHFUL = {"least-squares": {"ridge": 0.0}, "ridge-to-slice": {"ridge": 0.0}}


def dead(mlp):
    mlp.up_proj.weight[LOST] = 0


def duplicated(mlp):
    for producer in (mlp.gate_proj, mlp.up_proj):
        producer.weight[LOST] = producer.weight[LOST - 28]


def dependent(mlp):
    """One gate for all: the channel is linear in `up`, and its row of `up` a mixture of others."""
    mlp.gate_proj.weight[:] = mlp.gate_proj.weight[0]
    mlp.up_proj.weight[:28, 20:] = 0
    mixture = torch.randn(len(LOST), 28, dtype=torch.float64)
    mlp.up_proj.weight[LOST] = mixture @ mlp.up_proj.weight[:28]


def keep_first(weight, gram):
    return -torch.arange(weight.shape[1], dtype=weight.dtype)


def pruned(model, tmp_path, **options):
    dense = tm.save(model, tmp_path / "dense", tokenizer=False)
    tokens = tm.token_file(tmp_path / "tokens.npy")
    coec.prune(dense, tmp_path / "out", preset="paper", calibration=tokens, samples=24, seq_len=32,
               selection=keep_first, forward_dtype="float64", **options)  # fmt: skip
    return tm.load(tmp_path / "out")


@pytest.mark.parametrize("method", FAITHFUL)
@pytest.mark.parametrize("make", [dead, duplicated, dependent])
def test_redundant_channels_cost_nothing(make, method, tmp_path):
    model = tm.tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            make(layer.mlp)
            # the group that goes writes nothing: only the MLP is in question
            layer.self_attn.v_proj.weight[12:] = 0
    small = pruned(model, tmp_path, compensation=method, **FAITHFUL[method])
    assert small.config.intermediate_size == 28
    torch.testing.assert_close(tm.logits(small), tm.logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["none", "bias", "least-squares", "rcpu", "coec"])
def test_dead_units_cost_nothing_under_any_compensation(method, tmp_path):
    model = tm.tiny("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            dead(layer.mlp)
            layer.self_attn.v_proj.weight[12:] = 0
            layer.self_attn.v_proj.bias[12:] = 0
    options = {"least-squares": {"ridge": 0.0}, "coec": {"lambda_a": 0.0}}.get(method, {})
    small = pruned(model, tmp_path, compensation=method, **options)
    torch.testing.assert_close(tm.logits(small), tm.logits(model), rtol=1e-7, atol=1e-7)


def test_channels_that_carry_something_do_cost(tmp_path):
    """The check above can fail."""
    model = tm.tiny("llama")
    small = pruned(model, tmp_path, compensation="least-squares", ridge=0.0)
    assert float((tm.logits(small) - tm.logits(model)).abs().max()) > 1e-3
