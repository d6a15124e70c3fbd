"""Shards are written as soon as they are complete, and hold what was planned."""

import json

import pytest
import torch
from safetensors.torch import load_file

from coec.models import shards as module
from coec.models.dense import INDEX
from coec.models.shards import ShardWriter

SHAPES = {name: torch.Size([4, 8]) for name in "abcde"}


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


def test_files_have_the_mode_of_any_new_file(tmp_path):
    writer = ShardWriter(tmp_path, SHAPES, torch.float32)
    writer.add(tensors("abcde"))
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}
