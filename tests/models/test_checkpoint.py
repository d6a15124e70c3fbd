"""Checkpoints on disk: reading, checking, shards, and a folder that appears whole or not at all."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models as tm
from coec.errors import ModelError, OutputError
from coec.models import checkpoint as module
from coec.models.architectures import Shape
from coec.models.checkpoint import (
    INDEX,
    Checkpoint,
    ShardWriter,
    atomic_folder,
    check_output,
    check_space,
    find_model,
    parameter_shapes,
    read_config,
    skeleton,
)

SHAPES = {name: torch.Size([4, 8]) for name in "abcde"}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return tm.save(tm.tiny("llama", torch.float32), root / "model", tokenizer=False)


@pytest.fixture
def model(original, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(original, tmp_path / "model")


def expected(model):
    return parameter_shapes(skeleton(read_config(model)))


def rewrite(model, change):
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors")


def split(model):
    """The same weights in three shards with an index."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(weights)}
    for file_name in set(weight_map.values()):
        part = {name: weights[name] for name in weights if weight_map[name] == file_name}
        save_file(part, model / file_name)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weights


def test_shards_are_read_as_one_file_is(model):
    weights = split(model)
    checkpoint = Checkpoint.open(model)
    assert checkpoint.check(expected(model)) == torch.float32
    assert checkpoint.files.keys() == weights.keys()
    assert all(torch.equal(checkpoint.tensor(name), weights[name]) for name in weights)
    block = checkpoint.tensors("model.layers.1.")
    assert "mlp.down_proj.weight" in block
    assert len(block) == 9


@pytest.mark.parametrize("number", range(3))
def test_one_missing_shard_of_many_is_named(number, model):
    split(model)
    (model / f"model-{number}.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"shard 'model-{number}\.safetensors' is missing from"):
        Checkpoint.open(model)


@pytest.mark.parametrize("left", [0, 4, 200, -8])
def test_one_truncated_shard_of_many_is_named(left, model):
    split(model)
    path = model / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ModelError, match=r"'model-1\.safetensors' is truncated or damaged"):
        Checkpoint.open(model)


def test_a_pointer_instead_of_the_weights_is_damaged(model):
    """What a clone without large-file support leaves."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (model / "model.safetensors").write_text(pointer)
    with pytest.raises(ModelError, match="truncated or damaged.*download it again"):
        Checkpoint.open(model)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b'{"weight_map": 3}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": 1, "b": "x"}}',
        b'{"weight_map": {"a": []}}',
    ],
)
def test_an_index_that_is_none_is_named(content, model):
    (model / INDEX).write_bytes(content)
    with pytest.raises(ModelError, match=r"index\.json' is damaged"):
        Checkpoint.open(model)


def test_an_index_of_nothing_lacks_every_tensor(model):
    (model / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(ModelError, match="lacks 21 of 21 tensors"):
        Checkpoint.open(model).check(expected(model))


@pytest.mark.parametrize(
    ("dtypes", "widest"),
    [
        (("float32", "bfloat16"), "float32"),
        (("float64", "float32"), "float64"),
        (("float16", "bfloat16"), "bfloat16"),
    ],
)
@pytest.mark.parametrize("flip", [False, True])
def test_of_mixed_dtypes_the_widest_is_taken(dtypes, widest, flip, model):
    one, two = (getattr(torch, name) for name in (dtypes[::-1] if flip else dtypes))

    def change(weights):
        for name in weights:
            weights[name] = weights[name].to(two if "norm" in name else one)

    rewrite(model, change)
    assert Checkpoint.open(model).check(expected(model)) == getattr(torch, widest)


def test_tensors_that_the_model_does_not_store_are_let_pass(model):
    """Old Llamas hold rotary frequencies; they are neither checked nor counted."""

    def change(weights):
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((2,), torch.nan)
        weights["position_ids"] = torch.arange(4)

    rewrite(model, change)
    assert Checkpoint.open(model).check(expected(model)) == torch.float32


def test_a_tied_head_is_no_tensor_of_its_own():
    tied, untied = (parameter_shapes(skeleton(tm.raw_config(v))) for v in ("llama tied", "llama"))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_a_skeleton_takes_no_memory():
    model = skeleton(tm.raw_config("llama", vocab_size=10**9))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": "two"}, "no whole number: .*'two'"),
        ({"hidden_size": None}, "no whole number"),
        ({"num_hidden_layers": 0}, "below 1 .*0 layers"),
        ({"intermediate_size": 0}, "below 1 .*0 intermediate channels"),
        ({"num_attention_heads": 0}, "below 1 .*0 heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "no whole number: .*zero"),
        ({"num_key_value_heads": -4}, "below 1 .*-4 KV groups"),
    ],
)
def test_sizes_that_are_none_are_refused(changes, match):
    with pytest.raises(ModelError, match=match):
        Shape.of(tm.raw_config("llama", **changes))


def test_a_configuration_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json' cannot be read: Is a directory"):
        read_config(tmp_path)


def test_json_is_utf8_whatever_the_locale(tmp_path):
    code = """
import sys
from pathlib import Path
from coec.models.checkpoint import read_config, write_json
path = Path(sys.argv[1])
write_json(path, {"name": "na\\u00efve"})
assert read_config(path) == {"name": "na\\u00efve"}
"""
    path = tmp_path / "config.json"
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, path], env={**os.environ, **ascii_only}, check=True)
    assert path.read_bytes().decode() == '{\n  "name": "naïve"\n}\n'


def test_a_configuration_file_is_enough_only_without_weights(original):
    path = original / "config.json"
    assert find_model(path, weights=False) == path
    with pytest.raises(ModelError, match="no model at"):
        find_model(path)


def tensors(names, dtype=torch.float32):
    return {name: torch.full((4, 8), float(ord(name)), dtype=dtype) for name in names}


def test_a_shard_is_written_as_soon_as_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SHARD", 256)  # two tensors of 128 bytes
    writer = ShardWriter(tmp_path, SHAPES, torch.float32)
    seen = []
    for name in "cabed":
        writer.add(tensors(name))
        seen.append(len(list(tmp_path.iterdir())))
    assert seen == [0, 0, 1, 2, 3]
    writer.finish()
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"].keys() == SHAPES.keys()
    assert index["metadata"]["total_size"] == 5 * 128
    for name, file_name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file_name)[name], tensors(name)[name])


def test_one_shard_has_no_index(tmp_path):
    writer = ShardWriter(tmp_path, SHAPES, torch.float32)
    writer.add(tensors("abcde"))
    writer.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tensor_of_another_dtype_than_planned_is_never_written(dtype, tmp_path):
    writer = ShardWriter(tmp_path, SHAPES, torch.float32)
    with pytest.raises(AssertionError, match="a: planned"):
        writer.add(tensors("a", dtype))
    with pytest.raises(AssertionError, match="a: planned"):
        writer.add({"a": torch.zeros(8, 4)})


def test_a_checkpoint_with_a_hole_is_never_finished(tmp_path):
    writer = ShardWriter(tmp_path, SHAPES, torch.float32)
    writer.add(tensors("abce"))
    with pytest.raises(AssertionError, match="never written: .*'d'"):
        writer.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
def test_on_any_error_no_folder_and_no_parent_is_left(error, tmp_path):
    def write():
        with atomic_folder(tmp_path / "a/b/out") as temporary:
            (temporary / "config.json").write_text("{}")
            raise error("stop")

    with pytest.raises(OutputError if error is OSError else error, match="stop"):
        write()
    assert not list(tmp_path.iterdir())


def test_the_folder_appears_only_at_the_end(tmp_path):
    out = tmp_path / "a/out"
    with atomic_folder(out) as temporary:
        (temporary / "config.json").write_text("{}")
        assert not out.exists()
        assert temporary.parent == out.parent
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert [p.name for p in out.iterdir()] == ["config.json"]
    assert out.stat().st_mode & 0o777 == 0o755


def test_a_failed_exchange_puts_the_old_folder_back(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    real = module.Path.rename

    def rename(self, target):
        if ".partial-" in self.name:
            raise OSError("no")
        return real(self, target)

    monkeypatch.setattr(module.Path, "rename", rename)
    with pytest.raises(OutputError, match="could not write"), atomic_folder(out) as temporary:
        (temporary / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["mkdir", "mkdtemp"])
def test_a_place_that_may_not_be_written_is_an_error_of_the_output(name, tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    owner = module.Path if name == "mkdir" else module.tempfile
    monkeypatch.setattr(owner, name, denied)
    with (
        pytest.raises(OutputError, match="could not write .*Permission denied"),
        atomic_folder(tmp_path / "new/out"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_an_output_that_leads_into_the_model_by_a_link_is_refused(model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    for out in (tmp_path / "link", tmp_path / "link/out"):
        with pytest.raises(OutputError, match="lie inside each other"):
            check_output(out, model, force=True)


def test_an_empty_folder_may_be_filled_and_a_model_replaced(model, original, tmp_path):
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", original, force=False)
    check_output(tmp_path / "not/yet/there", original, force=False)
    check_output(model, original, force=True)
    with pytest.raises(OutputError, match="pass force=True"):
        check_output(model, original, force=False)


def test_an_output_below_a_file_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is not a folder"):
        check_output(tmp_path / "file/out", model, force=False)


def test_space_is_asked_of_the_disk_that_will_hold_the_output(tmp_path, monkeypatch):
    asked = []
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(path):
        asked.append(path)
        return usage._replace(free=10**9)

    monkeypatch.setattr(module.shutil, "disk_usage", disk_usage)
    check_space(tmp_path / "a/b", 10**9)
    with pytest.raises(OutputError, match=r"2\.00 GB needed, 1\.00 GB free"):
        check_space(tmp_path / "a/b", 2 * 10**9)
    assert asked == [tmp_path, tmp_path]
