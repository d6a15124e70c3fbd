"""Tokenizers in GGUF files: what is written of each kind, and which are refused."""

import json

import pytest
import torch
from gguf import GGUFReader, TokenType

import bpe_tokenizers as bt
import coec
import tiny_models as tm
from coec.errors import ModelError
from coec.exporting.vocabulary import BYTES, SPACE


@pytest.fixture
def folder(tmp_path):
    model = tm.tiny("llama", torch.float32, vocab_size=bt.SIZE)
    return tm.save(model, tmp_path / "model", tokenizer=False)


def exported(folder):
    result = coec.export(folder, folder.parent / "out.gguf", force=True)
    return result, GGUFReader(folder.parent / "out.gguf")


def says(reader, key):
    field = reader.get_field(f"tokenizer.{key}")
    return None if field is None else field.contents()


@pytest.mark.parametrize("name", bt.CUTS)
def test_byte_level_bpe(name, folder):
    content = json.loads((bt.save_bytes(folder, name) / "tokenizer.json").read_text())
    result, reader = exported(folder)
    assert result.tokenizer == f"gpt2, {name}"
    assert says(reader, "ggml.model") == "gpt2"
    assert says(reader, "ggml.pre") == name
    tokens, types = says(reader, "ggml.tokens"), says(reader, "ggml.token_type")
    vocabulary = content["model"]["vocab"] | {"<tool>": bt.TOOL}
    assert tokens[: bt.TOOL + 1] == sorted(vocabulary, key=vocabulary.get)
    assert tokens[bt.TOOL + 1 :] == [f"[PAD{n}]" for n in range(bt.TOOL + 1, bt.SIZE)]
    assert says(reader, "ggml.merges") == [" ".join(pair) for pair in content["model"]["merges"]]
    assert types[:2] == [TokenType.CONTROL] * 2
    assert set(types[2 : bt.TOOL]) == {TokenType.NORMAL}
    assert types[bt.TOOL] == TokenType.USER_DEFINED
    assert set(types[bt.TOOL + 1 :]) == {TokenType.UNUSED}
    assert (says(reader, "ggml.bos_token_id"), says(reader, "ggml.eos_token_id")) == (0, 1)
    assert (says(reader, "ggml.add_bos_token"), says(reader, "ggml.add_eos_token")) == (False,) * 2
    assert says(reader, "chat_template") is None
    assert bool(result.notes) == (name == "tekken")


def test_pieces_have_scores_in_the_order_of_merges(folder):
    bt.save_pieces(folder)
    result, reader = exported(folder)
    assert result.tokenizer == "llama, default"
    tokens, scores = says(reader, "ggml.tokens"), says(reader, "ggml.scores")
    made = sorted((t for t in tokens if scores[tokens.index(t)] < 0), key=lambda t: -scores[
        tokens.index(t)])  # fmt: skip
    words = ["the", f"{SPACE}the", "he", f"{SPACE}t", f"{SPACE}th"]
    assert made == words  # after the first of all, whose place is 0
    types = dict(zip(tokens, says(reader, "ggml.token_type")))
    assert {types[token] for token in BYTES} == {TokenType.BYTE}
    assert types["<unk>"] == TokenType.UNKNOWN
    assert types["</s>"] == TokenType.CONTROL
    assert says(reader, "ggml.add_space_prefix") is True
    assert says(reader, "ggml.add_bos_token") is True
    assert says(reader, "ggml.unknown_token_id") == 0
    assert says(reader, "ggml.merges") is None


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


@pytest.mark.parametrize(
    ("changes", "prefix", "note"),
    [
        (bt.metaspace("always"), True, "a text that begins with one"),
        (bt.metaspace("first"), True, "special"),
        (bt.metaspace("never"), False, ""),
        ({"normalizer": REPLACE}, False, ""),
    ],
)
def test_the_space_before_a_text(changes, prefix, note, folder):
    bt.save_pieces(folder, bt.pieces(**changes))
    result, reader = exported(folder)
    assert says(reader, "ggml.add_space_prefix") is prefix
    assert note in "".join(result.notes)
    assert bool(result.notes) == bool(note)


def test_chat_templates_go_with_it(folder):
    bt.save_bytes(folder, chat_template="{{ messages }}")
    _, reader = exported(folder)
    assert says(reader, "chat_template") == "{{ messages }}"
    several = [{"name": n, "template": f"{{{{ {n} }}}}"} for n in ("default", "tool_use")]
    bt.save_bytes(folder, chat_template=several)
    _, reader = exported(folder)
    assert says(reader, "chat_template") == "{{ default }}"
    assert says(reader, "chat_template.tool_use") == "{{ tool_use }}"


def test_the_end_of_a_text_may_stand_in_the_configuration(folder):
    bt.save_bytes(folder, eos_token=None)
    tm.edit_config(folder, eos_token_id=[7, 8])
    _, reader = exported(folder)
    assert says(reader, "ggml.eos_token_id") == 7
    tm.edit_config(folder, eos_token_id=None)
    refused(folder, "has an eos_token")


def change(folder, model=None, **changes):
    """Other parts of a folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= model or {}
    path.write_text(json.dumps(content | changes))


def refused(folder, message="tokenizer"):
    with pytest.raises(ModelError, match=f"{message}.*no_tokenizer=True"):
        coec.export(folder, folder.parent / "out.gguf", force=True)


BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
REST = {**BYTE_LEVEL, "add_prefix_space": False, "use_regex": False}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
WORDS = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "<s>": 2}, "unk_token": "<unk>"}
OTHER_BYTES = (
    {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True, "use_regex": True}},
    {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, REST]}},
    {"model": {"ignore_merges": True}},
    {"normalizer": {"type": "Lowercase"}},
    {"model": {"merges": []}},
)
OTHER_PIECES = (
    {"normalizer": STRIP},
    {"normalizer": None},
    {"model": {**bt.pieces()["model"], "byte_fallback": False}},
    {"model": {**bt.pieces()["model"], "ignore_merges": True}},
    {"model": WORDS},
)


@pytest.mark.parametrize("changes", OTHER_BYTES)
def test_byte_level_bpe_that_llama_cpp_does_not_have_is_refused(changes, folder):
    change(bt.save_bytes(folder), **changes)
    refused(folder)


@pytest.mark.parametrize("changes", OTHER_PIECES)
def test_pieces_that_llama_cpp_does_not_have_are_refused(changes, folder):
    bt.save_pieces(folder, bt.pieces(**changes))
    refused(folder)


def test_merging_by_pairs_that_is_not_merging_by_tokens_is_refused(folder):
    content = bt.pieces()
    merges = content["model"]["merges"]
    assert [SPACE, "th"] in merges
    content["model"]["merges"] = [pair for pair in merges if pair != [SPACE, "th"]]
    refused(bt.save_pieces(folder, content), f"does not merge every pair that makes '{SPACE}th'")
    content["model"]["merges"] = [*merges[1:], merges[0]]
    exported(bt.save_pieces(folder, content))  # another order is another score
    at = merges.index([SPACE, "the"])
    assert "".join(merges[at + 1]) == f"{SPACE}the"
    apart = [merges[at], *merges[:at], *merges[at + 1 :]]
    content["model"]["merges"] = apart
    refused(bt.save_pieces(folder, content), "at different times")


def test_tokens_that_take_what_stands_beside_them_are_refused(folder):
    content = json.loads((bt.save_bytes(folder) / "tokenizer.json").read_text())
    for key in ("lstrip", "rstrip", "single_word"):
        tokens = [content["added_tokens"][0] | {key: True}, *content["added_tokens"][1:]]
        change(folder, added_tokens=tokens)
        refused(folder, "the token '<s>' takes the text beside it")


def test_more_ids_than_the_model_has_are_refused(tmp_path):
    small = tm.save(tm.tiny("llama", torch.float32), tmp_path / "model", tokenizer=False)
    refused(bt.save_bytes(small), f"it has the id {bt.TOOL}")


def test_other_ids_added_to_a_text_are_refused(folder):
    start = {"SpecialToken": {"id": "<tool>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    change(bt.save_bytes(folder), post_processor={
        "type": "TemplateProcessing", "single": [start, text], "pair": [start, text, text],
        "special_tokens": {"<tool>": {"id": "<tool>", "ids": [bt.TOOL], "tokens": ["<tool>"]}},
    })  # fmt: skip
    refused(folder, rf"adds the ids \[{bt.TOOL}\]")


def test_code_of_its_own_and_a_folder_without_one_are_refused(folder):
    refused(folder, "has no tokenizer")
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "cannot be loaded")
    bt.save_bytes(folder, auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    refused(folder, "Python code")
