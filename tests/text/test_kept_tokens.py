"""Which tokens stay, and what a tokenizer of fewer tokens makes of a text."""

import json

import pytest
import torch
from tokenizers import Tokenizer

import bpe_tokenizers as bt
from coec.models.renumbering import BYTES, Renumbering
from coec.text.kept_tokens import Merges

ODD = "naïve 日本語 🧑‍🚀 e\u0301 ﬀ \u2028\ufeff\u00a0 \t\r\n  İß \U0010ffff the cat they're"
PROBES = [*bt.TEXT[:3], ODD, "the cat", "a mat and the moon", "thethe th he", " the   the", ""]
DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": bt.SPACE}, "content": " "}, {"type": "ByteFallback"},
    {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]}  # fmt: skip
KINDS = [*bt.CUTS, "pieces"]


@pytest.fixture(params=KINDS)
def content(request, tmp_path):
    pieces = request.param == "pieces"
    folder = bt.save_pieces(tmp_path) if pieces else bt.save_bytes(tmp_path, request.param)
    read = json.loads((folder / "tokenizer.json").read_text())
    return read | {"decoder": DECODER} if pieces else read


def always(content) -> set[int]:
    """Single characters, bytes and special tokens."""
    ids = {n for token, n in content["model"]["vocab"].items() if len(token) == 1 or token in BYTES}
    return ids | {token["id"] for token in content["added_tokens"]}


def cut(content, size, text="the cat sat on a mat"):
    """The renumbering to `size` ids by the counts in a text, and both tokenizers."""
    dense = Tokenizer.from_str(json.dumps(content))
    before = dense.get_vocab_size()
    counts = torch.bincount(torch.tensor(dense.encode(text).ids), minlength=before)
    merges = Merges.of(content)
    kept = merges.chosen(counts.double(), merges.closed(always(content)), size)
    renumbering = Renumbering(kept, before, size)
    return renumbering, dense, Tokenizer.from_str(json.dumps(renumbering.tokenizer(content)))


def sizes(content) -> range:
    count = len(set(content["model"]["vocab"].values()) | always(content))
    return range(len(always(content)), count, max(1, (count - len(always(content))) // 12))


def test_a_text_whose_tokens_all_stay_is_tokenised_as_before(content):
    stayed, fewer = 0, 0
    for size in sizes(content):
        renumbering, dense, small = cut(content, size)
        assert len(renumbering.kept) == size == small.get_vocab_size()
        for text in (word for probe in PROBES for word in (probe, *probe.split())):
            before, after = dense.encode(text).ids, small.encode(text).ids
            if renumbering.new.keys() >= set(before):
                assert after == [renumbering.new[number] for number in before]
                stayed += 1
            else:
                fewer += 1
                assert len(after) > len(before)
    assert stayed > 20
    assert fewer > 20


def test_every_text_is_read_back(content):
    for size in sizes(content):
        small = cut(content, size)[2]
        for text in PROBES:
            assert small.decode(small.encode(text).ids) == text


def test_frequent_tokens_stay_with_what_they_are_made_of():
    merges = Merges.of(bt.pieces())
    the = merges.vocab["▁the"]
    assert merges.made_of("▁the") == {merges.vocab[t] for t in ["▁", *"the", "th", "the", "▁the"]}
    assert merges.made_of("</s>") == {merges.vocab["</s>"]}
    counts = torch.zeros(len(merges.vocab)).double()
    counts[the] = 1
    start = merges.closed({merges.vocab[t] for t in "▁the"})
    room = len(start) + len(merges.made_of("▁the") - start)
    assert the in merges.chosen(counts, start, room).tolist()
    assert the not in merges.chosen(counts, start, room - 1).tolist()


def test_special_tokens_around_a_text_have_their_new_numbers():
    content = bt.pieces()
    content["added_tokens"][1]["id"] = content["model"]["vocab"]["<s>"] = 400
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [400]
    content["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_id": 400, "pad_type_id": 0,
        "pad_token": "<s>", "pad_to_multiple_of": None,
    }  # fmt: skip
    content["model"]["vocab"]["<other>"] = 1
    ids = sorted(set(content["model"]["vocab"].values()) - {1})
    renumbering = Renumbering(torch.tensor(ids), 401, 300)
    small = Tokenizer.from_str(json.dumps(renumbering.tokenizer(content)))
    last = len(ids) - 1
    assert small.encode("the").ids[0] == small.token_to_id("<s>") == small.padding["pad_id"] == last
    step = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 400]}
    steps = {"type": "Sequence", "processors": [step]}
    [read] = renumbering.tokenizer(content | {"post_processor": steps})["post_processor"][
        "processors"
    ]
    assert (read["cls"], read["sep"]) == (["<s>", last], ["</s>", 1])
