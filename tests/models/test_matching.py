"""Which units a checkpoint of another program has: told from rows, or refused with what is odd."""

import pytest
import torch

import tiny_models as tm
from coec.errors import ModelError
from coec.models.dense import Dense
from coec.models.matching import SiteTensors, kept_units
from coec.types import KeptSet

NARROW = (torch.bfloat16, torch.float16)
KEPT = {"attention": [0, 2, 3], "mlp": [1, 2, 5, *range(8, 39)]}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Heads of four, two to a KV group; biases, so that units own rows of these too."""
    folder = tm.save(tm.tiny("llama biases", torch.float32), tmp_path_factory.mktemp("m") / "dense")
    return Dense.open(folder)


@pytest.fixture
def mine(dense, site):
    """The dense model's tensors of a site, by its name."""
    return side(dense, site)


def side(dense, name):
    site = next(site for site in dense.layout.blocks[1].sites if site.name == name)
    tensors = {n: dense.tensor(n).clone() for n in site.tensors if n in dense.files}
    return SiteTensors("DENSE", site, tensors)


def cut(mine, units=None, dtype=torch.float32):
    """The tensors with some units alone, as another program would have cut them."""
    kept = KeptSet(torch.tensor(units or KEPT[mine.site.name]), mine.site.units)
    tensors = dict(mine.tensors)
    for rows in mine.site.producers:
        tensors[rows.tensor] = tensors[rows.tensor][rows.of(kept)]
    tensors[mine.site.weight] = tensors[mine.site.weight][:, mine.site.kept_columns(kept).indices]
    return {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}


def copied(mine):
    return {name: tensor.clone() for name, tensor in mine.tensors.items()}


def found(mine, tensors):
    return kept_units(mine, SiteTensors("PRUNED", mine.site, tensors)).tolist()


def name_of(mine, ending):
    return next(n for n in mine.tensors if n.endswith(ending))


def with_other_consumers(mine):
    tensors = cut(mine)
    tensors[mine.site.weight] = torch.randn_like(tensors[mine.site.weight])
    del tensors[mine.site.bias]
    return tensors


def in_another_order(mine):
    tensors, order = cut(mine), torch.randperm(len(KEPT[mine.site.name]))
    for rows in mine.site.producers:
        tensor = tensors[rows.tensor]
        tensors[rows.tensor] = tensor.reshape(len(order), -1)[order].reshape(tensor.shape)
    return tensors


CUTS = {
    "float32": cut,
    **{str(d): lambda mine, d=d: cut(mine, dtype=d) for d in (torch.float64, *NARROW)},
    **{
        f"through {d}": lambda mine, d=d: {n: t.float() for n, t in cut(mine, dtype=d).items()}
        for d in NARROW
    },
    "other consumers": with_other_consumers,
    "no biases": lambda mine: {n: t for n, t in cut(mine).items() if n.endswith("weight")},
    "another order": in_another_order,
}


@pytest.mark.parametrize("site", KEPT)
@pytest.mark.parametrize("change", CUTS)
def test_units_are_known_by_their_rows(site, change, mine):
    """In every dtype and order, whatever became of the consumers; biases may be missing."""
    assert found(mine, CUTS[change](mine)) == KEPT[site]


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
def test_masked_units_are_gone(site, modules, mine):
    tensors = copied(mine)
    for unit in (n for n in range(mine.site.units) if n not in KEPT[site]):
        for module in modules:
            masked(mine, tensors, module, unit)
    assert found(mine, tensors) == KEPT[site]


@pytest.mark.parametrize("site", ["mlp"])
def test_rows_of_zeros_that_fill_up_a_width_are_no_units(site, mine):
    tensors = cut(mine)
    for name, tensor in tensors.items():
        if name == mine.site.weight:
            tensors[name] = torch.cat([tensor, torch.zeros(len(tensor), 6)], dim=1)
        elif name != mine.site.bias:
            tensors[name] = torch.cat([tensor, torch.zeros(6, *tensor.shape[1:])])
    assert found(mine, tensors) == KEPT[site]


@pytest.mark.parametrize("site", KEPT)
def test_the_dense_model_itself_has_every_unit(site, mine):
    assert found(mine, mine.tensors) == list(range(mine.site.units))


@pytest.fixture
def repeated(dense):
    """Channels 4, 9 and 20 are one, and 30 is dead."""
    mine = side(dense, "mlp")
    for rows in mine.site.producers:
        mine.tensors[rows.tensor][[9, 20]] = mine.tensors[rows.tensor][[4, 4]]
        mine.tensors[rows.tensor][30] = 0
    mine.tensors[mine.site.weight][:, 30] = 0
    return mine


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
    tensors, gone = copied(repeated), [4, *range(9, 20)]
    for unit in gone:
        for module in ("gate_proj", "up_proj", "down_proj.weight"):
            masked(repeated, tensors, module, unit)
    assert found(repeated, tensors) == [n for n in range(40) if n not in gone]


@pytest.mark.parametrize("site", ["attention"])
def test_a_query_head_that_nobody_read_before_is_none_that_was_masked(site, mine):
    mine.tensors[mine.site.weight][:, 12:16] = 0
    assert found(mine, cut(mine, [1, 2])) == [1, 2]


def one_unit_twice(mine, tensors):
    for rows in mine.site.producers:
        tensors[rows.tensor][7] = tensors[rows.tensor][3]


def query_rows(rows):
    """A change of the rows of query heads and of the columns that read them."""

    def change(mine, tensors):
        for ending in ("q_proj.weight", "q_proj.bias"):
            tensors[name_of(mine, ending)] = tensors[name_of(mine, ending)][rows]
        tensors[mine.site.weight] = tensors[mine.site.weight][:, rows]

    return change


def rows_changed(ending, change):
    """A change of one tensor in place."""
    return lambda mine, tensors: change(tensors[name_of(mine, ending)])


def replaced(ending, change):
    """A change of one tensor that gives another."""

    def call(mine, tensors):
        name = name_of(mine, ending)
        tensors[name] = change(tensors[name])

    return call


def part_of_a_head(mine, tensors):
    for ending in ("k_proj.weight", "k_proj.bias"):
        replaced(ending, lambda tensor: tensor[:-1])(mine, tensors)


def gone_altogether(mine, tensors):
    weight = tensors[mine.site.weight][:, :0]
    tensors |= {name: tensor[:0] for name, tensor in tensors.items()}
    tensors[mine.site.weight] = weight


def all_zeros(mine, tensors):
    for tensor in tensors.values():
        tensor.zero_()


def swap_rows(tensor):
    tensor[[0, 1]] = tensor[[1, 0]]


def scale_rows(tensor):
    tensor[[2, 5, 6, 11]] *= 1.01


UNKNOWN = "which units were kept cannot be told"
SEVERAL = "is put together of rows of several"
OTHER_ORDER = "of the dense model, or of its rows in another order"
REFUSED = {
    "one unit twice": (
        "mlp", cut, one_unit_twice,
        rf"'PRUNED' has intermediate channel 8 of layers.1.mlp twice \(its 3 and 7\): {UNKNOWN}",
    ),
    "rows that were trained further": (
        "mlp", cut, rows_changed("up_proj.weight", scale_rows),
        r"rows 2, 5, 6 and 1 more of model.layers.1.mlp.up_proj in 'PRUNED' are none of the dense "
        r"model's \(row 2 is 0.01 of the nearest's length off that, row 5\): producers were "
        f"changed, and {UNKNOWN}",
    ),
    "rows of zeros among others": (
        "attention", cut, rows_changed("k_proj.weight", lambda tensor: tensor[2].zero_()),
        r"rows 2 of .*k_proj in 'PRUNED' .*row 2 is 1 of the",
    ),
    # Its rows are zero, and what it lets through is constant: no row of the dense model's.
    "a gate with a bias is not silent": (
        "mlp", copied, rows_changed("gate_proj.weight", lambda tensor: tensor[3].zero_()),
        r"rows 3 of .*gate_proj in 'PRUNED' are none",
    ),
    "units put together of several": (
        "mlp", cut, rows_changed("gate_proj.weight", swap_rows),
        rf"intermediate channel 0 of layers.1.mlp in 'PRUNED' {SEVERAL} intermediate channels "
        rf"{OTHER_ORDER} \(2 are\)",
    ),
    "query heads in another order within their group": (
        "attention", copied,
        query_rows(torch.arange(32).reshape(8, 4)[[0, 1, 3, 2, 4, 5, 6, 7]].flatten()),
        rf"KV group 1 of layers.1.attention in 'PRUNED' {SEVERAL} KV groups {OTHER_ORDER} "
        r"\(1 are\)",
    ),
    # Heads 2 and 5 of eight, and every KV head is there.
    "query heads that went alone": (
        "attention", copied, query_rows([row for row in range(32) if row // 4 not in (2, 5)]),
        r"model.layers.1.self_attn.q_proj in 'PRUNED' has 6 query heads for 4 KV heads \(of the "
        r"dense model's \[0, 1, 3, 4, 6, 7\]\): query heads were removed alone, and units are "
        "matched as whole KV groups of 2 query heads",
    ),
    "query heads that are masked alone": (
        "attention", copied, rows_changed("o_proj.weight", lambda tensor: tensor[:, 12:16].zero_()),
        r"'PRUNED' masks query heads \[3\] of layers.1.attention, and not all of KV group 1: ",
    ),
    "parts of heads": (
        "attention", cut, part_of_a_head,
        "the modules of layers.1.attention in 'PRUNED' hold different numbers of KV groups .*"
        "k_proj 2.75",
    ),
    "hidden states of another width": (
        "mlp", cut, replaced("gate_proj.weight", lambda tensor: tensor[:, :24]),
        r"gate_proj.weight is \(34, 24\) in 'PRUNED' and \(40, 32\) in the dense model: hidden",
    ),
    "a tensor of another kind": (
        "mlp", copied, replaced("gate_proj.weight", torch.flatten), "hidden states of another width"
    ),
    "a tensor that is not there": (
        "mlp", cut, lambda mine, tensors: tensors.pop(name_of(mine, "up_proj.weight")),
        "'PRUNED' lacks model.layers.1.mlp.up_proj.weight: it is",
    ),
    **{
        f"{site} that is gone altogether": (
            site, copied, gone_altogether, f"'PRUNED' keeps no {unit} in layers.1.{site}"
        )
        for site, unit in (("attention", "KV group"), ("mlp", "intermediate channel"))
    },
    "nothing left": (
        "mlp", copied, all_zeros, "'PRUNED' keeps no intermediate channel in layers.1.mlp"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_tells_no_units_is_refused(case, dense):
    site, pruned, change, match = REFUSED[case]
    mine = side(dense, site)
    tensors = pruned(mine)
    change(mine, tensors)
    with pytest.raises(ModelError, match=match):
        found(mine, tensors)
