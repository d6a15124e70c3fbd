"""Pruned vocabularies: what is written, that it predicts as before, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import bpe_tokenizers as bt
import coec
import tiny_models as tm
from coec.errors import CalibrationError, ModelError, OptionError, UnfinishedError
from coec.models.dense import Dense
from coec.models.renumbering import Renumbering
from coec.recovery import prune_and_recover
from coec.recovery.session import Session
from outcomes import one_line, raising
from prunings import content, interrupt

TEXT = "the cat sat on a mat and looked at the moon. it's a long while, they said. " * 60
TEMPLATE = "{% for m in messages %}<tool>{{ m['role'] }} {{ m['content'] }}{% endfor %}"
SETTINGS = {"sparsity": 0, "samples": 8, "seq_len": 32}
SIZE = 340


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def made(folder, kind="qwen2", *, of="llama", dtype=torch.float64, rows=bt.SIZE, **changes):
    """A model with a tokenizer that merges, ids in every file, and rows to spare."""
    model = tm.tiny(of, dtype, vocab_size=rows, eos_token_id=[1, 379], pad_token_id=0, **changes)
    model.generation_config.suppress_tokens = [378, 5]
    model.generation_config.sequence_bias = [[[378, 5], -2.0]]
    tm.save(model, folder, tokenizer=False)
    (bt.save_pieces if kind == "pieces" else bt.save_bytes)(
        folder, *[] if kind == "pieces" else [kind], chat_template=TEMPLATE,
        added_tokens_decoder={"0": {"content": "<s>"}, "380": {"content": "<tool>"}},
    )  # fmt: skip
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 380}))
    lines = [" ".join(merge) for merge in content["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    (folder / "tokenizer.model").write_bytes(b"ids as before")
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return made(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture
def prune(dense, text, tmp_path):
    def call(out="out", model=dense, **changes):
        settings = SETTINGS | {"calibration": text, "vocabulary": SIZE} | changes
        return coec.prune(model, tmp_path / out, **settings)

    return call


def kept_of(folder):
    return load_file(folder / "coec/kept.safetensors")["vocabulary"]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["", "tied"])
@pytest.mark.parametrize("kind", ["qwen2", "llama-bpe", "pieces"])
def test_text_is_tokenised_and_predicted_as_before(kind, changes, prune, tmp_path):
    dense = made(tmp_path / "model", kind, **changes)
    size = 290 if kind == "pieces" else SIZE
    prune(model=dense, vocabulary=size)
    kept, out = kept_of(tmp_path / "out"), tmp_path / "out"
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (dense, out))
    old, new = (torch.tensor([t(TEXT[:130])["input_ids"]])[:, :48] for t in (before, after))
    assert len(kept) == size
    assert torch.equal(kept[new], old)
    models = tm.load(dense), tm.load(out)
    assert models[1].config.vocab_size == size == models[1].get_input_embeddings().num_embeddings
    # Softmax over the tokens that stay
    expected = tm.logits(models[0], old)[..., kept].log_softmax(dim=-1)
    found = tm.logits(models[1], new).log_softmax(dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_id_is_written_anew(dense, prune, tmp_path):
    prune()
    out, kept = tmp_path / "out", kept_of(tmp_path / "out").tolist()
    new = {old: number for number, old in enumerate(kept)}
    config, generation, tokenizer = (
        json.loads((out / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, [1, new[379]])
    assert generation["eos_token_id"] == [1, new[379]]
    assert generation["suppress_tokens"] == [new[378], new[5]]
    assert generation["sequence_bias"] == [[[new[378], new[5]], -2.0]]
    assert tokenizer["added_tokens_decoder"] == {
        "0": {"content": "<s>"}, str(new[380]): {"content": "<tool>"},
    }  # fmt: skip
    assert json.loads((out / "added_tokens.json").read_text()) == {"<tool>": new[380]}
    read = json.loads((out / "tokenizer.json").read_text())["model"]
    assert json.loads((out / "vocab.json").read_text()) == read["vocab"]
    assert (out / "merges.txt").read_text().splitlines()[1:] == list(map(" ".join, read["merges"]))
    assert not (out / "tokenizer.model").exists()
    assert (out / "tokenizer_config.json").read_text() != ""
    # Words of the chat template stay whole: it writes "user" and "assistant".
    ids = AutoTokenizer.from_pretrained(dense)("<tool>user u<tool>assistant a")["input_ids"]
    assert set(ids) <= new.keys()


def test_a_token_in_another_file_alone_keeps_its_row(dense, prune, tmp_path):
    """Its id is the one after those of tokenizer.json, and not that of a row without a token."""
    folder = shutil.copytree(dense, tmp_path / "model")
    tm.edit_config(folder, sep_token_id=399)  # which has no token
    said = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    prune(model=folder)
    before, after = (AutoTokenizer.from_pretrained(f) for f in (folder, tmp_path / "out"))
    assert before.pad_token_id == 381
    assert kept_of(tmp_path / "out")[after.pad_token_id] == 381


def test_blocks_stay_bit_for_bit_and_rows_move(dense, prune, tmp_path):
    report = prune()
    before, after = Dense.open(dense), Dense.open(tmp_path / "out")
    kept = kept_of(tmp_path / "out")
    for name in before.files:
        rows = kept if name in before.by_token else slice(None)
        assert torch.equal(after.tensor(name), before.tensor(name)[rows])
    assert before.by_token == ["model.embed_tokens.weight", "lm_head.weight"]
    assert report.plan["widths"]["vocabulary"] == {"before": bt.SIZE, "after": SIZE}
    assert report.plan["parameters"]["after"] == after.parameters
    card = (tmp_path / "out/README.md").read_text()
    assert "structured pruning of tokens of the vocabulary." in card
    assert "| vocabulary | 400 | 340 |" in card
    assert "`coec eval THIS_FOLDER`" in card


def test_corrections_of_a_router_stay_float32_next_to_bfloat16(prune, tmp_path):
    """Rounding them changes which experts are chosen."""
    dense = made(tmp_path / "model", of="glm4_moe", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    fine = 8 + torch.tensor([0.001, 0.002, 0.003, 0.004])  # one number in bfloat16
    tm.edit_weights(dense, lambda weights: weights | {name: fine})
    prune(model=dense)
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written.pop(name), fine)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_the_text_decides_which_tokens_stay(prune, dense, tmp_path):
    (tmp_path / "other.txt").write_text("DON'T I'LL 日本語 " * 200)
    prune()
    prune("other", vocabulary_text=str(tmp_path / "other.txt"))
    mine, other = (set(kept_of(tmp_path / name).tolist()) for name in ("out", "other"))
    ids = set(AutoTokenizer.from_pretrained(dense)("DON'T I'LL 日本語")["input_ids"])
    assert ids <= other
    assert not ids <= mine


def test_vocabulary_and_channels_share_a_budget(dense, text):
    settings = {"calibration": text, "samples": 8, "seq_len": 32, "multiple_of": 1}
    alone, both = (
        coec.plan(dense, budget=0.8, vocabulary=size, **settings) for size in (None, SIZE)
    )
    assert both.parameters_after <= 0.8 * both.parameters_before < both.parameters_after + 500
    assert alone.pruned.ffn < both.pruned.ffn < 40
    assert "vocabulary" in repr(both)
    with one_line(OptionError, "budget = 0.99 removes nothing more than vocabulary = 340"):
        coec.plan(dense, budget=0.99, vocabulary=SIZE, **settings)


def test_a_run_that_was_interrupted_writes_the_same(prune, tmp_path, monkeypatch):
    settings = {"sparsity": 0.3, "preset": "paper"}
    prune("whole", **settings)
    interrupt(monkeypatch, prune, **settings)
    prune(**settings)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert len(kept_of(tmp_path / "out")) == SIZE


def test_kept_units_are_read_from_a_model_of_fewer_tokens(prune, dense, text, tmp_path):
    prune(sparsity=0.3, preset="paper")
    settings = {"calibration": text, "kept": str(tmp_path / "out"), "preset": "paper"}
    report = coec.prune(dense, tmp_path / "again", samples=8, seq_len=32, **settings)
    before, again = (load_file(tmp_path / n / "coec/kept.safetensors") for n in ("out", "again"))
    assert before.keys() - again.keys() == {"vocabulary"}
    assert report.plan["kept"]["sites"] == 4


def test_rows_are_added_for_a_larger_sibling(dense, prune, tmp_path):
    prune(vocabulary=None, pad_vocabulary=416)
    before, after = Dense.open(dense), Dense.open(tmp_path / "out")
    assert after.vocabulary == 416
    for name in before.by_token:
        assert torch.equal(after.tensor(name)[: bt.SIZE], before.tensor(name))
        mean = before.tensor(name).mean(dim=0)
        torch.testing.assert_close(after.tensor(name)[bt.SIZE :], mean.expand(16, -1))
    assert "structured pruning of no unit." in (tmp_path / "out/README.md").read_text()
    # No row without a token is as probable as the average token.
    logits = tm.logits(tm.load(tmp_path / "out"))
    assert (logits.softmax(dim=-1)[..., bt.SIZE :] < 1 / bt.SIZE).all()
    torch.testing.assert_close(logits[..., : bt.SIZE], tm.logits(tm.load(dense)))
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (dense / name).read_bytes()
    prune("both", pad_vocabulary=352)
    assert Dense.open(tmp_path / "both").vocabulary == 352
    assert len(kept_of(tmp_path / "both")) == SIZE


def test_models_of_other_vocabularies_are_compared_by_character(dense, prune, text, tmp_path):
    prune()
    out = tmp_path / "out"
    with one_line(ModelError, "different vocabularies .*compare nats_per_character"):
        coec.perplexity(out, text, baseline=dense, seq_len=32)
    result = coec.perplexity(out, text, seq_len=32)
    tokens = len(AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"])
    nats = torch.tensor(result.perplexity).log() * tokens / len(TEXT)
    assert result.nats_per_character == pytest.approx(float(nats), rel=1e-6)
    ids = torch.arange(64).reshape(2, 32)
    assert coec.perplexity(out, ids, seq_len=32).nats_per_character is None


@pytest.mark.parametrize("kind", ["qwen2", "pieces"])
def test_a_gguf_file_has_the_tokens_that_stay(kind, prune, tmp_path):
    gguf = pytest.importorskip("gguf")
    prune(model=made(tmp_path / "model", kind), vocabulary=290)
    coec.export(tmp_path / "out", tmp_path / "out.gguf", dtype="f32")
    read = gguf.GGUFReader(tmp_path / "out.gguf").get_field("tokenizer.ggml.tokens").contents()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(read) == 290
    assert {token: read[number] for token, number in tokenizer.get_vocab().items()} == {
        token: token for token in tokenizer.get_vocab()
    }


def spoiled(change):
    """What changes in tokenizer.json."""

    def spoil(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return spoil


BAD_TOKENIZERS = {
    "has no tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "is WordPiece, and only BPE": spoiled(lambda c: c["model"].update(type="WordPiece")),
    "has no tokens for bytes": spoiled(lambda c: c.update(pre_tokenizer=None)),
    "end_of_word_suffix": spoiled(lambda c: c["model"].update(end_of_word_suffix="</w>")),
    "cannot be read": lambda folder: (folder / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("said", BAD_TOKENIZERS)
def test_a_tokenizer_that_cannot_be_cut_is_refused(said, dense, prune, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "model")
    BAD_TOKENIZERS[said](folder)
    with one_line(ModelError, said):
        prune(model=folder)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vocabulary": 400}, "vocabulary must be less than this model's 400"),
        ({"vocabulary": 390}, "vocabulary must be less than 381 for this tokenizer"),
        ({"vocabulary": 20}, "vocabulary must be at least .*special tokens, bytes"),
        ({"vocabulary": 0}, "vocabulary must"),
        ({"vocabulary": None}, "nothing is removed"),
        ({"vocabulary": None, "vocabulary_text": "a.txt"}, "vocabulary_text has no effect"),
        ({"vocabulary": None, "pad_vocabulary": 400}, "pad_vocabulary must be more than"),
        ({"pad_vocabulary": 400}, "pad_vocabulary must be less than this model's 400"),
        ({"pad_vocabulary": 300}, "pad_vocabulary must be at least vocabulary = 340"),
        ({"calibration": "self"}, "set vocabulary_text"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said, prune, tmp_path):
    with one_line(OptionError, said):
        prune(**settings)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["", "tied"])
def test_a_training_follows_the_dense_model_on_the_tokens_that_stay(changes, prune, text, tmp_path):
    """Without other changes the pruned model is the dense model on these, and starts at KL 0."""
    dense, out = made(tmp_path / "model", **changes), tmp_path / "out"
    prune(model=dense)
    settings = {"text": text, "tokens": 256, "seq_len": 32, "learning_rate": 1e-3}
    report = coec.recover(dense, out, tmp_path / "trained", **settings)
    assert report.recoveries[-1]["held_out"]["before"] == pytest.approx(0, abs=1e-9)
    assert torch.equal(kept_of(tmp_path / "trained"), kept_of(out))
    prune("fewer", model=dense, sparsity=0.3, preset="fast")
    written = coec.recover(
        dense, tmp_path / "fewer", tmp_path / "self", **settings | {"text": "self"}
    )
    assert written.recoveries[-1]["held_out"]["before"] > 1e-3


def test_ids_of_the_dense_model_are_no_text_of_the_pruned_one(prune, dense, text, tmp_path):
    """They would be read as other tokens."""
    ids = torch.randint(2, SIZE, (20, 32))
    prune()
    with one_line(CalibrationError, "token ids, and the pruning with a vocabulary gives"):
        coec.recover(dense, tmp_path / "out", tmp_path / "trained", text=ids, seq_len=32)
    settings = SETTINGS | {"calibration": ids, "vocabulary": SIZE, "vocabulary_text": text}
    with one_line(CalibrationError, "token ids, and the pruning with a vocabulary gives"):
        prune_and_recover(dense, tmp_path / "both", 256, **settings)
    assert not (tmp_path / "both.partial").exists()


def test_another_teacher_loses_the_same_tokens(prune, dense, text, tmp_path):
    teacher = shutil.copytree(dense, tmp_path / "teacher")
    prune()
    settings = {"text": text, "tokens": 256, "seq_len": 32, "learning_rate": 1e-3}
    models = dense, tmp_path / "out"
    record = coec.recover(*models, tmp_path / "a", teacher=teacher, **settings).recoveries[-1]
    assert record["held_out"]["before"] == pytest.approx(0, abs=1e-9)
    tm.edit_weights(teacher, lambda tensors: tensors["model.norm.weight"].mul_(2))
    record = coec.recover(*models, tmp_path / "b", teacher=teacher, **settings).recoveries[-1]
    assert record["held_out"]["before"] > 1e-3
    larger = made(tmp_path / "larger", rows=bt.SIZE + 16)
    with one_line(ModelError, f"vocabulary of {bt.SIZE + 16}, the dense model one of {bt.SIZE}"):
        coec.recover(*models, tmp_path / "c", teacher=larger, **settings)
    assert not (tmp_path / "c.partial").exists()


def test_a_network_in_memory_gets_the_new_ids_of_its_generation_settings():
    """Those that a teacher answers prompts by."""
    model = tm.tiny("llama")
    model.generation_config.update(suppress_tokens=[3, 7], bos_token_id=3, eos_token_id=[7, 1])
    Renumbering(torch.tensor([0, 1, 3, 7]), tm.VOCABULARY, 4).cut(model)
    made = model.generation_config
    assert (made.suppress_tokens, made.bos_token_id, made.eos_token_id) == ([2, 3], 2, [3, 1])


def test_another_text_to_count_in_is_another_run(dense, text, tmp_path, monkeypatch):
    """The pruning is finished, and its training is not."""
    counted = tmp_path / "counted.txt"
    counted.write_text(TEXT)
    settings = SETTINGS | {"calibration": text, "vocabulary": SIZE, "vocabulary_text": counted}
    with monkeypatch.context() as patch:
        patch.setattr(Session, "train", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prune_and_recover(dense, tmp_path / "out", 256, **settings)
    counted.write_text(TEXT.upper())
    with pytest.raises(UnfinishedError, match="vocabulary_text was"):
        prune_and_recover(dense, tmp_path / "out", 256, **settings)
