"""Which units a checkpoint of another program has: told from rows, or refused with what is odd."""

import pytest
import torch

import tiny_models as tm
from coec.errors import ModelError
from coec.models.dense import Dense
from coec.models.matching import SiteTensors, kept_units
from coec.types import KeptSet

KEPT = {"attention": [0, 2, 3], "mlp": [1, 2, 5, *range(8, 39)]}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Heads of four, two to a KV group; biases, so that units own rows of these too."""
    folder = tm.save(tm.tiny("llama biases", torch.float32), tmp_path_factory.mktemp("m") / "dense")
    return Dense.open(folder)


def side(dense, name):
    site = next(site for site in dense.layout.blocks[1].sites if site.name == name)
    return SiteTensors(
        "DENSE", site, {n: dense.tensor(n) for n in site.tensors if n in dense.files}
    )


def cut(mine, units=None, dtype=torch.float32):
    """The tensors with some units alone, as another program would have cut them."""
    kept = KeptSet(torch.tensor(units or KEPT[mine.site.name]), mine.site.units)
    tensors = dict(mine.tensors)
    for rows in mine.site.producers:
        tensors[rows.tensor] = tensors[rows.tensor][rows.of(kept)]
    tensors[mine.site.weight] = tensors[mine.site.weight][:, mine.site.kept_columns(kept).indices]
    return {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}


def found(mine, tensors):
    return kept_units(mine, SiteTensors("PRUNED", mine.site, tensors)).tolist()


def name_of(mine, ending):
    return next(n for n in mine.tensors if n.endswith(ending))


@pytest.mark.parametrize("site", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_known_in_every_dtype(site, dtype, dense):
    mine = side(dense, site)
    assert found(mine, cut(mine, dtype=dtype)) == KEPT[site]


@pytest.mark.parametrize("site", KEPT)
@pytest.mark.parametrize("route", [torch.bfloat16, torch.float16])
def test_weights_may_have_gone_through_a_narrow_dtype(site, route, dense):
    mine = side(dense, site)
    narrow = cut(mine, dtype=route)
    assert found(mine, {name: tensor.float() for name, tensor in narrow.items()}) == KEPT[site]


@pytest.mark.parametrize("site", KEPT)
def test_consumers_and_their_biases_do_not_matter(site, dense):
    mine = side(dense, site)
    tensors = cut(mine)
    tensors[mine.site.weight] = torch.randn_like(tensors[mine.site.weight])
    del tensors[mine.site.bias]
    assert found(mine, tensors) == KEPT[site]


@pytest.mark.parametrize("site", KEPT)
def test_biases_that_one_side_lacks_are_not_asked_for(site, dense):
    mine = side(dense, site)
    tensors = {name: one for name, one in cut(mine).items() if name.endswith("weight")}
    assert found(mine, tensors) == KEPT[site]


@pytest.mark.parametrize("site", KEPT)
def test_the_order_of_units_does_not_matter(site, dense):
    mine = side(dense, site)
    order = torch.randperm(len(KEPT[site]))
    tensors = cut(mine)
    for rows in mine.site.producers:
        tensor = tensors[rows.tensor]
        shape = tensor.shape
        tensors[rows.tensor] = tensor.reshape(len(order), -1)[order].reshape(shape)
    assert found(mine, tensors) == KEPT[site]


def masked(mine, tensors, ending, unit):
    """Zeros where a unit's rows, or the columns that read it, were."""
    for name in (n for n in tensors if ending in n):
        if ending in mine.site.weight:
            width = mine.site.columns_per_unit
            tensors[name][..., unit * width : (unit + 1) * width] = 0
        else:
            per = len(tensors[name]) // mine.site.units
            tensors[name][unit * per : (unit + 1) * per] = 0


@pytest.mark.parametrize(
    ("site", "modules"),
    [
        ("attention", ["v_proj"]),
        ("attention", ["o_proj.weight"]),
        ("attention", ["q_proj", "k_proj", "v_proj", "o_proj.weight"]),
        ("mlp", ["gate_proj"]),
        ("mlp", ["up_proj"]),
        ("mlp", ["down_proj.weight"]),
        ("mlp", ["gate_proj", "up_proj"]),
    ],
)
def test_masked_units_are_gone(site, modules, dense):
    mine = side(dense, site)
    tensors = {name: one.clone() for name, one in mine.tensors.items()}
    for unit in (n for n in range(mine.site.units) if n not in KEPT[site]):
        for module in modules:
            masked(mine, tensors, module, unit)
    assert found(mine, tensors) == KEPT[site]


def test_rows_of_zeros_that_fill_up_a_width_are_no_units(dense):
    mine = side(dense, "mlp")
    tensors = cut(mine)
    for name, tensor in tensors.items():
        if name == mine.site.weight:
            tensors[name] = torch.cat([tensor, torch.zeros(len(tensor), 6)], dim=1)
        elif name != mine.site.bias:
            tensors[name] = torch.cat([tensor, torch.zeros(6, *tensor.shape[1:])])
    assert found(mine, tensors) == KEPT["mlp"]


def test_a_gate_with_a_bias_is_not_silent(dense):
    """Its rows are zero, and what it lets through is constant: no row of the dense model's."""
    mine = side(dense, "mlp")
    tensors = {name: one.clone() for name, one in mine.tensors.items()}
    tensors[name_of(mine, "gate_proj.weight")][3] = 0
    with pytest.raises(ModelError, match=r"rows 3 of .*gate_proj in 'PRUNED' are none"):
        found(mine, tensors)


@pytest.fixture
def repeated(dense):
    """Channels 4, 9 and 20 are one, and 30 is dead."""
    mine = side(dense, "mlp")
    tensors = {name: one.clone() for name, one in mine.tensors.items()}
    for rows in mine.site.producers:
        tensors[rows.tensor][[9, 20]] = tensors[rows.tensor][[4, 4]]
        tensors[rows.tensor][30] = 0
    tensors[mine.site.weight][:, 30] = 0
    return SiteTensors("DENSE", mine.site, tensors)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([2, 4, 9, 20, 35], [2, 4, 9, 20, 35]),
        ([2, 4, 20, 35], [2, 4, 9, 35]),
        ([12, 20, 35], [12, 20, 35]),
        ([2, 9, 12, 20, 35], [2, 4, 12, 20, 35]),
        ([2, 30, 35], [2, 30, 35]),
    ],
)
def test_of_equal_channels_those_that_keep_the_order_are_taken(units, expected, repeated):
    assert found(repeated, cut(repeated, units)) == expected


def test_masked_equal_channels_are_known_by_their_place(repeated):
    tensors = {name: one.clone() for name, one in repeated.tensors.items()}
    gone = [4, *range(9, 20)]
    for unit in gone:
        for module in ("gate_proj", "up_proj", "down_proj.weight"):
            masked(repeated, tensors, module, unit)
    assert found(repeated, tensors) == [n for n in range(40) if n not in gone]


def test_one_unit_twice(dense):
    mine = side(dense, "mlp")
    tensors = cut(mine)
    for rows in mine.site.producers:
        tensors[rows.tensor][7] = tensors[rows.tensor][3]
    match = (
        r"'PRUNED' has intermediate channel 8 of layers.1.mlp twice \(its 3 and 7\): which units "
        "were kept cannot be told"
    )
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_rows_that_were_trained_further(dense):
    mine = side(dense, "mlp")
    tensors = cut(mine)
    tensors[name_of(mine, "up_proj.weight")][[2, 5, 6, 11]] *= 1.01
    match = (
        r"rows 2, 5, 6 and 1 more of model.layers.1.mlp.up_proj in 'PRUNED' are none of the dense "
        r"model's \(row 2 is 0.01 of the nearest's length off that, row 5\): producers were "
        "changed, and which units were kept cannot be told"
    )
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_rows_of_zeros_among_others(dense):
    mine = side(dense, "attention")
    tensors = cut(mine)
    tensors[name_of(mine, "k_proj.weight")][2] = 0
    with pytest.raises(ModelError, match=r"rows 2 of .*k_proj in 'PRUNED' .*row 2 is 1 of the"):
        found(mine, tensors)


def test_units_put_together_of_several(dense):
    mine = side(dense, "mlp")
    tensors = cut(mine)
    name = name_of(mine, "gate_proj.weight")
    tensors[name][[0, 1]] = tensors[name][[1, 0]]
    match = (
        r"intermediate channel 0 of layers.1.mlp in 'PRUNED' is put together of rows of several "
        r"intermediate channels of the dense model, or of its rows in another order \(2 are\)"
    )
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_a_site_that_is_gone_altogether_is_said(name, dense):
    mine = side(dense, name)
    tensors = {key: one[:0] for key, one in mine.tensors.items()}
    tensors[mine.site.weight] = mine.tensors[mine.site.weight][:, :0]
    with pytest.raises(ModelError, match=f"'PRUNED' keeps no {mine.site.unit} in layers.1.{name}"):
        found(mine, tensors)


def test_a_tensor_of_another_kind_is_said(dense):
    mine = side(dense, "mlp")
    weight = name_of(mine, "gate_proj.weight")
    with pytest.raises(ModelError, match="hidden states of another width"):
        found(mine, {**mine.tensors, weight: mine.tensors[weight].flatten()})


def test_query_heads_in_another_order_within_their_group(dense):
    mine = side(dense, "attention")
    tensors = dict(mine.tensors)
    rows = torch.arange(32).reshape(8, 4)[[0, 1, 3, 2, 4, 5, 6, 7]].flatten()
    for ending in ("q_proj.weight", "q_proj.bias"):
        tensors[name_of(mine, ending)] = tensors[name_of(mine, ending)][rows]
    tensors[mine.site.weight] = tensors[mine.site.weight][:, rows]
    match = (
        "KV group 1 of layers.1.attention in 'PRUNED' is put together of rows of several KV groups "
        r"of the dense model, or of its rows in another order \(1 are\)"
    )
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_query_heads_that_went_alone(dense):
    """Heads 2 and 5 of eight, and every KV head is there."""
    mine = side(dense, "attention")
    tensors = dict(mine.tensors)
    rows = [row for row in range(32) if row // 4 not in (2, 5)]
    for ending in ("q_proj.weight", "q_proj.bias"):
        tensors[name_of(mine, ending)] = tensors[name_of(mine, ending)][rows]
    tensors[mine.site.weight] = tensors[mine.site.weight][:, rows]
    match = (
        r"model.layers.1.self_attn.q_proj in 'PRUNED' has 6 query heads for 4 KV heads \(of the "
        r"dense model's \[0, 1, 3, 4, 6, 7\]\): query heads were removed alone, and coec removes "
        "whole KV groups of 2 query heads"
    )
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_query_heads_that_are_masked_alone(dense):
    mine = side(dense, "attention")
    tensors = {name: one.clone() for name, one in mine.tensors.items()}
    tensors[mine.site.weight][:, 12:16] = 0
    match = r"'PRUNED' masks query heads \[3\] of layers.1.attention, and not all of KV group 1: "
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_a_query_head_that_nobody_read_before_is_none_that_was_masked(dense):
    mine = side(dense, "attention")
    quiet = dict(mine.tensors)
    quiet[mine.site.weight] = quiet[mine.site.weight].clone()
    quiet[mine.site.weight][:, 12:16] = 0
    mine = SiteTensors("DENSE", mine.site, quiet)
    assert found(mine, cut(mine, [1, 2])) == [1, 2]


def test_parts_of_heads(dense):
    mine = side(dense, "attention")
    tensors = cut(mine)
    for ending in ("k_proj.weight", "k_proj.bias"):
        tensors[name_of(mine, ending)] = tensors[name_of(mine, ending)][:-1]
    match = (
        "the modules of layers.1.attention in 'PRUNED' hold different numbers of KV groups .*"
        "k_proj 2.75"
    )
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_hidden_states_of_another_width(dense):
    mine = side(dense, "mlp")
    tensors = cut(mine)
    name = name_of(mine, "gate_proj.weight")
    tensors[name] = tensors[name][:, :24]
    match = r"gate_proj.weight is \(34, 24\) in 'PRUNED' and \(40, 32\) in the dense model: hidden"
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)


def test_a_tensor_that_is_not_there(dense):
    mine = side(dense, "mlp")
    tensors = cut(mine)
    del tensors[name_of(mine, "up_proj.weight")]
    with pytest.raises(ModelError, match="'PRUNED' lacks model.layers.1.mlp.up_proj.weight: it is"):
        found(mine, tensors)


def test_nothing_left(dense):
    mine = side(dense, "mlp")
    tensors = {name: torch.zeros_like(one) for name, one in mine.tensors.items()}
    with pytest.raises(ModelError, match="'PRUNED' keeps no intermediate channel in layers.1.mlp"):
        found(mine, tensors)


def test_the_dense_model_itself_has_every_unit(dense):
    for site in KEPT:
        mine = side(dense, site)
        assert found(mine, mine.tensors) == list(range(mine.site.units))
