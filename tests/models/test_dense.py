"""The door: what is opened is whole, and the network in memory is made of what was checked."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec.errors import ModelError
from coec.models import dense as module
from coec.models.dense import Dense, Prefetcher
from coec.models.files import INDEX
from outcomes import one_line

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Models by variant, each written once."""
    root, made = tmp_path_factory.mktemp("dense"), {}

    def saved(variant):
        if variant not in made:
            folder = root / variant.replace(" ", "-")
            made[variant] = tm.save(tm.tiny(variant, torch.float32), folder, tokenizer=False)
        return made[variant]

    return saved


@pytest.fixture
def model(originals, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(originals("llama"), tmp_path / "model")


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
    checkpoint = Dense.open(model)
    assert checkpoint.dtype == torch.float32
    assert checkpoint.files.keys() == weights.keys()
    assert all(torch.equal(checkpoint.tensor(name), weights[name]) for name in weights)
    block = checkpoint.tensors(checkpoint.layout.blocks[1])
    assert "model.layers.1.mlp.down_proj.weight" in block
    assert len(block) == 9


def test_shards_without_an_index_are_read_too(model):
    expected = Dense.open(model).digest
    split(model)
    (model / INDEX).unlink()
    for number in range(3):
        (model / f"model-{number}.safetensors").rename(
            model / f"model-{number + 1}-of-3.safetensors"
        )
    assert Dense.open(model).digest == expected
    (model / "model-2-of-3.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks"):
        Dense.open(model)


def test_a_tensor_that_zero_left_empty_is_named_with_the_cure(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "empty")
    name = "model.layers.0.mlp.up_proj.weight"
    tm.edit_weights(folder, lambda weights: weights | {name: torch.empty(0)})
    with pytest.raises(ModelError, match=r"up_proj\.weight .*shape \(0,\).*zero_to_fp32"):
        Dense.open(folder)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("left", [None, 0, 4, 200, -8])
def test_one_shard_of_many_that_is_missing_or_truncated_is_named(left, number, model):
    split(model)
    path = model / f"model-{number}.safetensors"
    content = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(content[:left])
    said = "is missing from" if left is None else "is truncated or damaged"
    with pytest.raises(ModelError, match=rf"'model-{number}\.safetensors' {said}"):
        Dense.open(model)


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
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"weight_map": {"a": "."}}',
        b'{"weight_map": {"a": ".."}}',
        b'{"weight_map": {"a": ""}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": "../model/model.safetensors"}}',
        b'{"weight_map": {"a": "m\\u0000.safetensors"}}',
        b'{"weight_map": {"a": "' + b"x" * 300 + b'"}}',
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_none_is_named(content, model):
    (model / INDEX).write_bytes(content)
    with pytest.raises(ModelError, match=r"index\.json' is damaged"):
        Dense.open(model)


@pytest.mark.parametrize(
    ("dtypes", "holding"),
    [
        (("float32", "bfloat16"), "float32"),
        (("float64", "float32"), "float64"),
        (("float16", "bfloat16"), "float32"),  # which holds both
    ],
)
@pytest.mark.parametrize("flip", [False, True])
def test_of_mixed_dtypes_that_is_taken_which_holds_all(dtypes, holding, flip, model):
    one, two = (getattr(torch, name) for name in (dtypes[::-1] if flip else dtypes))

    tm.edit_weights(model, lambda w: w.update({n: w[n].to(two if "norm" in n else one) for n in w}))
    dense = Dense.open(model)
    assert dense.dtype == getattr(torch, holding)
    assert [note for note in dense.notes if f"what is written is {holding}" in note]


def test_tensors_that_the_model_does_not_store_are_let_pass(model):
    """Old Llamas hold rotary frequencies; they are neither checked nor counted."""

    unread = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((2,), torch.nan),
        "position_ids": torch.arange(4),
    }
    tm.edit_weights(model, lambda weights: weights.update(unread))
    assert Dense.open(model).dtype == torch.float32


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
def test_layers_that_draft_tokens_are_left_out(variant, tmp_path):
    """Releases of these families have them after the last; transformers does not read them."""
    tm.tiny(variant, torch.float32).save_pretrained(tmp_path)
    tm.edit_weights(tmp_path, lambda w: w.update({"model.layers.2.enorm.weight": torch.ones(32)}))
    tm.edit_config(tmp_path, num_nextn_predict_layers=None)
    with pytest.raises(ModelError, match="more layers than the 2"):
        Dense.open(tmp_path)
    tm.edit_config(tmp_path, num_nextn_predict_layers=1)
    opened = Dense.open(tmp_path)
    assert opened.config["num_nextn_predict_layers"] == 0
    assert "1 tensors that draft" in opened.notes[0]
    assert not [name for name in opened.files if "layers.2." in name]
    tm.edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"more layers than the 1 .*first: model\.layers\.2"):
        Dense.open(tmp_path)


def without(name):
    return lambda weights: weights.pop(name)


def replaced(name, change):
    return lambda weights: weights.update({name: change(weights[name])})


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGE = {
    "a tensor is missing": (without(UP), {}, r"lacks 1 of 21 tensors .*up_proj"),
    "no head": (without("lm_head.weight"), {}, r"lacks 1 of 21 tensors .*lm_head"),
    "fewer layers in the configuration": ({}, {"num_hidden_layers": 1}, "more layers than the 1"),
    "more layers in the configuration": ({}, {"num_hidden_layers": 3}, "lacks layer 2 of the 3"),
    "many more layers": ({}, {"num_hidden_layers": 500}, "lacks layer 2 of the 500"),
    "int8": (replaced(UP, lambda w: w.to(torch.int8)), {}, "is I8: the weights are quantised"),
    "another shape": ({}, {"intermediate_size": 44}, "has shape .* config.json says"),
    "a bias nobody knows": (
        lambda weights: weights.update({UP[:-6] + "bias": torch.ones(40)}), {},
        "up_proj.bias .* has no place in a model of this config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("door", ["prune", "perplexity", "open"])
def test_what_pruning_refuses_evaluation_refuses(case, door, model, tmp_path):
    """An evaluation of a tensor that is not there would measure random numbers."""
    change, changes, match = DAMAGE[case]
    if change:
        tm.edit_weights(model, change)
    tm.edit_config(model, **changes)
    ids = torch.zeros(64, dtype=torch.int64)
    pruning = {"calibration": ids, "samples": 2, "seq_len": 8, "preset": "paper"}
    run = {
        "prune": lambda: coec.prune(model, tmp_path / "out", **pruning),
        "perplexity": lambda: coec.perplexity(model, ids, seq_len=8),
        "open": lambda: Dense.open(model),
    }[door]
    with one_line(ModelError, match=match):
        run()


READ = {
    "values": Dense.check_values,
    "network": lambda opened: opened.network(CPU, torch.float32),
    "sample": lambda opened: opened.fingerprint,  # before work
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_found_wherever_they_are_read(value, read, model):
    tm.edit_weights(model, replaced(UP, lambda w: w.index_fill(0, torch.tensor([3]), value)))
    with pytest.raises(ModelError, match=r"up_proj.* holds NaN or Inf"):
        READ[read](Dense.open(model))


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_the_network_is_the_one_that_transformers_loads(variant, originals):
    opened = Dense.open(originals(variant))
    for dtype in (torch.float32, torch.bfloat16):
        network = opened.network(CPU, dtype)
        theirs = tm.load(opened.folder, dtype)
        assert torch.equal(tm.logits(network), tm.logits(theirs))
        assert network.num_parameters() == theirs.num_parameters()
        assert network.generation_config.to_dict() == theirs.generation_config.to_dict()
        assert network.dtype == dtype


def test_an_index_beside_other_weights_is_refused(model):
    """Some loaders would read the one, some the other."""
    weights = split(model)
    save_file(
        {name: torch.zeros_like(w) for name, w in weights.items()}, model / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"both model.safetensors and .*, which names 'mo"):
        Dense.open(model)


def test_an_index_of_the_one_file_is_fine(model):
    names = load_file(model / "model.safetensors")
    content = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / INDEX).write_text(json.dumps(content))
    assert len(Dense.open(model).files) == 21


def test_a_tensor_in_two_shards_or_in_another_than_the_index_says_is_refused(model):
    weights = split(model)
    index = json.loads((model / INDEX).read_text())
    file = next(f for f in set(index["weight_map"].values()) if f != index["weight_map"][UP])
    index["weight_map"][UP] = file
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"is damaged: {UP} is in"):
        Dense.open(model)
    part = load_file(model / file)
    save_file({**part, UP: weights[UP]}, model / file)
    with pytest.raises(ModelError, match=f"{UP} is in both"):
        Dense.open(model)


def test_a_head_of_its_own_is_kept_although_the_configuration_says_tied(originals, tmp_path):
    """As transformers 5 does; a trained head must not be replaced by the embedding."""
    model = shutil.copytree(originals("llama"), tmp_path / "model")
    tm.edit_config(model, tie_word_embeddings=True)
    opened = Dense.open(model)
    assert not opened.tied
    assert opened.config["tie_word_embeddings"] is False
    assert "config.json says that they are one" in opened.notes[0]
    ids = torch.randint(2, 300, (400,))
    report = coec.prune(model, tmp_path / "out", calibration=ids, samples=8, seq_len=32,
                        compensation="none", preset="paper")  # fmt: skip
    assert report.plan["notes"] == list(opened.notes)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    head = load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]
    assert torch.equal(head, opened.tensor("lm_head.weight"))
    untied = coec.perplexity(originals("llama"), ids, seq_len=32).perplexity
    assert coec.perplexity(model, ids, seq_len=32).perplexity == untied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_a_copy_of_the_embedding_is_tied(dtype, originals, tmp_path):
    """Also one in a narrower dtype."""
    model = shutil.copytree(originals("llama tied"), tmp_path / "model")
    before = Dense.open(model).digest

    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].to(dtype, copy=True)

    tm.edit_weights(model, change)
    opened = Dense.open(model)
    assert (opened.tied, opened.notes, opened.digest) == (True, (), before)
    assert "lm_head.weight" not in opened.files


def test_the_digest_is_of_the_content(model):
    first = Dense.open(model).digest
    split(model)
    opened = Dense.open(model)
    assert opened.digest == first  # however it is cut into files
    assert pickle.loads(pickle.dumps(opened)).digest == first
    before = tm.edit_config(model, rms_norm_eps=1e-3)
    assert Dense.open(model).digest != first
    tm.edit_config(model, rms_norm_eps=before["rms_norm_eps"])
    assert Dense.open(model).digest == first
    path = model / "model-1.safetensors"
    save_file({name: w + 1e-6 for name, w in load_file(path).items()}, path)
    assert Dense.open(model).digest != first


def test_a_file_that_changes_after_it_was_checked_is_refused(model):
    opened = Dense.open(model)
    path = model / "model.safetensors"
    os.utime(path, (1, 1))
    with pytest.raises(ModelError, match="was changed while it was in use"):
        opened.tensor(UP)


def test_an_opened_model_is_opened_once(model):
    tm.edit_config(model, quantization_config={})  # which is no quantisation
    opened = Dense.open(model)
    assert Dense.open(opened) is opened
    assert opened.name == str(model)
    assert "quantization_config" not in opened.config


@pytest.mark.parametrize("content", ["{", "[]", '{"max_new_tokens": -1}'])
def test_a_damaged_generation_configuration_is_named(content, model):
    (model / "generation_config.json").write_text(content)
    with one_line(ModelError, match=r"generation_config\.json' cannot be used"):
        Dense.open(model)


def test_a_pipe_and_a_folder_are_no_shards(model):
    path = model / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="cannot be read: it is no file"):
        Dense.open(model)


def test_the_fingerprint_sees_any_change_of_a_small_model_and_reads_little_of_a_large_one(
    model, monkeypatch
):
    first, digest = Dense.open(model), Dense.open(model).digest
    assert first.fingerprint == Dense.open(model).fingerprint
    assert not first.hashes  # nothing was read as a whole
    tm.edit_weights(model, replaced(UP, lambda w: w.index_fill(0, torch.tensor([3]), 0.5)))
    assert Dense.open(model).fingerprint != first.fingerprint
    monkeypatch.setattr(module, "_SAMPLED", 64)
    sampled = Dense.open(model).fingerprint
    # Four pieces of four numbers: the first and the last are among them, what lies between is not.
    change = replaced(UP, lambda w: w.flatten().index_fill(0, torch.tensor([5]), 0.1).view_as(w))
    tm.edit_weights(model, change)
    assert Dense.open(model).fingerprint == sampled
    assert Dense.open(model).digest != digest
    last = replaced(UP, lambda w: w.flatten().index_fill(0, torch.tensor([-1]), 0.1).view_as(w))
    tm.edit_weights(model, last)
    assert Dense.open(model).fingerprint != sampled


def test_what_is_read_is_noted_and_the_digest_reads_the_rest(model, monkeypatch):
    opened, read = Dense.open(model), []
    original = Dense._read
    monkeypatch.setattr(
        Dense, "_read", lambda self, file, names: read.extend(names) or original(self, file, names)
    )
    block = opened.layout.blocks[0]
    opened.tensors(block)
    seen = set(read)
    assert seen
    assert all(name.startswith(block.prefix) for name in seen)
    read.clear()
    digest = opened.digest
    assert set(read) == set(opened.files) - seen
    assert digest == Dense.open(model).digest


def test_the_next_block_is_read_ahead_once_and_no_further_than_the_last(model, monkeypatch):
    opened, read = Dense.open(model), []
    original = Dense.tensors
    monkeypatch.setattr(
        Dense, "tensors", lambda self, block: read.append(block.index) or original(self, block)
    )
    first, second = opened.layout.blocks
    with Prefetcher(opened, last=1) as ahead:
        assert ahead.tensors(first).keys() == original(opened, first).keys()
        assert ahead.tensors(second).keys() == original(opened, second).keys()
    assert read == [0, 1]
    with Prefetcher(opened, last=0) as ahead:
        ahead.tensors(first)
    assert read == [0, 1, 0]
    tm.edit_weights(model, replaced(UP, lambda w: w * float("inf")))
    again = Dense.open(model)
    with Prefetcher(again, last=1) as ahead:
        ahead.tensors(first)  # not yet its turn
        with pytest.raises(ModelError, match="holds NaN or Inf"):
            ahead.tensors(second)
