"""Cutting rows and columns, and what happens to biases."""

import dataclasses
import pickle

import pytest
import torch

import tiny_models as tm
from coec.errors import ModelError, NumericalError
from coec.models.architectures import ARCHITECTURES
from coec.models.description import Description
from coec.models.layout import Rows, Shape
from coec.models.surgery import Cut, cut_block, value_rows
from coec.types import KeptSet, SiteResult

SHAPE = Shape(layers=1, hidden=6, head_dim=2, kv_heads=3, group=2, ffn=5)
PREFIX = "model.layers.0."


def block():
    def numbered(rows, columns):
        return torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns)

    attention = {"q": (12, 6), "k": (6, 6), "v": (6, 6), "o": (6, 12)}
    mlp = {"gate": (5, 6), "up": (5, 6), "down": (6, 5)}
    tensors = {f"self_attn.{name}_proj.weight": numbered(*s) for name, s in attention.items()}
    tensors |= {f"mlp.{name}_proj.weight": numbered(*size) for name, size in mlp.items()}
    tensors["self_attn.q_proj.bias"] = torch.arange(12.0)
    tensors["mlp.down_proj.bias"] = torch.arange(6.0)
    tensors["input_layernorm.weight"] = torch.ones(6)
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


PATTERN = ARCHITECTURES["llama"].blocks
LAYOUT = PATTERN.layout(SHAPE, {name: tensor.shape for name, tensor in block().items()})
ATTENTION_SITE, MLP_SITE = LAYOUT.sites


def test_a_kv_group_takes_its_query_rows_its_own_rows_and_its_columns():
    tensors, units = block(), KeptSet(torch.tensor([0, 2]), 3)
    weight = torch.zeros(6, 8, dtype=torch.float64)
    cut = cut_block(tensors, [Cut(ATTENTION_SITE, units, SiteResult(weight))], torch.float64)
    out, dense = ({n.removeprefix(PREFIX): t for n, t in one.items()} for one in (cut, tensors))
    queries, own = [0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 4, 5]
    assert torch.equal(out["self_attn.q_proj.weight"], dense["self_attn.q_proj.weight"][queries])
    assert out["self_attn.q_proj.bias"].tolist() == queries
    assert torch.equal(out["self_attn.k_proj.weight"], dense["self_attn.k_proj.weight"][own])
    assert torch.equal(out["self_attn.v_proj.weight"], dense["self_attn.v_proj.weight"][own])
    assert torch.equal(out["self_attn.o_proj.weight"], weight)
    for untouched in ("mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.equal(out[untouched], dense[untouched])


def test_a_compensating_bias_is_added_to_the_one_that_is_there():
    units = KeptSet(torch.tensor([1, 3]), 5)
    change = SiteResult(torch.ones(6, 2), bias=torch.full((6,), 10.0))
    out = cut_block(block(), [Cut(MLP_SITE, units, change)], torch.float32)
    assert out[f"{PREFIX}mlp.down_proj.bias"].tolist() == [10, 11, 12, 13, 14, 15]
    assert out[f"{PREFIX}mlp.gate_proj.weight"].shape == (2, 6)


@pytest.mark.parametrize("weight", [None, torch.ones(6, 5)])
def test_a_site_that_keeps_everything_keeps_its_bits_unless_it_has_a_new_weight(weight):
    """That of a pruned model's inputs: there is something to compensate all the same."""
    tensors, result = block(), None if weight is None else SiteResult(weight)
    out = cut_block(tensors, [Cut(MLP_SITE, KeptSet(torch.arange(5), 5), result)], torch.float64)
    changed = [name for name in tensors if not torch.equal(out[name], tensors[name].double())]
    assert changed == ([] if weight is None else [MLP_SITE.weight])
    if weight is not None:
        assert torch.equal(out[MLP_SITE.weight], weight.double())


def test_value_rows_repeat_each_head_for_its_queries():
    tensors = block()
    rows = value_rows(tensors, ATTENTION_SITE, KeptSet(torch.tensor([0, 2]), 3))
    expected = tensors[f"{PREFIX}self_attn.v_proj.weight"][[0, 1, 0, 1, 4, 5, 4, 5]]
    assert torch.equal(rows, expected)
    assert value_rows(tensors, MLP_SITE, KeptSet(torch.tensor([0, 2]), 5)) is None


def test_projections_stored_in_one_tensor_are_parts_of_its_rows():
    """Query, key and value in one matrix, gate and up in another: only other slices."""
    tensors, units = block(), KeptSet(torch.tensor([1]), 3)
    names = [f"{PREFIX}self_attn.{one}_proj.weight" for one in "qkv"]
    apart = cut_block(tensors, [Cut(ATTENTION_SITE, units, SiteResult(torch.ones(6, 4)))],
                      torch.float64)  # fmt: skip
    fused, name = torch.cat([tensors.pop(one) for one in names]), f"{PREFIX}self_attn.qkv.weight"
    site = dataclasses.replace(
        ATTENTION_SITE,
        producers=(Rows(name, 0, 12), Rows(name, 12, 18), Rows(name, 18, 24)),
        value=Rows(name, 18, 24),
    )
    cut = Cut(site, units, SiteResult(torch.ones(6, 4)))
    together = cut_block(tensors | {name: fused}, [cut], torch.float64)
    assert torch.equal(together[name], torch.cat([apart[one] for one in names]))
    expected = value_rows(block(), ATTENTION_SITE, units)
    assert torch.equal(value_rows({name: fused}, site, units), expected)


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_a_layout_is_a_value_also_after_a_journey(variant):
    """Whatever process it comes from, a site is the same and has the same units."""
    layout = Description.of(tm.raw_config(variant)).layout
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert copy is not layout
    architecture = ARCHITECTURES[tm.VARIANTS[variant]["model_type"]]
    attention = [] if architecture.attention_kept else [4]
    expected = 2 * [*attention, 40]
    if architecture.count:
        own = 20 if "moe_intermediate_size" in tm.VARIANTS[variant] else 40
        shared = [20] if "n_shared_experts" in tm.VARIANTS[variant] else []
        routed = [*attention, *shared, *(4 * [own])]
        dense_first = variant == "qwen3_moe mixed" or shared
        expected = [*attention, 40, *routed] if dense_first else 2 * routed
    assert [site.units for site in copy.sites] == expected
    assert [site.columns for site in copy.kinds] == [
        site.columns_per_unit * site.units for site in layout.kinds
    ]
    assert len(set(copy.sites)) == len(copy.sites)


def test_tensors_that_do_not_divide_among_the_units_are_refused():
    shapes = {name: tensor.shape for name, tensor in block().items()}
    shapes[f"{PREFIX}self_attn.k_proj.weight"] = torch.Size([7, 6])
    with pytest.raises(ModelError, match="k_proj.weight does not divide into 3 KV groups: it is 7"):
        PATTERN.layout(SHAPE, shapes)


def test_a_weight_beyond_the_dtype_is_an_error():
    cut = Cut(MLP_SITE, KeptSet(torch.tensor([1]), 5), SiteResult(torch.full((6, 1), 1e6)))
    with pytest.raises(NumericalError, match=r"mlp\.down_proj does not fit torch\.float16"):
        cut_block(block(), [cut], torch.float16)
