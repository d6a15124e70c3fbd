"""What a run writes, on tiny random models."""

import glob
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec.checkpoint import checkpoint as writing
from coec.errors import OptionError, OutputError
from coec.models import dense as dense_module
from coec.models import description
from coec.models.dense import Dense
from coec.types import SiteResult
from prunings import content, prunes

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32}


prune = prunes(**SETTINGS)


def weights(folder):
    checkpoint = Dense.open(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.files}


def test_the_same_run_writes_the_same_bytes(prune, text, tmp_path):
    for out in ("one", "two"):
        prune(out, calibration=text, seed=3, samples=20)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_another_seed_draws_other_windows(prune, text):
    few = {"calibration": text, "samples": 20, "compensation": "none"}
    one, two = (prune(f"s{seed}", seed=seed, **few) for seed in (0, 1))
    assert one.calibration["windows_sha256"] != two.calibration["windows_sha256"]


def test_a_site_that_keeps_everything_is_not_changed_and_said(dense, prune, tmp_path):
    """4 KV groups lose none at 10 %, and the account says so, of parameters too."""
    report = prune(sparsity=0.1)
    before, after = weights(dense), weights(tmp_path / "out")
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert sum("self_attn" in name for name in same) == 8
    assert not any("mlp" in name for name in same)
    assert report.plan["removed"] == {
        "attention": 0,
        "mlp": 0.1,
        "parameters": pytest.approx(0.0231, rel=0.01),
    }
    said = "Nothing is removed at attention: 0.1 of 4 KV groups is less than one"
    assert report.plan["notes"][:-1] == [said[0].lower() + said[1:]]
    card = (tmp_path / "out/README.md").read_text()
    assert said in card
    assert "# model, 2.3% of parameters removed" in card


@pytest.mark.parametrize(("sparsity", "least"), [(1e-6, 0.025), (0.003, 0.025), (0.0249, 0.025)])
def test_a_sparsity_that_removes_nothing_is_refused(sparsity, least, dense):
    with pytest.raises(OptionError, match="nothing is removed: .* raise sparsity"):
        coec.plan(dense, sparsity=sparsity, multiple_of=1)
    assert coec.plan(dense, sparsity=least, multiple_of=1).pruned.ffn == 39


MEMORY = """
import sys, coec
from pathlib import Path
from coec.planning.memory import memory
settings = {"preset": "paper", "calibration": sys.argv[2], "samples": 96, "seq_len": 32}
plan = coec.plan(sys.argv[1], **settings)
planned = max(sum(moment.host.values()) for moment in memory(plan))
coec.prune(sys.argv[1], sys.argv[3], **settings)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
print(planned, peak)  # not ru_maxrss: a child inherits it
"""


@pytest.mark.slow
def test_the_plan_names_the_memory_that_a_run_takes(dense, tmp_path):
    """Of small models most is the program itself; measurements of others are in docs/FORMATS.md."""
    text = tm.text_file(tmp_path / "text.txt", 200_000)
    command = [sys.executable, "-c", MEMORY, dense, text, tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    planned, peak = map(float, shown.stdout.split())
    assert 0.75 < planned / peak < 1.3


@pytest.mark.parametrize("shard", ["2GB", "20KB"])
def test_servers_find_the_weights_and_nothing_else(shard, prune, tmp_path, monkeypatch):
    """Without an index vLLM and SGLang read every safetensors file of the folder as weights."""
    monkeypatch.setattr(writing, "MAX_SHARD", shard)
    prune(compensation="none")
    files = glob.glob(str(tmp_path / "out" / "*.safetensors"))
    assert (len(files) > 1) == (shard == "20KB")
    found = [name for file in files for name in load_file(file)]
    assert sorted(found) == sorted(tm.load(tmp_path / "out").state_dict())
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    (tmp_path / "plain").write_text("")
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_a_second_run_into_the_same_folder_is_refused_at_once(prune, tmp_path):
    """The first one's result is not lost to it."""
    from coec.checkpoint.journal import journal

    with journal(tmp_path / "out", {}) as done:
        (done.new / "config.json").write_text("first")
        with pytest.raises(OutputError, match="another run is writing"):
            prune(force=True)
        done.complete()
    assert (tmp_path / "out/config.json").read_text() == "first"


def test_what_is_not_compensated_keeps_its_values(dense, prune, tmp_path):
    prune()
    before, after = weights(dense), weights(tmp_path / "out")
    kept = load_file(tmp_path / "out/coec/kept.safetensors")["layers.0.mlp"]
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(before[gate][kept], after[gate])


def test_the_record_holds_everything_needed_to_repeat_the_run(prune, text, tmp_path):
    report = prune(calibration=text, samples=9, seq_len=16, seed=5, kappa=7)
    assert coec.Report.read(str(tmp_path / "out")).as_dict() == report.as_dict()
    record = json.loads((tmp_path / "out/coec.json").read_text())
    assert record["coec"] == coec.__version__
    recipe = record["recipe"]
    assert recipe["options"]["kappa"] == 7
    assert recipe["options"]["alpha"] == 0.9
    assert (recipe["seed"], recipe["samples"], recipe["seq_len"]) == (5, 9, 16)
    assert record["environment"]["torch"] == torch.__version__
    assert len(record["calibration"]["text_sha256"]) == 64
    assert record["calibration"]["special_tokens"] == 0
    assert record["plan"]["widths"]["mlp"] == {"before": 40, "after": 28}
    assert len(record["sites"]) == 4
    for site in record["sites"]:
        assert 0 <= site["error_after"] < site["error_before"] < 1
        assert site["rounds"] == len(site["errors_per_round"]) - 2 == len(site["right_iterations"])
        assert site["gcv_lambda"] > 0
        assert site["reason"]
        assert site["right_reason"]
        assert site["seconds"] > 0
    assert set(record["seconds"]) == {"before blocks", "blocks"}


def test_the_card_has_the_recipe_and_loading_lines_of_a_relabelled_model(prune, tmp_path):
    prune(compensation="rcpu")
    card = (tmp_path / "out/README.md").read_text()
    for line in ("compensation: rcpu", "% of parameters removed",
                 "AutoModelForCausalLM.from_pretrained",
                 "stored as `mistral` (not llama: hidden size 32 is not a multiple of 6 heads)",
                 "- transformers: ", "- vLLM: ", "- SGLang: ", "- llama.cpp: "):  # fmt: skip
        assert line in card


def test_kept_units_are_those_of_highest_score(dense, prune, tmp_path):
    prune(selection="magnitude")
    kept = load_file(tmp_path / "out/coec/kept.safetensors")["layers.1.mlp"]
    scores = weights(dense)["model.layers.1.mlp.down_proj.weight"].norm(dim=0)
    assert kept.tolist() == scores.topk(28).indices.sort().values.tolist()


def test_a_selection_of_the_user_is_told_how_many_stay(prune, tmp_path):
    told = set()

    def outer(weight, gram, *, units, keep):
        told.add((weight.shape[1], units, keep))
        return torch.arange(weight.shape[1]).to(weight)

    prune(compensation="none", selection=outer)
    assert told == {(8, 4, 3), (40, 40, 28), (32, 4, 3)}
    kept = load_file(tmp_path / "out/coec/kept.safetensors")
    assert kept["layers.1.attention"].tolist() == [1, 2, 3]


def test_the_plan_foretells_the_result(dense, prune, tmp_path):
    plan = coec.plan(dense, sparsity=0.5, preset="paper")
    report = prune(sparsity=0.5, compensation="none")
    shapes = {name: tensor.shape for name, tensor in weights(tmp_path / "out").items()}
    assert shapes == plan.pruned_shapes
    assert report.plan["parameters"]["after"] == plan.parameters_after


def test_tied_embeddings_stay_tied(prune, tmp_path):
    tied = tm.save(tm.tiny("llama tied", torch.float32), tmp_path / "dense")
    prune(model=tied)
    loaded = tm.load(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(tmp_path / "out")


@pytest.mark.parametrize("compensation", ["none", "bias"])
def test_a_pruned_model_can_be_pruned_again(compensation, prune, tmp_path):
    """Its type is one that we write: mistral or granite for a llama of uneven heads."""
    prune("one", compensation=compensation)
    prune("two", model=tmp_path / "one", compensation=compensation)
    loaded = tm.load(tmp_path / "two")
    assert loaded.config.num_key_value_heads == 3  # 70 % of 3, rounded up
    assert loaded.config.intermediate_size == 20
    assert torch.isfinite(tm.logits(loaded)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_kept_unless_asked(dtype, prune, tmp_path):
    stored = tm.save(tm.tiny("llama", torch.bfloat16), tmp_path / "dense")
    kept = prune("kept", model=stored, compensation="none")
    asked = prune("asked", model=stored, compensation="none", dtype=dtype)
    assert kept.recipe["dtype"] == "bfloat16"
    assert asked.recipe["dtype"] == dtype
    assert {t.dtype for t in weights(tmp_path / "kept").values()} == {torch.bfloat16}
    assert {t.dtype for t in weights(tmp_path / "asked").values()} == {getattr(torch, dtype)}
    assert tm.load(tmp_path / "asked").dtype == getattr(torch, dtype)


def test_both_names_of_the_dtype_are_kept_true(dense, prune, tmp_path):
    copy = shutil.copytree(dense, tmp_path / "dense")
    tm.edit_config(copy, dtype="float32", torch_dtype="float32")
    prune(model=copy, compensation="none", dtype="bfloat16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"


def test_many_shards_are_written_and_read(prune, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MAX_SHARD", "20KB")
    prune("many", compensation="none")
    monkeypatch.undo()
    prune("one", compensation="none")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    assert torch.equal(tm.logits(tm.load(tmp_path / "many")), tm.logits(tm.load(tmp_path / "one")))
    again = prune("again", model=tmp_path / "many")
    assert again.plan["widths"]["mlp"]["before"] == 28


def test_force_replaces_a_model_and_leaves_nothing_of_it(prune, tmp_path):
    out = tmp_path / "out"
    prune(compensation="none")
    (out / "NOTICE").write_text("old")
    prune(compensation="none", force=True)
    assert not (out / "NOTICE").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_functions_of_the_user_need_no_registration(dense, prune, tmp_path):
    def first(weight, gram):
        return -torch.arange(weight.shape[1], dtype=weight.dtype)

    def half(problem, *, factor: float = 0.5):
        return SiteResult(factor * problem.weight[:, problem.kept.indices])

    report = prune(selection=first, compensation=half, factor=0.25)
    before, after = weights(dense), weights(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(after[name], 0.25 * before[name][:, :28])
    assert report.recipe["selection"] == "first"
    assert report.recipe["options"] == {"factor": 0.25}


def test_a_tensor_of_ids_is_calibration_text(prune, tokens, tmp_path):
    ids = torch.from_numpy(np.load(tokens))
    from_tensor = prune("a", calibration=ids, compensation="rcpu")
    from_file = prune("b", compensation="rcpu")
    assert from_tensor.calibration["windows_sha256"] == from_file.calibration["windows_sha256"]
    assert tm.same_weights(tmp_path / "a", tmp_path / "b")


def test_progress_tells_every_phase(prune):
    seen = {}
    prune(
        compensation="none",
        progress=lambda phase, done, total: seen.update({phase: (done, total)}),
    )
    assert seen.keys() == {"solving"}
    assert all(done == total for done, total in seen.values())


def test_a_real_model_on_real_text_reloads_and_writes(shared, tmp_path):
    """Trained weights, its own tokenizer, a relabelled format: 6 heads do not divide 64."""
    from transformers import AutoTokenizer

    story_model = tm.readable(shared / "models/stories260K", tmp_path / "dense")
    report = coec.prune(
        story_model, tmp_path / "out", calibration=str(shared / "data/tinystories/train.txt"),
        samples=16, seq_len=128, preset="paper",
    )  # fmt: skip
    assert report.plan["output_model_type"] == "mistral"
    assert all(site["error_after"] < site["error_before"] for site in report.sites)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "out"), tm.load(tmp_path / "out")
    prompt = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(ids[0], skip_special_tokens=True).startswith("Once upon a time")


def test_calibration_may_be_named_by_a_path(prune, text):
    report = prune(calibration=Path(text), samples=20, compensation="none")
    assert report.recipe["calibration"] == report.calibration["source"] == text


def test_a_compensation_is_told_what_the_kept_value_heads_write(prune, tmp_path):
    """Each kept head's rows once for every query head; nothing at the MLP."""
    seen = []

    def spy(problem):
        seen.append((problem.kept.indices.tolist(), problem.value))
        return SiteResult(problem.weight[:, problem.kept.indices])

    needy = coec.Method(spy, needs={"value"})
    prune(compensation=needy)
    written = weights(tmp_path / "out")
    told = [value for columns, value in seen if len(columns) == 24]
    assert [value for columns, value in seen if len(columns) == 28] == [None, None]
    for index, value in enumerate(told):
        rows = written[f"model.layers.{index}.self_attn.v_proj.weight"].double()
        heads = rows.reshape(3, 1, 4, tm.HIDDEN).expand(3, 2, 4, tm.HIDDEN)
        assert torch.equal(value, heads.reshape(24, tm.HIDDEN))
    assert len(told) == 2


def test_attention_is_aligned_and_the_mlp_is_not(prune):
    report = prune()
    for site in report.sites:
        assert ("alignment_before" in site) == (site["site"] == "attention")
    without = prune("w", lambda_a=0.0)
    assert not any("alignment_before" in site for site in without.sites)


def test_random_units_differ_between_blocks_and_seeds(prune, tmp_path):
    kept = {}
    for out, seed in {"a": 0, "b": 0, "c": 1}.items():
        prune(out, selection="random", seed=seed, compensation="none")
        kept[out] = load_file(tmp_path / out / "coec/kept.safetensors")
    assert kept["a"].keys() == {
        f"layers.{i}.{site}" for i in (0, 1) for site in ("attention", "mlp")
    }
    assert all(torch.equal(kept["a"][name], kept["b"][name]) for name in kept["a"])
    assert not torch.equal(kept["a"]["layers.0.mlp"], kept["c"]["layers.0.mlp"])
    assert not torch.equal(kept["a"]["layers.0.mlp"], kept["a"]["layers.1.mlp"])


def test_what_belongs_to_the_model_travels_and_nothing_else(dense, prune, tmp_path):
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    carried = {"LICENSE": "text", "chat_template.jinja": "{{ x }}", "special_tokens_map.json": "{}",
               "additional_chat_templates/tool_use.jinja": "{{ y }}"}  # fmt: skip
    (source / "additional_chat_templates").mkdir()
    for name, text in {**carried, "training_args.bin": "x", "notes.md": "x"}.items():
        (source / name).write_text(text)
    prune(model=source, compensation="none")
    for name, text in carried.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*(name.split("/")[0] for name in carried), "README.md", "coec.json", "config.json",
         "generation_config.json", "coec", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"]
    )  # fmt: skip


@pytest.fixture
def opened(monkeypatch):
    """How often each folder is opened, and how many skeletons are built."""
    counts: dict[str, int] = {}
    headers, build = dense_module.read_headers, description.AutoModelForCausalLM.from_config

    def read(folder):
        counts[folder.name] = counts.get(folder.name, 0) + 1
        return headers(folder)

    def built(*arguments, **options):
        counts["skeletons"] = counts.get("skeletons", 0) + 1
        return build(*arguments, **options)

    description._skeleton.cache_clear()
    monkeypatch.setattr(dense_module, "read_headers", read)
    monkeypatch.setattr(description.AutoModelForCausalLM, "from_config", built)
    return counts


def test_a_model_is_opened_once_and_built_once_for_each_of_its_forms(
    dense, prune, tokens, tmp_path, opened
):
    out = tmp_path / "out"
    prune()
    assert opened == {dense.name: 1, "skeletons": 2}
    opened.clear()
    coec.perplexity(out, tokens, baseline=dense, seq_len=32)
    assert opened == {"out": 1, dense.name: 1}


def test_sampled_text_needs_no_further_opening(dense, opened, prune):
    prune(calibration="self", samples=4, seq_len=16, compensation="none")
    assert opened == {dense.name: 1, "skeletons": 2}


def test_skeletons_of_one_configuration_are_apart(dense):
    """They are copies: what a stream does to one is not seen by another."""
    model = Dense.open(dense)
    one, two = model.skeleton(torch.float64), model.skeleton(torch.bfloat16)
    assert next(one.parameters()).dtype == torch.float64
    assert next(two.parameters()).dtype == torch.bfloat16
    one.base_model.layers = torch.nn.ModuleList()
    assert len(two.base_model.layers) == 2


def test_no_bit_is_lost_of_float16_beside_bfloat16(dense, prune, tmp_path):
    """Neither dtype holds the other: what is carried over is the same number in float32."""
    model = shutil.copytree(dense, tmp_path / "model")
    path = model / "model.safetensors"
    weights = {
        name: tensor.to(torch.float16 if "embed" in name or "layers.0" in name else torch.bfloat16)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    report = prune(model=model, samples=4, compensation="none")
    written = load_file(tmp_path / "out/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[name], weights[name].float())
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert "stored as BF16 and F16: what is written is float32" in report.plan["notes"][0]


@pytest.mark.parametrize("preset", [{"preset": "fast"}, {"preset": "balanced", "holdout": 0.25}])
def test_the_scales_of_channels_do_not_matter(preset, dense, tokens, tmp_path):
    """Rows of up_proj times a number and columns of down_proj over it are the same function."""
    other = shutil.copytree(dense, tmp_path / "other")
    scale = 2.0 ** torch.linspace(-10, 10, tm.FFN).round()

    def rescaled(tensors):
        for name in tensors:
            if name.endswith("up_proj.weight"):
                tensors[name] *= scale[:, None]
            elif name.endswith("down_proj.weight"):
                tensors[name] /= scale

    tm.edit_weights(other, rescaled)
    how = {"calibration": tokens, "samples": 24, "seq_len": 32} | preset
    for name, model in {"one": dense, "two": other}.items():
        coec.prune(model, tmp_path / name, **how)
    kept = (tmp_path / name / "coec/kept.safetensors" for name in ("one", "two"))
    assert len({path.read_bytes() for path in kept}) == 1
    one, two = (tm.logits(tm.load(tmp_path / name)) for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
