"""Models that configurations allow and few people make keep the same promises."""

import pytest
import torch
from promises import (
    check_that_a_written_checkpoint_is_the_masked_model,
    check_that_streamed_statistics_are_those_of_the_whole_model,
)

import coec
import tiny_models as tm
from prunings import CONTRACT

pytestmark = pytest.mark.unchecked  # whole models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return {
        name: tm.save(tm.tiny(variant, **changes), root / name, tokenizer=False)
        for name, (variant, changes) in tm.UNUSUAL.items()
    }


@pytest.mark.parametrize("name", tm.UNUSUAL)
@pytest.mark.parametrize("compensation", ["rcpu", "bias"])
def test_a_written_checkpoint_computes_the_masked_dense_model(
    name, compensation, models, tokens, tmp_path
):
    settings = {**CONTRACT, "calibration": tokens, "compensation": compensation}
    variant, changes = tm.UNUSUAL[name]
    if compensation == "bias" and (variant == "qwen3" or "sliding_window" in changes):
        with pytest.raises(coec.CoecError, match="no stock format"):
            coec.prune(models[name], tmp_path / "out", **settings)
        return
    coec.prune(models[name], tmp_path / "out", **settings)
    check_that_a_written_checkpoint_is_the_masked_model(models[name], tmp_path / "out")


@pytest.mark.parametrize("name", tm.UNUSUAL)
def test_streamed_statistics_are_those_of_the_whole_model(name, models):
    check_that_streamed_statistics_are_those_of_the_whole_model(models[name])


def test_sizes_that_old_configurations_leave_out_are_inferred(tokens, tmp_path):
    """As Llama 1: no head size, and a group for every head."""
    model = tm.tiny("llama", num_key_value_heads=8)
    dense = tm.save(model, tmp_path / "dense", tokenizer=False)
    tm.edit_config(dense, "head_dim", "num_key_value_heads")
    settings = {**CONTRACT, "calibration": tokens, "compensation": "rcpu"}
    report = coec.prune(dense, tmp_path / "out", **settings)
    assert report.plan["widths"]["kv_groups"] == {"before": 8, "after": 6}
    check_that_a_written_checkpoint_is_the_masked_model(dense, tmp_path / "out")


@pytest.mark.parametrize("sparsity", [0.025, 0.25, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("compensation", ["least-squares", "coec"])
def test_every_sparsity_gives_a_model(sparsity, compensation, tokens, tmp_path):
    dense = tm.save(tm.tiny("llama"), tmp_path / "dense", tokenizer=False)
    settings = {**CONTRACT, "sparsity": sparsity, "compensation": compensation}
    report = coec.prune(dense, tmp_path / "out", calibration=tokens, **settings)
    assert report.plan["widths"]["mlp"]["after"] == max(1, 40 - int(sparsity * 40))
    assert report.plan["widths"]["kv_groups"]["after"] == max(1, 4 - int(sparsity * 4))
    check_that_a_written_checkpoint_is_the_masked_model(dense, tmp_path / "out")


@pytest.mark.slow
def test_a_trained_model_computes_its_masked_self(shared, tmp_path):
    dense = tm.readable(shared / "models/stories260K", tmp_path / "dense")
    text = str(shared / "data/tinystories/train.txt")
    settings = {"preset": "paper", "calibration": text, "samples": 8, "seq_len": 128}
    ids = torch.randint(3, 512, (2, 64))
    for compensation in ("coec", "bias", "rcpu"):
        out = tmp_path / compensation
        coec.prune(dense, out, compensation=compensation, **settings)
        check_that_a_written_checkpoint_is_the_masked_model(dense, out, ids, rtol=1e-4, atol=1e-4)
    assert tm.load(tmp_path / "bias").config.model_type == "granite"
