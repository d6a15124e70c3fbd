"""Costs from configurations: the paper's rows, and a model counted by hand."""

import json

import pytest

import coec
import tiny_models as tm
from coec.errors import OptionError
from paper_models import LLAMA_70B, QWEN_7B


@pytest.fixture
def saved(tmp_path):
    def save(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return path

    return save


@pytest.mark.parametrize(
    ("config", "parameters", "shown", "gib"),
    [
        (QWEN_7B, (7_615_616_512, 5_699_162_112), ("15.2", "11.4"), (14.2, 10.6)),
        (LLAMA_70B, (70_553_706_496, 50_623_553_536), ("141.1", "101.2"), (131.4, 94.3)),
    ],
)
def test_the_rows_of_the_paper(config, parameters, shown, gib, saved):
    """Its Mem column (15.0, 11.5; 132.5, 95.7) was measured: the weights alone are less."""
    found = coec.efficiency(saved(config), sparsity=0.3, dtype="bfloat16")
    both = found.dense, found.pruned
    assert tuple(one.parameters for one in both) == parameters
    assert tuple(f"{one.gflops_per_token:.1f}" for one in both) == shown
    assert tuple(round(one.weight_bytes / 2**30, 1) for one in both) == gib
    assert [one.weight_bytes for one in both] == [2 * count for count in parameters]


def test_the_cache_holds_keys_and_values_of_the_kept_groups(saved):
    found = coec.efficiency(saved({**LLAMA_70B, "dtype": "bfloat16"}))
    assert found.dense.kv_cache_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert found.pruned.kv_cache_bytes_per_token == 80 * 2 * 6 * 128 * 2
    assert found.as_dict()["ratio"]["kv_cache_bytes_per_token"] == 0.75


@pytest.mark.parametrize("variant", ["llama", "llama tied", "qwen2", "granite"])
def test_parameters_are_those_of_the_models(variant, saved):
    config = saved(tm.raw_config(variant))
    found = coec.efficiency(config, sparsity=0.5)
    assert found.dense.parameters == sum(p.numel() for p in tm.tiny(variant).parameters())
    smaller = tm.tiny(variant, num_key_value_heads=2, num_attention_heads=4, intermediate_size=20)
    assert found.pruned.parameters == sum(p.numel() for p in smaller.parameters())
    assert found.as_dict()["ratio"]["parameters"] == (
        found.pruned.parameters / found.dense.parameters
    )


def test_a_pruned_folder_is_compared_with_its_own_dtype(dense, pruned_folder):
    found = coec.efficiency(dense, pruned_folder)
    assert found == coec.efficiency(dense, sparsity=0.3)
    assert found.dense.dtype == "float32"
    half = coec.efficiency(dense, pruned_folder, dtype="float16")
    assert half.pruned.weight_bytes * 2 == found.pruned.weight_bytes
    assert half.pruned.dtype == "float16"


def test_what_cannot_be_counted_is_refused(dense):
    with pytest.raises(OptionError, match="a pruned model or a sparsity, not both"):
        coec.efficiency(dense, dense, sparsity=0.3)
    with pytest.raises(OptionError, match="dtype must be one of float64"):
        coec.efficiency(dense, dtype="int8")
    with pytest.raises(OptionError, match="strictly between 0 and 1, got 30"):
        coec.efficiency(dense, sparsity=30)
