"""Compensating what another program pruned: what is inferred, and that the rest is a pruning."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.errors import ModelError, OptionError, OutputError
from coec.models.dense import Dense
from coec.models.matching import RawCheckpoint
from coec.planning.kept import KEPT, KeptUnits, infer_kept

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32}
HOW = {**SETTINGS, "compensation": "ridge-to-slice"}


def foreign(dense, out, tokens, **settings):
    """What another program may leave: rows and columns cut, and no word of ours beside them."""
    how = {**SETTINGS, "calibration": tokens, "selection": "random", "compensation": "none"}
    coec.prune(dense, out, **{**how, **settings})
    kept = load_file(out / KEPT)
    shutil.rmtree(out / "coec")
    (out / "coec.json").unlink()
    return {key: value.tolist() for key, value in kept.items()}


@pytest.fixture(scope="module")
def cut(dense, tokens, tmp_path_factory):
    """A folder of another program, and the units that it keeps."""
    folder = tmp_path_factory.mktemp("foreign") / "cut"
    return folder, foreign(dense, folder, tokens)


def units(kept):
    return {key: value.tolist() for key, value in kept.units.items()}


def changed(folder, out, change):
    """A copy of a folder whose tensors were changed."""
    return tm.edit_weights(shutil.copytree(folder, out), change)


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_units_are_found_in_every_architecture_and_whatever_it_is_stored_as(
    variant, tokens, tmp_path
):
    dense = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    known = foreign(dense, tmp_path / "cut", tokens)
    assert units(infer_kept(dense, tmp_path / "cut")) == known


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_and_in_every_dtype(dtype, dense, tokens, tmp_path):
    known = foreign(dense, tmp_path / "cut", tokens, dtype=dtype)
    assert units(infer_kept(dense, tmp_path / "cut")) == known


@pytest.mark.parametrize("settings", [{}, {"reconstruct": 1, "propagate": True}])
def test_the_result_is_that_of_a_pruning_with_these_units(settings, dense, cut, tokens, tmp_path):
    folder, known = cut
    how = {**HOW, **settings, "calibration": tokens}
    report = coec.prune(dense, tmp_path / "one", kept=folder, **how)
    coec.prune(dense, tmp_path / "two", kept=known, **how)
    for name in ("model.safetensors", "config.json", KEPT):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert report.recipe["kept"] == str(folder)
    assert report.plan["kept"] == {
        "source": str(folder), "sha256": KeptUnits.of(known).digest, "sites": 4,
        "inferred_from": RawCheckpoint.open(folder, Dense.open(dense)).digest,
    }  # fmt: skip


def test_another_checkpoint_of_the_same_units_has_another_digest(dense, cut, tmp_path):
    def rescaled(tensors):
        tensors["model.norm.weight"] *= 2

    other = changed(cut[0], tmp_path / "other", rescaled)
    first, second = infer_kept(dense, cut[0]), infer_kept(dense, other)
    assert first.digest == second.digest
    assert first.inferred_from != second.inferred_from


def test_shapes_may_differ_from_the_configuration(dense, cut, tmp_path):
    """Nothing is computed with the other model, and what it says of itself may be wrong."""
    folder, known = cut
    tm.edit_config(shutil.copytree(folder, tmp_path / "odd"), intermediate_size=40)
    assert units(infer_kept(dense, tmp_path / "odd")) == known


def masked(tensors):
    """Two channels of the first block, one of the second."""
    for block, gone in ((0, [3, 7]), (1, [5])):
        tensors[f"model.layers.{block}.mlp.down_proj.weight"][:, gone] = 0


def test_widths_that_differ_by_block_are_refused_by_the_plan(dense, tokens, tmp_path):
    folder = changed(dense, tmp_path / "masked", masked)
    kept = infer_kept(dense, folder)
    assert [len(kept.units[f"layers.{block}.mlp"]) for block in (0, 1)] == [38, 39]
    with pytest.raises(OptionError, match="mlp.* differ by block"):
        coec.prune(dense, tmp_path / "out", kept=folder, calibration=tokens, **HOW)
    assert not list(tmp_path.glob("out*"))
    report = coec.prune(
        dense, tmp_path / "out", kept=folder, calibration=tokens, by_block=True, **HOW
    )
    assert report.plan["widths"]["mlp"]["after"] == [38, 39]


def test_the_dense_model_itself_has_nothing_to_compensate(dense, tokens, tmp_path):
    with pytest.raises(OptionError, match="nothing is removed"):
        coec.prune(dense, tmp_path / "out", kept=dense, calibration=tokens, **HOW)


def test_a_model_that_was_trained_further_is_refused(dense, cut, tokens, tmp_path):
    def trained(tensors):
        for name in tensors:
            tensors[name] = tensors[name] * 1.001

    folder = changed(cut[0], tmp_path / "trained", trained)
    with pytest.raises(ModelError, match="q_proj"):
        coec.prune(dense, tmp_path / "out", kept=folder, calibration=tokens, **HOW)
    assert not list(tmp_path.glob("out*"))


def replaced(name, change):
    """A change of one tensor of the first block."""
    name = f"model.layers.0.{name}.weight"
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("llama", replaced("mlp.up_proj", lambda weight: weight.to(torch.int8)),
         "up_proj.*I8"),
        ("olmo2", replaced("self_attn.k_proj", lambda weight: weight[:12]),
         "k_proj"),
        ("phi3", replaced("mlp.gate_up_proj", lambda weight: weight[:55]),
         "gate_up_proj"),
    ],
    ids=["quantised", "attention left whole", "projections in one matrix"],
)  # fmt: skip
def test_tensors_that_coec_does_not_prune_like_that(kind, change, match, tokens, tmp_path):
    dense = tm.save(tm.tiny(kind, torch.float32), tmp_path / "dense")
    foreign(dense, tmp_path / "cut", tokens)
    odd = changed(tmp_path / "cut", tmp_path / "odd", change)
    with pytest.raises(ModelError, match=match):
        infer_kept(dense, odd)


def test_a_model_of_another_kind(dense, cut, tmp_path):
    shutil.copytree(cut[0], tmp_path / "odd")
    (tmp_path / "odd/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="gpt2"):
        infer_kept(dense, tmp_path / "odd")


def test_settings_and_the_folder_are_checked_before_a_weight_is_read(
    dense, cut, tmp_path, monkeypatch
):
    monkeypatch.setattr(KeptUnits, "named", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("")
    with pytest.raises(OutputError, match="out"):
        coec.prune(dense, tmp_path / "out", kept=cut[0])
    with pytest.raises(OptionError, match="alpa"):
        coec.prune(dense, tmp_path / "free", kept=cut[0], alpa=1, preset="paper")


def test_blocks_and_query_heads_that_are_gone_are_found(tokens, tmp_path):
    settings = {"preset": "fast", "calibration": tokens, "samples": 8, "seq_len": 32, "bos": "off"}
    dense = tm.save(tm.tiny("llama", torch.float32, num_hidden_layers=4), tmp_path / "dense")
    known = foreign(dense, tmp_path / "fewer", tokens, preset="fast", drop_blocks=1)
    found = infer_kept(dense, tmp_path / "fewer")
    assert units(found) == known
    assert len(found.dropped) == 1
    coec.prune(dense, tmp_path / "one", kept=tmp_path / "fewer", **settings)
    assert tm.load(tmp_path / "one").config.num_hidden_layers == 3
    known = foreign(dense, tmp_path / "heads", tokens, attention_units="heads", sparsity=0.5)
    found = infer_kept(dense, tmp_path / "heads")
    assert (units(found), found.attention_units) == (known, "heads")


def test_a_plan_matches_weights_too(dense, cut, tmp_path, run):
    plan = coec.plan(dense, kept=cut[0], **HOW)
    assert plan.pruned.ffn == 28
    how = ["--preset", "paper", "--samples", 24, "--seq-len", 32]
    status, shown, _ = run("prune", dense, "--dry-run", "--json", "--kept", cut[0], *how)
    record = json.loads(shown)
    assert (status, record["widths"]["mlp"]["after"], record["kept"]["sites"]) == (0, 28, 4)
