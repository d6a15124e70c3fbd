"""Windows from every kind of source."""

import hashlib
import json
import pathlib
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors

import tiny_models as tm
from coec.errors import CalibrationError, ModelError
from coec.models.folder import carry_files
from coec.text import sources
from coec.text import tokens as module
from coec.text.tokens import Extent, Stream, load_tokenizer, read_stream, token_ids
from coec.text.windows import all_windows, sample_windows
from outcomes import one_line


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tm.write_tokenizer(folder)
    return load_tokenizer(folder)


def stream_of(ids):
    return Stream(torch.as_tensor(ids), "source", "digest")


def read(path, tokenizer, needed=None, **options):
    extent = Extent(needed)
    return read_stream(str(path), lambda: tokenizer, split="train", extent=extent, **options)


def test_documents_are_joined_by_blank_lines_whatever_the_file(tokenizer, tmp_path):
    documents = ["one two.", "three", "four\nfive"]
    text = "\n\n".join(documents)
    (tmp_path / "a.txt").write_text(text)
    rows = [json.dumps({"text": document, "id": i}) for i, document in enumerate(documents)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, ""]))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "a.parquet")
    streams = [read(tmp_path / name, tokenizer) for name in ("a.txt", "a.jsonl", "a.parquet")]
    assert tokenizer.decode(streams[0].ids) == text
    for stream in streams:
        assert torch.equal(stream.ids, streams[0].ids)
        assert stream.text_sha256 == streams[0].text_sha256


def test_a_line_of_json_ends_at_a_newline_only(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two\x85three"}\n', encoding="utf-8")
    stream = read(tmp_path / "a.jsonl", tokenizer)
    assert tokenizer.decode(stream.ids) == "one\u2028two\x85three"


def test_special_tokens_are_added_once_and_counted(shared, tmp_path):
    folder = tm.readable(shared / "models/stories260K", tmp_path / "model")
    (tmp_path / "a.txt").write_text("Once upon a time. " * 50)
    stream = read(tmp_path / "a.txt", load_tokenizer(folder))
    assert stream.special_tokens == 1
    assert (stream.ids == stream.ids[0]).sum() == 1


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_token_files_are_read_as_they_are(shape, tokenizer, tmp_path):
    ids = np.arange(12, dtype=np.int32).reshape(shape)
    np.save(tmp_path / "ids.npy", ids)
    save_file({"input_ids": torch.from_numpy(ids)}, tmp_path / "ids.safetensors")
    for name in ("ids.npy", "ids.safetensors"):
        assert torch.equal(read(tmp_path / name, None).ids, torch.from_numpy(ids).long())


def drawn(ids, samples, seq_len=10, seed=0):
    return sample_windows(stream_of(ids), samples=samples, seq_len=seq_len, seed=seed)


def test_sampled_windows_are_disjoint_pieces_of_the_text_in_its_order():
    windows = drawn(range(103), 7)
    assert windows.ids.shape == (7, 10)
    assert torch.equal(windows.ids - windows.ids[:, :1], torch.arange(10).expand(7, 10))
    assert len(set(windows.ids.flatten().tolist())) == 70
    assert windows.available == 103
    starts = drawn(range(500), 20).ids[:, 0].tolist()
    assert starts == sorted(starts)
    assert starts != list(range(0, 200, 10))


def test_the_seed_decides_which_windows():
    first, again, other = (drawn(range(1000), 5, seed=seed).ids for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_of_a_token_file_are_windows():
    rows = torch.arange(40).reshape(10, 4)
    assert all(row.tolist() in rows.tolist() for row in drawn(rows, 3, seq_len=4).ids)
    with pytest.raises(CalibrationError, match="rows of 4 tokens; pass seq_len=4"):
        drawn(rows, 3, seq_len=5)


def test_evaluation_takes_every_window_and_drops_the_tail():
    windows = all_windows(stream_of(range(23)), seq_len=5)
    assert torch.equal(windows.ids, torch.arange(20).reshape(4, 5))


def test_too_little_text_says_how_much_there_is_and_how_much_is_needed():
    short = "has 45 tokens, 5 windows of 10 need 50; .* at most samples=4$"
    for count, match in ((45, short), (7, "windows of at most seq_len=7")):
        with pytest.raises(CalibrationError, match=match):
            drawn(range(count), 5)


def test_ids_outside_the_vocabulary_are_refused():
    for ids in ([1, 2, 30], [-1, 2, 3]):
        with pytest.raises(CalibrationError, match="vocabulary has 30.*another tokenizer"):
            stream_of(ids).within(30)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text"', "line 2"),
        ("a.jsonl", '{"story": "a"}', "no .*'text'.*text_column=NAME"),
        ("s.jsonl", '{"text": "a\\ud800b"}', r"line 1: character 2 .*'\\ud800'"),
        ("d.jsonl", '{"text": ' + "[" * 100_000, "line 1, is not JSON: maximum recursion"),
        ("n.jsonl", '{"text": "a", "id": ' + "9" * 5000 + "}", "line 1, is not JSON: Exceeds"),
        ("n.jsonl", '{"text": "a"}\n{"text": NaN}', "line 2: column 'text' holds nan"),
        ("a.parquet", "PAR", "not a parquet file"),
        ("a.npy", "text", "holds no token ids"),
        ("a.safetensors", "text", "holds no token ids"),
    ],
)
def test_a_file_of_the_wrong_form_is_named(name, content, match, tokenizer, tmp_path):
    (tmp_path / name).write_text(content)
    with one_line(CalibrationError, match=match):
        read(tmp_path / name, tokenizer)


def test_a_parquet_column_that_is_not_there_lists_those_that_are(tokenizer, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"]}), tmp_path / "t.parquet")
    with pytest.raises(CalibrationError, match=r"no column 'text' \(it has: a, b\)"):
        read(tmp_path / "t.parquet", tokenizer)
    assert tokenizer.decode(read(tmp_path / "t.parquet", tokenizer, text_column="b").ids) == "y"


def test_wikitext_without_datasets_says_what_to_install_or_give(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match=r"pip install datasets.*calibration=self"):
        read("wikitext2", tokenizer)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="the tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("rows", [["a", None, "c"], [1, 2, 3]])
def test_a_parquet_row_without_text_is_not_turned_into_words(rows, tokenizer, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "t.parquet")
    with pytest.raises(
        CalibrationError,
        match=r"row [12](, has no text|: column 'text' holds 1, no text).*text_column=NAME",
    ):
        read(tmp_path / "t.parquet", tokenizer)


@pytest.mark.parametrize("place", [0.0, 0.02, 0.5, 0.97])
def test_a_damaged_parquet_file_is_one_line(place, tokenizer, tmp_path):
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"line {i}" for i in range(99)]}), path)
    content = bytearray(path.read_bytes())
    first = int(place * len(content))
    content[first : first + 20] = b"\xff" * 20
    path.write_bytes(content)
    with one_line(CalibrationError, match="t.parquet' is not a parquet file"):
        read(path, tokenizer)


def test_a_name_that_no_file_can_have_is_no_file(tokenizer, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("a" * 300, "a\0b", "loop", "loop/x.txt", "."):
        with pytest.raises(CalibrationError, match="no text at"):
            read(tmp_path / name, tokenizer)


@pytest.mark.parametrize(
    "ids",
    [np.ones((2, 32), dtype=bool), np.array(["a"]), np.array([1.0]), np.array([], int),
     np.ones((2, 2, 2), dtype=np.int64)],
)  # fmt: skip
def test_what_no_token_ids_are(ids, tmp_path):
    with pytest.raises(CalibrationError, match="token ids are"):
        token_ids(ids)
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(CalibrationError, match=r"ids.npy' holds no token ids .*: token ids are"):
        read(tmp_path / "ids.npy", None)


@pytest.mark.parametrize("ids", [torch.rand(3, 4), torch.ones(40, dtype=torch.bool)])
def test_what_no_token_ids_are_in_safetensors(ids, tmp_path):
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    with pytest.raises(
        CalibrationError, match=f"holds no token ids.*token ids are whole numbers, got {ids.dtype}"
    ):
        read(tmp_path / "ids.safetensors", None)


@pytest.fixture
def short(monkeypatch):
    """Texts of 1000 characters are long."""
    monkeypatch.setattr(module, "LONG_TEXT", 1000)
    monkeypatch.setattr(module, "PIECE", 100)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("length", "pieces"), [(1000, False), (1001, True)])
def test_a_text_is_tokenised_whole_up_to_a_length(length, pieces, tokenizer, tmp_path):
    path = tm.text_file(tmp_path / "t.txt", length)
    stream = read(path, tokenizer)
    assert stream.in_pieces is pieces
    assert (stream.ids.numel(), stream.characters) == (length, length)
    whole = tokenizer(pathlib.Path(path).read_text())[
        "input_ids"
    ]  # this tokenizer looks at no neighbours
    assert stream.ids.tolist() == whole


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["prefix", "ends"])
def test_pieces_make_the_tokens_of_the_whole_text(kind, request, tmp_path):
    """Of a tokenizer that puts a space before any text, and of one that adds a start and an end."""
    if kind == "prefix":
        folder = request.getfixturevalue("shared") / "models/stories260K"
        folder = tm.readable(folder, tmp_path / "model")
    else:
        folder = tmp_path
        tm.write_tokenizer(folder)
        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        fast.save(str(folder / "tokenizer.json"))
    encode = load_tokenizer(folder)
    text = "Once upon a time there was a cat.\n" * 60
    (tmp_path / "a.txt").write_text(text)
    stream = read(tmp_path / "a.txt", encode)
    assert stream.in_pieces
    assert stream.ids.tolist() == encode(text)["input_ids"]
    assert stream.special_tokens == (1 if kind == "prefix" else 2)
    part = read(tmp_path / "a.txt", encode, needed=100)
    assert part.ids.tolist() == stream.ids.tolist()[: part.ids.numel()]
    assert part.special_tokens == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.parquet"])
def test_a_long_text_is_read_no_further_than_needed(name, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK", 300)
    text = "the cat sat on a mat.\n\n" * 400
    if name == "t.txt":
        (tmp_path / name).write_text(text)
    elif name == "t.jsonl":
        lines = [json.dumps({"text": text[:230]})] * 40 + ["not JSON: nobody comes here"]
        (tmp_path / name).write_text("\n".join(lines))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text[:230]] * 40}), tmp_path / name)
    heard = []
    stream = read(tmp_path / name, tokenizer, needed=250, progress=lambda *step: heard.append(step))
    assert stream.in_pieces
    assert 250 <= stream.ids.numel() < 450
    assert stream.characters == stream.ids.numel()
    assert heard[0][0] == "tokenising"
    assert heard[-1] == ("tokenising", 250, 250)
    record = sample_windows(stream, samples=2, seq_len=10, seed=0).record()
    assert (record["in_pieces"], record["characters"]) == (True, stream.characters)


@pytest.mark.usefixtures("short")
def test_one_long_text_has_one_digest_however_much_of_it_is_needed(tokenizer, tmp_path):
    path = tm.text_file(tmp_path / "t.txt", 5000)
    digests = {read(path, tokenizer, needed=needed).text_sha256 for needed in (10, 3000, None)}
    assert digests == {hashlib.sha256(pathlib.Path(path).read_bytes()[:1000]).hexdigest()}
    assert read(path, tokenizer).ids.numel() == 5000


def test_pieces_end_where_lines_or_words_do_and_are_the_text(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 40)
    text = "one two three four five six\n\nseven eight nine ten eleven " * 9 + "x" * 100
    pieces = list(module._pieces([text[:70], text[70:75], text[75:]]))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 40
    assert sum(piece[-1].isspace() for piece in pieces) >= len(pieces) - 4
    assert pieces[0].endswith("six\n\n")


CODE = """
import pathlib
from transformers import PreTrainedTokenizerFast
pathlib.Path({mark!r}).write_text("ran")
class Odd(PreTrainedTokenizerFast):
    pass
"""


def test_code_that_comes_with_a_tokenizer_runs_only_if_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    folder = tmp_path / "model"
    folder.mkdir()
    tm.write_tokenizer(folder)
    path, mark = folder / "tokenizer_config.json", tmp_path / "mark"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": [None, "odd.Odd"]}}
    path.write_text(json.dumps(config))
    (folder / "odd.py").write_text(CODE.format(mark=str(mark)))
    with one_line(ModelError, match=r"runs Python code of its own.*trust_remote_code=True"):
        load_tokenizer(folder)
    assert not mark.exists()
    load_tokenizer(folder, trust_remote_code=True)
    assert mark.read_text() == "ran"
    out = tmp_path / "out"
    out.mkdir()
    carry_files(folder, out)
    assert type(load_tokenizer(out, trust_remote_code=True)).__name__ == "Odd"
    (folder / "tokenizer.json").rename(folder / "odd.vocab")
    with pytest.raises(ModelError, match="runs Python code of its own"):
        load_tokenizer(folder)


def test_a_stream_knows_the_start_that_was_put_before_its_text(tokenizer, tmp_path):
    tm.write_tokenizer(tmp_path)
    begun = load_tokenizer(tm.begin_texts(tmp_path))
    for number, text in enumerate(["Once upon a time. " * 50, "\n" * 200 + "There was a cat."]):
        (tmp_path / f"{number}.txt").write_text(text)
        stream = read(tmp_path / f"{number}.txt", begun)
        assert stream.start.tolist() == stream.ids[:1].tolist() == [0]
        assert read(tmp_path / f"{number}.txt", tokenizer).start.tolist() == []
