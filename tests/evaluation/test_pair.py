"""A pruned folder and its dense model: what belongs together, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec.errors import ModelError
from coec.evaluation.pair import ModelPair
from outcomes import one_line


@pytest.fixture
def pruned(pruned_folder, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(pruned_folder, tmp_path / "pruned")


def test_a_pair_knows_sizes_and_units(dense, pruned_folder):
    pair = ModelPair.open(dense, pruned_folder)
    assert (pair.dense.shape.ffn, pair.pruned.shape.ffn) == (40, 28)
    assert (pair.dense.positions, pair.dense.vocabulary) == (tm.POSITIONS, tm.VOCABULARY)
    stored = load_file(pruned_folder / "coec/kept.safetensors")
    for site, size in zip(pair.dense.layout.blocks[1].sites, (4, 40), strict=True):
        units = pair.units[site.key]
        assert units.size == size
        assert torch.equal(units.indices, stored[f"layers.1.{site.name}"])


def test_the_report_names_the_dense_model(dense, pruned, monkeypatch):
    with pytest.raises(ModelError, match="was made from 'model', which is no folder here or bes"):
        ModelPair.open(None, pruned)
    beside = shutil.copytree(dense, pruned.parent / "model")
    assert ModelPair.open(None, pruned).dense.folder == beside
    shutil.rmtree(beside)
    report = json.loads((pruned / "coec.json").read_text())
    for name in ("org/model", "/nowhere/model"):
        (pruned / "coec.json").write_text(json.dumps(report | {"model": name}))
        with pytest.raises(ModelError, match=f"was made from '{name}', which is no folder here or"):
            ModelPair.open(None, pruned)
    twin = shutil.copytree(pruned, pruned.parent / "twins" / "model")  # of the dense one's name
    (twin / "coec.json").write_text(json.dumps(report))
    with pytest.raises(ModelError, match="was made from 'model', which is no folder here or bes"):
        ModelPair.open(None, twin)
    monkeypatch.chdir(dense.parent)
    (pruned / "coec.json").write_text(json.dumps(report | {"model": dense.name}))
    assert ModelPair.open(None, pruned).dense.shape.ffn == 40


@pytest.mark.parametrize("name", ["coec/kept.safetensors", "coec.json"])
def test_a_folder_that_coec_did_not_write(name, dense, pruned):
    (pruned / name).unlink()
    with pytest.raises(ModelError, match=f"no {name} in .* PRUNED must be a folder that `coec"):
        ModelPair.open(dense, pruned)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vocab_size": 310}, "vocabulary 310 in DENSE, 300 in PRUNED"),
        ({"num_hidden_layers": 3}, "blocks that stay 3 in DENSE, 2 in PRUNED"),
        ({"hidden_size": 48}, "hidden size 48 in DENSE, 32 in PRUNED"),
        ({"head_dim": 6}, "head size 6 in DENSE, 4 in PRUNED"),
        ({"num_key_value_heads": 8}, "query heads per KV group 1 in DENSE, 2 in PRUNED"),
        ({"intermediate_size": 20}, r"mlp in .*kept.safetensors' does not fit the dense model"),
    ],
)
def test_models_of_other_sizes_do_not_belong_together(changes, match, pruned, tmp_path):
    other = tm.save(tm.tiny("llama", torch.float32, **changes), tmp_path / "other")
    with one_line(ModelError, match=match):
        ModelPair.open(other, pruned)


def moved(dense, folder, name):
    """A model with other weights at one place."""

    def change(weights):
        return {n: weight + 0.1 if name in n else weight for n, weight in weights.items()}

    return tm.edit_weights(shutil.copytree(dense, folder), change)


@pytest.mark.parametrize("name", ["mlp.up_proj", "self_attn.v_proj"])
def test_another_model_of_the_same_sizes_is_refused(name, dense, pruned, tmp_path):
    other = moved(dense, tmp_path / "other", f"layers.0.{name}")
    with pytest.raises(ModelError, match=f"was not pruned from .*{name}.* keeps are others"):
        ModelPair.open(other, pruned)


def test_a_trained_model_is_kin_by_the_record_of_the_dense_one(dense, trained_folder):
    pair = ModelPair.open(dense, trained_folder)
    assert pair.trained
    assert not any(pair.reads_the_same(site) for site in pair.dense.layout.sites)


@pytest.mark.parametrize("name", ["q_proj", "embed_tokens"])
def test_another_model_is_no_kin_of_a_trained_one(name, dense, trained_folder, tmp_path):
    other = moved(dense, tmp_path / "other", name)
    with pytest.raises(ModelError, match="was not pruned from .*its weights are others"):
        ModelPair.open(other, trained_folder)


@pytest.mark.parametrize(
    ("units", "match"),
    [
        (torch.arange(27), r"layers.1.mlp .* keeps 27 units, the pruned model has 2"),
        (torch.zeros(28, dtype=torch.int64), "does not fit the dense .*sorted and distinct"),
        (None, r"lacks layers.1.mlp: it is of another model"),
    ],
)
def test_kept_units_of_another_run_are_refused(units, match, dense, pruned):
    path = pruned / "coec/kept.safetensors"
    stored = load_file(path) | {"layers.1.mlp": units}
    save_file({key: value for key, value in stored.items() if value is not None}, path)
    with pytest.raises(ModelError, match=match):
        ModelPair.open(dense, pruned)


def test_missing_and_damaged_files_are_refused(dense, pruned):
    (pruned / "coec/kept.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="'kept.safetensors' is truncated or damaged"):
        ModelPair.open(dense, pruned)
    (pruned / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors weights in"):
        ModelPair.open(dense, pruned)


@pytest.mark.parametrize("variant", ["llama", "llama biases", "qwen2"])
def test_a_format_with_more_biases_is_no_other_model(variant, tokens, tmp_path):
    """Whoever needs one bias may get a format that has others too, which are zero."""
    dense = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    coec.prune(dense, tmp_path / "out", calibration=tokens, samples=8, seq_len=32,
               compensation="bias", preset="paper")  # fmt: skip
    assert ModelPair.open(dense, tmp_path / "out").pruned.shape.ffn == 28
