"""Everything that users get wrong: one clear line, before any work, nothing left behind."""

import errno
import json
import shutil

import numpy as np
import pytest
import torch

import coec
import tiny_models as tm
import typechecker
from coec import Gram, pruning
from coec.checkpoint import checkpoint as writing
from coec.checkpoint import folder
from coec.errors import CalibrationError, CoecError, ModelError, OutputError
from coec.models.description import Description
from coec.models.matching import RawCheckpoint
from outcomes import WORK, one_line, raising

LLAMA = Description.of(tm.raw_config("llama"))


@pytest.fixture
def model(dense, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(dense, tmp_path / "model")


@pytest.fixture
def small(tokens):
    """Settings of a pruning on a few tokens."""
    return {"calibration": tokens, "preset": "paper", "samples": 24, "seq_len": 32}


@pytest.fixture
def refused(model, small, tmp_path, monkeypatch):
    """Runs `coec.prune` and expects a one-line refusal before the first block is streamed."""

    def run(error: type[CoecError], match: str, **changes) -> None:
        monkeypatch.setattr(pruning, "Streams", raising(WORK))
        before = sorted(tmp_path.rglob("*"))
        places = {"model": model, "out": tmp_path / "out"}
        with one_line(error, match):
            coec.prune(**{**places, **small, **changes})
        assert sorted(tmp_path.rglob("*")) == before

    return run


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def test_a_gguf_file_is_none_that_can_be_pruned(model, refused, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\3\0\0\0")
    said = "is a GGUF file, which no weights can be pruned in: give the folder .* made from"
    refused(ModelError, said, model=file)
    for path in model.iterdir():
        path.unlink()
    shutil.copy(file, model)
    refused(ModelError, "model.gguf' " + said)


def test_a_file_of_weights_is_part_of_a_folder(model, refused):
    refused(ModelError, "no model at .*a file: give the folder", model=model / "model.safetensors")


def test_an_adapter_is_to_be_merged_first(model, refused):
    for path in model.iterdir():
        path.unlink()
    said = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(said))
    match = r"is a PEFT adapter of 'org/base'.*merge it first.*merge_and_unload\(\)"
    refused(ModelError, match)
    edit = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(tm.raw_config("llama") | edit))
    refused(ModelError, match)


def test_a_model_that_an_adapter_wraps_is_to_be_saved_without(model, refused):
    prefix = "base_model.model."
    tm.edit_weights(model, lambda weights: {prefix + name: w for name, w in weights.items()})
    match = rf"named {prefix}….*merge it first.*merge_and_unload\(\)"
    refused(ModelError, match)
    with pytest.raises(ModelError, match=match):
        RawCheckpoint.open(model, LLAMA)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_what_wrappers_put_before_names_is_taken_off(prefix, model, text, tmp_path):
    settings = {"calibration": text, "samples": 4, "seq_len": 16, "preset": "fast"}
    coec.prune(model, tmp_path / "plain", **settings)
    tm.edit_weights(model, lambda weights: {prefix + name: w for name, w in weights.items()})
    report = coec.prune(model, tmp_path / "out", **settings)
    assert f"such as {prefix}model.embed_tokens.weight: the result" in str(report.plan["notes"])
    assert tm.same_weights(tmp_path / "out", tmp_path / "plain")
    assert RawCheckpoint.open(model, LLAMA).tensor("model.norm.weight").shape == (32,)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_not_the_file(name, model, refused, text):
    (model / name).write_text(LFS)
    refused(ModelError, f"{name}.* is a pointer of git-LFS.*git lfs pull", calibration=text)


MULTIMODAL = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
              "vision_config": {}}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
         "'gpt2' is not supported: no decoder layers are found in a GPT2LMHeadModel"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]},
         "not a decoder-only language model"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "not a decoder-only language model"),
        ({"architectures": ["LlamaForSequenceClassification"]},
         "not a decoder-only language model, but LlamaForSequenceClassification"),
        ({"architectures": ["LlamaModel"]},
         "this is a LlamaModel, which has no head to predict tokens with"),
        ({"quantization_config": "int4"}, r"quantised \(int4\)"),
        ({"quantization_config": {"quant_method": "gptq"}},
         r"quantised \(gptq\).*prune it, then quantise"),
        (MULTIMODAL | {"text_config": {}, "quantization_config": {"quant_method": "fp8"}},
         "multimodal model with quantised weights"),
        (MULTIMODAL | {"text_config": {"model_type": "bertish"}},
         r"multimodal model \(Gemma3.*\) whose language model 'bertish' is not known"),
    ],
)  # fmt: skip
def test_a_model_of_another_kind(changes, match, model, refused):
    """Sizes that are not those of the weights are in tests/models/test_dense.py."""
    tm.edit_config(model, **changes)
    refused(ModelError, match)


UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value, model, refused):
    """What else weights may lack is in tests/models/test_dense.py."""
    tm.edit_weights(model, lambda weights: weights | {DOWN: weights[DOWN] + value})
    refused(ModelError, r"layers\.0\.mlp\.down_proj.*NaN or Inf")


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.csv", r"is a table.*\.jsonl"), ("a.TSV", "is a table"), ("a.txt.gz", "is compressed")],
)
def test_a_file_that_is_no_plain_text(name, said, refused, tmp_path):
    tm.text_file(tmp_path / name)
    refused(CalibrationError, said, calibration=str(tmp_path / name))


def test_weights_that_are_truncated_or_pickled(model, refused):
    """Shards and their index are in tests/models/test_dense.py."""
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(ModelError, r"model\.safetensors' is truncated or damaged")
    path.rename(model / "pytorch_model.bin")
    refused(ModelError, "pytorch_model.bin' is a pickle: convert it")


def test_a_folder_without_a_tokenizer(model, refused, text):
    (model / "tokenizer.json").unlink()
    refused(ModelError, "has no tokenizer", calibration=text)
    refused(ModelError, "has no tokenizer", calibration="self")


def test_text_that_is_too_little_or_of_another_tokenizer(refused, tmp_path):
    text = tm.text_file(tmp_path / "text.txt", 100)
    refused(CalibrationError, "has 100 tokens, 24 windows of 32 need 768", calibration=text)
    (tmp_path / "empty.txt").write_text(" \n")
    refused(CalibrationError, "holds no text", calibration=str(tmp_path / "empty.txt"))
    refused(CalibrationError, "no text at .*nowhere.txt", calibration=str(tmp_path / "nowhere.txt"))
    np.save(tmp_path / "far.npy", np.full((24, 32), 5000))
    refused(CalibrationError, r"token ids 5000\.\.5000.*vocabulary has 300",
            calibration=str(tmp_path / "far.npy"))  # fmt: skip


def test_an_output_inside_the_model(model, refused):
    refused(OutputError, "lie inside each other", out=model / "pruned")
    refused(OutputError, "lie inside each other", out=model)
    refused(OutputError, "lie inside each other", out=model.parent)


def test_an_output_that_is_not_empty(refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    refused(OutputError, "is not empty; choose another folder, or pass force=True")
    refused(OutputError, "holds 'notes.txt'.*remove it yourself", force=True)
    refused(OutputError, "is a file", out=tmp_path / "out/notes.txt")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_a_disk_known_to_be_full(refused, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(OutputError, "not enough disk space")


def test_a_disk_that_fills_up_on_the_way(dense, small, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(writing, "write_tensors", raising(full))
    with pytest.raises(OutputError, match="No space left on device; make room"):
        coec.prune(dense, tmp_path / "new" / "out", **small, compensation="none")
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_replaced_model_as_it_was(model, small, tmp_path, monkeypatch):
    settings = small | {"compensation": "none"}
    coec.prune(model, tmp_path / "out", **settings)
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    monkeypatch.setattr(pruning.Checkpoint, "keep", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        coec.prune(model, tmp_path / "out", force=True, **settings)
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before
    monkeypatch.undo()
    coec.prune(model, tmp_path / "out", force=True, **settings)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_a_model_that_is_not_there(refused, tmp_path):
    refused(ModelError, "no model at .*nowhere", model=tmp_path / "nowhere")
    refused(ModelError, "could not be downloaded", model="someone/something")
    (tmp_path / "empty").mkdir()
    refused(ModelError, "no config.json in", model=tmp_path / "empty")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe"])
def test_a_damaged_config(text, model, refused):
    (model / "config.json").write_bytes(text.encode("latin-1"))
    refused(ModelError, "is not valid JSON|holds no JSON object")


def test_a_config_that_lacks_a_size(model, refused):
    tm.edit_config(model, "intermediate_size")
    refused(ModelError, "config.json lacks 'intermediate_size'")


def test_a_model_that_overflows_names_the_module_and_the_cure(model, small, tmp_path):
    tm.edit_weights(model, lambda weights: weights | {UP: weights[UP] * 1e38})
    with pytest.raises(CoecError, match=r"layers\.1\.mlp\.down_proj.*NaN or Inf"):
        coec.prune(model, tmp_path / "out", **small)
    assert not (tmp_path / "out").exists()


def test_a_result_that_does_not_fit_its_dtype_says_which_does(dense, small, tmp_path):
    def huge(problem):
        return coec.SiteResult(problem.weight[:, problem.kept.indices] * 1e6)

    with pytest.raises(CoecError, match=r"does not fit torch\.float16.*dtype=float32"):
        coec.prune(dense, tmp_path / "out", **small, compensation=huge, dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "name"),
    [({"sparsity": 0}, "sparsity"), ({"seq_len": 65}, "seq_len"), ({"alhpa": 0.5}, "alhpa"),
     ({"compensation": "magic"}, "compensation"), ({"device": "tpu9"}, "device")],
)  # fmt: skip
def test_settings_that_cannot_be(setting, name, refused):
    """Before any work; more of them are in tests/config/test_recipe.py."""
    refused(CoecError, name, **setting)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda eye, zeros: coec.plan(torch.nn.Linear(2, 2)),
        lambda eye, zeros: Gram(torch.zeros(3, 2), zeros, 1),
        lambda eye, zeros: coec.compensate(eye, Gram(eye, zeros, 1), torch.tensor([1.0, 2.0])),
        lambda eye, zeros: coec.compensate(zeros, Gram(eye, zeros, 1), torch.tensor([1])),
    ],
)
def test_wrong_types_and_shapes_without_the_type_checker_of_the_tests(attempt):
    typechecker.switch(on=False)  # the next test's own setup decides anew
    with one_line(CoecError):
        attempt(torch.eye(3), torch.zeros(3))
