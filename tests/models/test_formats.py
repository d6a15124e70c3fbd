"""Which stock format holds a pruned model, decided from its configuration."""

import json
from dataclasses import replace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import ModelError, OptionError
from coec.models import formats
from coec.models.architectures import ARCHITECTURES, packaged
from coec.models.description import Description
from coec.models.folder import read_config
from coec.models.formats import LOADERS, TARGETS, YES, Traits, choose_format, slides
from coec.models.layout import QUANTISED_COLUMNS, Shape, split_over
from coec.models.non_uniform import NAS
from coec.planning.plan import Plan
from paper_models import LLAMA_70B


def chosen(variant, kv_heads=3, bias=False, **changes):
    config = tm.raw_config(variant, **changes)
    pruned = replace(Shape.of(config), kv_heads=kv_heads, ffn=28)
    biased = frozenset({"attention", "mlp"}) if bias else frozenset()
    return choose_format(config, pruned, ARCHITECTURES[config["model_type"]], biased=biased)


@pytest.mark.parametrize(
    ("variant", "kv_heads", "bias", "stored"),
    [
        ("llama", 4, False, "llama"),
        ("llama", 2, False, "llama"),
        ("llama", 3, False, "mistral"),
        ("llama", 2, True, "llama"),
        ("llama", 3, True, "granite"),
        ("llama biases", 3, False, "granite"),
        ("mistral", 3, False, "mistral"),
        ("mistral sliding", 3, False, "mistral"),
        ("mistral", 2, True, "llama"),
        ("mistral", 3, True, "granite"),
        ("qwen2", 3, False, "qwen2"),
        ("qwen2", 3, True, "seed_oss"),
        ("qwen3", 3, False, "qwen3"),
        ("granite", 3, True, "granite"),
        ("seed_oss", 3, True, "seed_oss"),
    ],
)
def test_the_format_is_the_first_that_holds_the_model(variant, kv_heads, bias, stored):
    bias = bias or variant == "llama biases"
    output = chosen(variant, kv_heads, bias)
    config = output.config
    assert output.model_type == stored
    assert (output.relabelled is not None) == (stored != tm.VARIANTS[variant]["model_type"])
    assert config["head_dim"] == 4
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"] == 2 * kv_heads
    assert config["intermediate_size"] == 28


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_the_head_size_is_written_where_it_was_implied(variant):
    """Fewer heads on the same hidden size would imply another."""
    config = tm.raw_config(variant)
    del config["head_dim"]
    plan = Plan.of(Description.of(config), Recipe(preset="paper"))
    assert plan.output.config["head_dim"] == 4
    assert plan.pruned_shapes["model.layers.0.self_attn.q_proj.weight"] == (24, 32)


NEUTRAL = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)


@pytest.mark.parametrize(
    ("bias", "added"),
    [
        (False, {"architectures": ["MistralForCausalLM"], "sliding_window": None}),
        (True, {"attention_multiplier": 4**-0.5, **NEUTRAL}),
    ],
)
def test_a_llama_under_another_type_has_no_window_and_neutral_multipliers(bias, added):
    config = chosen("llama", bias=bias).config
    assert {key: config[key] for key in added} == added


def test_what_no_format_holds_is_refused_with_every_reason():
    with pytest.raises(OptionError, match="not qwen3: it has no bias on down_proj"):
        chosen("qwen3", bias=True)
    with pytest.raises(OptionError, match="not llama: .*; not granite: it has no sliding window"):
        chosen("mistral sliding", bias=True)


def test_a_format_that_transformers_refuses_is_passed_over(monkeypatch):
    """The class is asked too: a new rule there means the next candidate, not a late failure."""
    real = formats.AutoConfig.for_model

    def fussy(**config):
        if config["model_type"] == "llama":
            raise ValueError("Validation:\nno such llama today")
        return real(**config)

    monkeypatch.setattr(formats.AutoConfig, "for_model", fussy)
    output = chosen("llama", kv_heads=2)
    assert output.model_type == "mistral"
    assert output.relabelled == "not llama: no such llama today"


def test_loaders_that_ignore_the_head_size_are_named():
    assert "head_dim" in chosen("qwen2").loads_in["vLLM"]
    assert chosen("qwen2").loads_in["llama.cpp"].startswith("by coec export")
    assert chosen("qwen2", kv_heads=4).loads_in["vLLM"] == "yes"
    assert "without a word" in chosen("llama", kv_heads=2, bias=True).loads_in["SGLang"]


def test_a_window_is_right_in_llama_cpp_no_further_than_it_reaches():
    assert chosen("mistral sliding").loads_in["llama.cpp"].startswith("up to the sliding window")
    assert chosen("mistral").loads_in["llama.cpp"] == "yes"
    # A window as long as the longest text, and layers none of which has one, are none.
    wide = chosen("mistral sliding", sliding_window=64)
    assert wide.loads_in["llama.cpp"] == "yes"
    assert not slides(tm.raw_config("qwen2 mixed", max_window_layers=2))
    assert slides(tm.raw_config("qwen2 mixed"))


def test_every_finding_names_a_loader_and_types_that_there_are():
    for loader in LOADERS.values():
        for tried in (loader, *loader.exceptions):
            assert set(tried.types or ()) <= {*CONFIG_MAPPING_NAMES, NAS}
    named = {case.when for loader in LOADERS.values() for case in loader.exceptions}
    described = packaged("loaders.toml")["conditions"]
    assert named - {None} == described.keys() == formats._CONDITIONS.keys()
    assert set(TARGETS.values()) <= set(LOADERS)


def test_of_a_type_that_nobody_tried_nothing_is_known():
    shape = Shape.of(tm.raw_config("llama"))

    def verdict(name, model_type):
        return LOADERS[name].verdict(Traits(model_type, {}, shape, frozenset()))

    for name in LOADERS:
        assert verdict(name, "llama") == YES
        assert verdict(name, "brand_new") == (YES if name == "transformers" else "not known")
    assert verdict("vLLM", "mixtral") == YES
    assert verdict("SGLang", "mixtral") == "not known"
    assert verdict("OpenVINO", "qwen3_moe") == "not known"


def test_biases_are_planned_only_where_something_goes():
    recipe = Recipe(sparsity=0.1, compensation="bias")
    plan = Plan.of(Description.of(tm.raw_config("llama")), recipe)
    assert "model.layers.0.mlp.down_proj.bias" in plan.pruned_shapes
    one = Description.of(tm.raw_config("llama", intermediate_size=1))
    wide = Plan.of(one, Recipe(preset="paper", compensation="bias"))
    assert "model.layers.0.mlp.down_proj.bias" not in wide.pruned_shapes


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ModelError, match="8 query heads do not divide into 3 KV groups"):
        Shape.of(tm.raw_config("llama", num_key_value_heads=3))
    config = tm.raw_config("llama")
    del config["num_key_value_heads"], config["head_dim"]
    assert (Shape.of(config).kv_heads, Shape.of(config).head_dim) == (8, 4)  # old Llamas


def test_a_plan_from_a_folder_reads_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    plan = coec.plan(tmp_path, preset="paper")
    assert read_config(tmp_path) == LLAMA_70B
    assert plan.output.model_type == "mistral"  # 48 heads do not divide 8192
    assert plan.seq_len == 2048


@pytest.mark.parametrize(
    ("changes", "gpus", "narrow"),
    [
        ({}, [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),  # groups are repeated on 16
        ({"kv_heads": 7, "ffn": 11_648}, [1, 7, 14], [1, 7]),
        ({"kv_heads": 6, "ffn": 10_112}, [1, 2], [1]),  # 10,112 / 2 is no multiple of 128
        ({"expert_ffn": 12, "experts": 4}, [1, 2, 4], []),
        ({"kv_heads": 7, "ffn": 11_647}, [1], []),
        ({"by_block": ((("ffn", 14_336),), (("ffn", 14_338),)) * 16}, [1, 2], []),
    ],
)
def test_gpus_over_which_every_layer_is_divided(changes, gpus, narrow):
    """The rules of vLLM: query heads and channels evenly, KV groups evenly or evenly repeated."""
    shape = replace(Shape(32, 4096, 128, 8, 4, 14_336), **changes)
    assert shape.gpus() == gpus
    assert shape.gpus(columns=QUANTISED_COLUMNS) == narrow
    said = split_over({"gpus": gpus, "gpus_int4": narrow})
    several = f"over {', '.join(map(str, gpus))} GPUs; "
    assert said.startswith(several if len(gpus) > 1 else "on one GPU alone; ")
    assert said.endswith("not at all") == (not narrow)
