"""How many units stay: by kind of site, rounded to what others divide widths by."""

import pytest

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import OptionError
from coec.methods.selection import kept_count
from coec.models.description import Description
from coec.models.layout import QUANTISED_COLUMNS
from coec.planning.plan import Plan
from paper_models import LLAMA_8B, LLAMA_70B, QWEN_7B


def plan(config=None, **settings):
    recipe = Recipe(**{"preset": "paper", **settings})
    return Plan.of(Description.of(config or tm.raw_config()), recipe)


def widths(config=None, **settings):
    made = plan(config, **settings)
    return made.pruned.ffn, made.pruned.kv_heads


@pytest.mark.parametrize(
    ("config", "align", "ffn"),
    [
        (LLAMA_8B, 1, 10036),
        (LLAMA_8B, "8", 10040),
        (LLAMA_8B, 256, 10240),
        (LLAMA_8B, "auto", 10240),  # 256 adds 2.03 %
        (LLAMA_70B, "auto", 20224),
        (QWEN_7B, "auto", 13312),
        (LLAMA_8B, 10**5, 14336),
    ],
)
def test_channels_are_rounded_up_and_groups_stay(config, align, ffn):
    kept, groups = widths(config, sparsity=0.3, multiple_of=align)
    assert kept == ffn
    assert groups == widths(config, sparsity=0.3)[1]


@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("units", ["groups", "heads"])
@pytest.mark.parametrize("align", [100, "auto"])
@pytest.mark.parametrize("sparsity", [0.05, 0.3])
def test_so_many_gpus_divide_what_stays(gpus, units, align, sparsity):
    settings = {"sparsity": sparsity, "multiple_of": align, "attention_units": units}
    if units == "heads" and gpus in (3, 7):  # the KV groups stay, of which there are eight
        with pytest.raises(OptionError, match="tensor_parallel"):
            plan(LLAMA_8B, **settings, tensor_parallel=gpus)
        return
    found = plan(LLAMA_8B, **settings, tensor_parallel=gpus)
    assert gpus in found.pruned.gpus()
    kept = kept_count(14_336, sparsity)
    assert found.pruned.ffn >= min(kept, 14_336 - gpus)
    if align == "auto":
        assert found.pruned.ffn <= 1.03 * kept
        if sparsity == 0.3 and gpus in (2, 4, 8):
            assert gpus in found.pruned.gpus(columns=QUANTISED_COLUMNS)


@pytest.mark.parametrize(
    ("size", "bytes_"), [("14GB", 14e9), ("13.5 gib", 13.5 * 2**30), ("15000mb", 15e9)]
)
def test_a_budget_of_memory_holds_weights_and_keys_and_values(size, bytes_):
    settings = {"budget": size, "context": 10_000, "attention_sparsity": 0, "multiple_of": 1}
    cache = 2 * 32 * 8 * 128 * 10_000
    found = plan(LLAMA_8B, **settings)
    assert 0.999 * bytes_ < 2 * (found.parameters_after + cache) <= bytes_
    narrow = plan(LLAMA_8B, **settings, dtype="float32")  # as it is written
    assert 0.999 * bytes_ < 4 * (narrow.parameters_after + cache) <= bytes_


@pytest.mark.parametrize("more", [{}, {"tensor_parallel": 1, "compensation": "bias"}])
@pytest.mark.parametrize("budget", ["20GB", "30GB"])
def test_a_budget_of_memory_has_room_for_the_keys_and_values_of_groups_that_stay(budget, more):
    """Weights of 16 GB, and 17 GB of keys and values for 131,072 tokens."""
    settings = {"preset": "paper", "context": 131_072, "multiple_of": 1}
    found = plan(LLAMA_8B, budget=budget, attention_units="groups", **settings, **more)
    cache = 2 * 32 * found.pruned.kv_heads * 128 * 131_072
    used = 2 * (found.parameters_after + cache) / (float(budget[:2]) * 1e9)
    assert found.pruned.kv_heads < 8
    # One fraction of both: the next group would be 2.5 GB more
    assert used <= 1 < used + 2.5 / float(budget[:2])


def test_a_budget_that_cannot_be_met_names_the_share_of_the_vocabulary():
    with pytest.raises(OptionError, match=r"embedding and head, which stay, are 13% of"):
        plan(LLAMA_8B, budget=0.1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sparsity", "kept"),
    [
        (32, 8, 0.3, (8, 3)),  # six groups: on 2 GPUs, and no longer on 4 or 8
        (8, 4, 0.3, (3, 2)),  # of two heads in a group none would go
        (9, 3, 0.3, (3, 3)),  # neither goes
        (9, 3, 0.34, (3, 2)),
        (8, 8, 0.5, (4, 1)),  # one head in each group
        (8, 4, 0, (4, 2)),
    ],
)
def test_what_attention_loses_may_be_left_to_the_model(heads, kv_heads, sparsity, kept):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = tm.raw_config("mistral", **sizes)
    found = plan(config, attention_units="auto", attention_sparsity=sparsity)
    assert (found.pruned.kv_heads, found.pruned.group) == kept
    assert bool(found.model.layout.kinds[0].groups) == (kept[1] < heads // kv_heads)


def test_query_heads_stay_alike_in_every_group():
    found = plan(LLAMA_8B, sparsity=0.3, attention_units="heads")
    assert (found.pruned.kv_heads, found.pruned.group) == (8, 3)
    assert found.record()["widths"]["query_heads"] == {"before": 32, "after": 24}
    few = plan(LLAMA_8B, sparsity=0.2, attention_units="heads")
    assert "nothing is removed at attention" in str(few.notes)
    kept = {"layers.0.attention": [0, 1, 2]}  # two of the first group, one of the second
    with pytest.raises(OptionError, match="query heads of a KV group"):
        plan(tm.raw_config(), attention_units="heads", kept=kept)
    alone = tm.raw_config(num_key_value_heads=8)
    with pytest.raises(OptionError, match="attention_units"):
        plan(alone, attention_units="heads")


def test_automatic_alignment_gives_way_where_it_would_add_too_much():
    small = tm.raw_config(intermediate_size=100)
    # 96, the next multiple of 32, is a third more.
    assert widths(small, multiple_of="auto")[0] == 70
    assert widths(small, multiple_of=32)[0] == 96


def test_a_multiple_that_keeps_everything_is_noted():
    [note] = plan(tm.raw_config(), sparsity=0.3, multiple_of=40).notes
    assert "nothing is removed at mlp" in note
    assert "multiple_of" in note


def test_each_kind_of_site_can_have_a_fraction_of_its_own():
    assert widths(sparsity=0.5) == (20, 2)
    assert widths(sparsity=0.5, attention_sparsity=0.25) == (20, 3)
    assert widths(sparsity=0.5, attention_sparsity=0) == (20, 4)
    assert widths(preset="fast", sparsity=0.5) == (20, 4)
    assert widths(preset="fast", sparsity=0.5, attention_sparsity=0.5) == (20, 2)


def test_a_pruned_model_has_the_planned_widths(dense, tokens, tmp_path):
    report = coec.prune(
        dense, tmp_path / "out", sparsity=0.5, attention_sparsity=0, multiple_of=8, samples=4,
        seq_len=32, calibration=tokens, preset="paper",
    )  # fmt: skip
    loaded = tm.load(tmp_path / "out")
    assert loaded.config.intermediate_size == 24
    assert loaded.config.num_key_value_heads == 4
    assert (report.recipe["multiple_of"], report.recipe["attention_sparsity"]) == ("8", 0)
    assert report.plan["removed"]["attention"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_sparsity": 0, "multiple_of": 64}, "nothing is removed"),
        ({"sparsity": 1e-6}, "nothing is removed"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        plan(**settings)


def test_a_width_that_quantisers_do_not_divide_is_noted():
    note, _ = plan(LLAMA_8B, sparsity=0.3, multiple_of=1).notes
    assert "10,036 columns" in note
    note, rounded, _ = plan(LLAMA_8B, sparsity=0.3, multiple_of=32).notes
    assert "10,036 intermediate channels are rounded up to 10,048" in rounded
    assert "K-quants" in note
    # 204 more channels of 32 blocks, 4,096 rows and two producers
    rounded, _ = plan(LLAMA_8B, sparsity=0.3, multiple_of=256).notes
    assert "80.2" in rounded
    for variant in ("llama", "glm4_moe"):  # whose shared experts go by the routed ones' multiple
        notes = plan(tm.raw_config(variant), preset="fast").notes
        assert not [note for note in notes if "multiple_of" in note]
