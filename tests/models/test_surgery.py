"""Cutting rows and columns, and what happens to biases."""

import pytest
import torch

from coec.errors import NumericalError
from coec.models.architectures import ATTENTION, MLP, Shape
from coec.models.surgery import Cut, cut_block, value_rows
from coec.types import KeptSet, SiteResult

SHAPE = Shape(layers=1, hidden=6, head_dim=2, kv_heads=3, group=2, ffn=5)


def block():
    def numbered(rows, columns):
        return torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns)

    return {
        "self_attn.q_proj.weight": numbered(12, 6),
        "self_attn.q_proj.bias": torch.arange(12.0),
        "self_attn.k_proj.weight": numbered(6, 6),
        "self_attn.v_proj.weight": numbered(6, 6),
        "self_attn.o_proj.weight": numbered(6, 12),
        "mlp.gate_proj.weight": numbered(5, 6),
        "mlp.up_proj.weight": numbered(5, 6),
        "mlp.down_proj.weight": numbered(6, 5),
        "mlp.down_proj.bias": torch.arange(6.0),
        "input_layernorm.weight": torch.ones(6),
    }


def test_a_kv_group_takes_its_query_rows_its_own_rows_and_its_columns():
    tensors, units = block(), KeptSet(torch.tensor([0, 2]), 3)
    weight = torch.zeros(6, 8, dtype=torch.float64)
    out = cut_block(tensors, [Cut(ATTENTION, units, SiteResult(weight))], torch.float64)
    queries, own = [0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 4, 5]
    assert torch.equal(out["self_attn.q_proj.weight"], tensors["self_attn.q_proj.weight"][queries])
    assert out["self_attn.q_proj.bias"].tolist() == queries
    assert torch.equal(out["self_attn.k_proj.weight"], tensors["self_attn.k_proj.weight"][own])
    assert torch.equal(out["self_attn.v_proj.weight"], tensors["self_attn.v_proj.weight"][own])
    assert torch.equal(out["self_attn.o_proj.weight"], weight)
    for untouched in ("mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.equal(out[untouched], tensors[untouched])


def test_a_compensating_bias_is_added_to_the_one_that_is_there():
    units = KeptSet(torch.tensor([1, 3]), 5)
    change = SiteResult(torch.ones(6, 2), bias=torch.full((6,), 10.0))
    out = cut_block(block(), [Cut(MLP, units, change)], torch.float32)
    assert out["mlp.down_proj.bias"].tolist() == [10, 11, 12, 13, 14, 15]
    assert out["mlp.gate_proj.weight"].shape == (2, 6)


def test_a_site_that_keeps_everything_keeps_its_bits():
    tensors = block()
    cut = Cut(MLP, KeptSet(torch.arange(5), 5), SiteResult(torch.zeros(6, 5)))
    out = cut_block(tensors, [cut], torch.float64)
    assert all(torch.equal(out[name], tensors[name].double()) for name in tensors)


def test_value_rows_repeat_each_head_for_its_queries():
    tensors = block()
    rows = value_rows(tensors, SHAPE, KeptSet(torch.tensor([0, 2]), 3))
    expected = tensors["self_attn.v_proj.weight"][[0, 1, 0, 1, 4, 5, 4, 5]]
    assert torch.equal(rows, expected)


def test_a_weight_beyond_the_dtype_is_an_error():
    cut = Cut(MLP, KeptSet(torch.tensor([1]), 5), SiteResult(torch.full((6, 1), 1e6)))
    with pytest.raises(NumericalError, match=r"mlp\.down_proj does not fit torch\.float16"):
        cut_block(block(), [cut], torch.float16)
