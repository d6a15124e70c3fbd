"""Compensating what another program pruned: what is inferred, and that the rest is a pruning."""

import json
import shutil

import pytest
import torch
from coec.pipeline import compensate as compensating
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import ModelError, OptionError, OutputError
from coec.models.matching import RawCheckpoint
from coec.planning.kept import KEPT, KeptUnits
from outcomes import check_refused, succeeded

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
    assert units(coec.infer_kept(dense, tmp_path / "cut")) == known


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_and_in_every_dtype(dtype, dense, tokens, tmp_path):
    known = foreign(dense, tmp_path / "cut", tokens, dtype=dtype)
    assert units(coec.infer_kept(dense, tmp_path / "cut")) == known


@pytest.mark.parametrize("settings", [{}, {"reconstruct": 1, "propagate": True}])
def test_the_result_is_that_of_a_pruning_with_these_units(settings, dense, cut, tokens, tmp_path):
    folder, known = cut
    how = {**HOW, **settings, "calibration": tokens}
    seen = []
    report = coec.compensate_pruned(
        dense, folder, tmp_path / "one", progress=lambda *told: seen.append(told), **how
    )
    coec.prune(dense, tmp_path / "two", kept=known, **how)
    for name in ("model.safetensors", "config.json", KEPT):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert report.recipe["kept"] == str(folder)
    assert report.plan["kept"] == {
        "source": str(folder), "sha256": KeptUnits.of(known).digest, "sites": 4,
        "inferred_from": RawCheckpoint.open(folder).digest,
    }  # fmt: skip
    assert seen[:2] == [("matching", 1, 2), ("matching", 2, 2)]


def test_a_recipe_and_statistics_do_as_well(dense, cut, tokens, tmp_path):
    folder, known = cut
    statistics = coec.collect(dense, tmp_path / "stats", calibration=tokens, **SETTINGS)
    recipe = Recipe(preset="paper", compensation="ridge-to-slice")
    coec.compensate_pruned(dense, folder, tmp_path / "one", recipe, statistics=statistics)
    coec.prune(dense, tmp_path / "two", kept=known, calibration=tokens, **HOW)
    assert tm.same_weights(tmp_path / "one", tmp_path / "two")


def test_another_checkpoint_of_the_same_units_has_another_digest(dense, cut, tmp_path):
    def rescaled(tensors):
        tensors["model.norm.weight"] *= 2

    other = changed(cut[0], tmp_path / "other", rescaled)
    first, second = coec.infer_kept(dense, cut[0]), coec.infer_kept(dense, other)
    assert first.digest == second.digest
    assert first.inferred_from != second.inferred_from


def test_shapes_may_differ_from_the_configuration(dense, cut, tmp_path):
    """Nothing is computed with the other model, and what it says of itself may be wrong."""
    folder, known = cut
    tm.edit_config(shutil.copytree(folder, tmp_path / "odd"), intermediate_size=40)
    assert units(coec.infer_kept(dense, tmp_path / "odd")) == known


def masked(tensors):
    """Two channels of the first block, one of the second."""
    for block, gone in ((0, [3, 7]), (1, [5])):
        tensors[f"model.layers.{block}.mlp.down_proj.weight"][:, gone] = 0


def test_widths_that_differ_by_block_are_refused_by_the_plan(dense, tokens, tmp_path):
    folder = changed(dense, tmp_path / "masked", masked)
    kept = coec.infer_kept(dense, folder)
    assert [len(kept.units[f"layers.{block}.mlp"]) for block in (0, 1)] == [38, 39]
    with pytest.raises(
        OptionError, match=r"the widths of mlp in .* differ by block \(38 to 39\), "
    ):
        coec.compensate_pruned(dense, folder, tmp_path / "out", calibration=tokens, **HOW)
    assert not list(tmp_path.glob("out*"))
    report = coec.compensate_pruned(
        dense, folder, tmp_path / "out", calibration=tokens, by_block=True, **HOW
    )
    assert report.plan["widths"]["mlp"]["after"] == [38, 39]


def test_the_dense_model_itself_has_nothing_to_compensate(dense, tokens, tmp_path):
    with pytest.raises(OptionError, match="keeps every unit of the sites that it names: nothing"):
        coec.compensate_pruned(dense, dense, tmp_path / "out", calibration=tokens, **HOW)


def test_a_model_that_was_trained_further_is_refused(dense, cut, tokens, tmp_path):
    def trained(tensors):
        for name in tensors:
            tensors[name] = tensors[name] * 1.001

    folder = changed(cut[0], tmp_path / "trained", trained)
    with pytest.raises(ModelError, match="rows 0, 1, 2 and 21 more of .*layers.0.self_attn.q_proj"):
        coec.compensate_pruned(dense, folder, tmp_path / "out", calibration=tokens, **HOW)
    assert not list(tmp_path.glob("out*"))


def fewer_blocks(tensors):
    return {name: one for name, one in tensors.items() if ".layers.1." not in name}


def replaced(name, change):
    """A change of one tensor of the first block."""
    name = f"model.layers.0.{name}.weight"
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("llama", fewer_blocks, "'.*odd' has 1 blocks, '.*dense' 2: which blocks went"),
        ("llama", replaced("mlp.up_proj", lambda weight: weight.to(torch.int8)),
         "up_proj.weight in 'model.safetensors' of .* is I8: the"),
        ("olmo2", replaced("self_attn.k_proj", lambda weight: weight[:12]),
         r"k_proj.* is \(12, 32\).*: coec removes nothing there"),
        ("phi3", replaced("mlp.gate_up_proj", lambda weight: weight[:55]),
         "gate_up_proj.* hold different shares of intermediate"),
    ],
    ids=["fewer blocks", "quantised", "attention left whole", "projections in one matrix"],
)  # fmt: skip
def test_tensors_that_coec_does_not_prune_like_that(kind, change, match, tokens, tmp_path):
    dense = tm.save(tm.tiny(kind, torch.float32), tmp_path / "dense")
    foreign(dense, tmp_path / "cut", tokens)
    odd = changed(tmp_path / "cut", tmp_path / "odd", change)
    with pytest.raises(ModelError, match=match):
        coec.infer_kept(dense, odd)


def test_a_model_of_another_kind(dense, cut, tmp_path):
    shutil.copytree(cut[0], tmp_path / "odd")
    (tmp_path / "odd/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="model type 'gpt2' is not supported"):
        coec.infer_kept(dense, tmp_path / "odd")


@pytest.mark.parametrize("name", ["sparsity", "selection", "kept"])
def test_who_stays_is_said_by_the_pruned_model_alone(name, dense, cut, tmp_path):
    value = {"sparsity": 0.2, "selection": "flap", "kept": {"layers.0.mlp": [0]}}[name]
    with pytest.raises(OptionError, match=f"^{name} has no place where '.*cut' says which units"):
        coec.compensate_pruned(dense, cut[0], tmp_path / "out", **{name: value})


def test_a_recipe_that_names_units(dense, cut, tmp_path):
    recipe = Recipe(kept={"layers.0.mlp": [0]})
    with pytest.raises(OptionError, match="the recipe names kept units, and so does the pruned"):
        coec.compensate_pruned(dense, cut[0], tmp_path / "out", recipe)


def test_settings_and_the_folder_are_checked_before_a_weight_is_read(
    dense, cut, tmp_path, monkeypatch
):
    monkeypatch.setattr("coec.pipeline.compensate.infer_kept", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("")
    with pytest.raises(OutputError, match="out"):
        coec.compensate_pruned(dense, cut[0], tmp_path / "out")
    with pytest.raises(OptionError, match="unknown setting 'alpa'"):
        coec.compensate_pruned(dense, cut[0], tmp_path / "free", alpa=1, preset="paper")


def test_the_command(dense, cut, tokens, tmp_path, run):
    out = tmp_path / "out"
    how = ["--calibration", tokens, "--samples", 24, "--seq-len", 32]
    how += ["--preset", "paper", "--rounds", 1]
    status, shown, _ = run("compensate", dense, cut[0], "--dry-run", *how, "--json")
    plan = json.loads(shown)
    assert (status, plan["widths"]["mlp"]["after"], plan["kept"]["sites"]) == (0, 28, 4)
    assert not out.exists()
    shown, heard = succeeded(run("compensate", dense, cut[0], out, *how))
    assert f"wrote {out}" in shown
    assert f"every site keeps the units of '{cut[0]}'" in shown
    assert "solving: 2 of 2" in heard
    assert tm.load(out).config.intermediate_size == 28
    assert run("compensate", dense, cut[0], out, *how)[0] == 1


@pytest.mark.parametrize("flag", ["--sparsity", "--selection", "--kept"])
def test_the_command_has_no_flags_for_what_stays(flag, dense, cut, tmp_path, run):
    command = ("compensate", dense, cut[0], tmp_path / "out")
    status, _, heard = run(*command, flag, "0.3")
    assert status == 2
    assert f"No such option: {flag}" in heard
    (tmp_path / "recipe.toml").write_text(f'{flag[2:]} = "flap"\n')
    for more in ([], ["--dry-run"]):
        answer = run(*command, "--config", tmp_path / "recipe.toml", *more)
        check_refused(answer, f"{flag[2:]} has no place where")


def test_the_command_needs_somewhere_to_write(dense, cut, run):
    status, _, heard = run("compensate", dense, cut[0])
    assert status == 2
    assert "OUT is missing" in heard


def test_a_setting_that_cannot_be_is_said_before_weights_are_read(dense, cut, run, monkeypatch):
    monkeypatch.setattr(compensating, "infer_kept", None)
    answer = run("compensate", dense, cut[0], "--dry-run", "--samples", "0")
    check_refused(answer, "samples must be a whole number of at least 1")
