"""Text that a caller holds, as a list of strings or a data set, wherever text is read."""

import datasets
import pytest

import coec
import tiny_models as tm
from coec.errors import CalibrationError, UnfinishedError
from prunings import interrupt

PRUNING = {"preset": "fast", "sparsity": 0.3, "samples": 8, "seq_len": 16}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents, and the file that says the same."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    tm.text_file(path, 4000)
    whole = path.read_text()
    parts = [whole[first : first + 500] for first in range(0, 4000, 500)]
    path.write_text("\n\n".join(parts))
    return parts, str(path)


def data_set(parts):
    return datasets.Dataset.from_dict({"id": list(range(len(parts))), "story": parts})


KINDS = {
    "list": lambda parts: (parts, {}),
    "tuple": lambda parts: (tuple(parts), {}),
    "rows": lambda parts: ([{"story": part} for part in parts], {"text_column": "story"}),
    "data set": lambda parts: (data_set(parts), {"text_column": "story"}),
    "streamed": lambda parts: (data_set(parts).to_iterable_dataset(), {"text_column": "story"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_the_file_that_says_the_same(kind, dense, texts, tmp_path):
    parts, file = texts
    text, column = KINDS[kind](parts)
    outs = tmp_path / "given", tmp_path / "file"
    given = coec.prune(dense, outs[0], calibration=text, **column, **PRUNING)
    coec.prune(dense, outs[1], calibration=file, **PRUNING)
    assert given.recipe["calibration"] == given.calibration["source"] == "documents"
    assert tm.same_weights(*outs)
    measured = coec.perplexity(dense, text, seq_len=16, **column)
    assert measured.perplexity == coec.perplexity(dense, file, seq_len=16).perplexity
    assert measured.text_sha256 == coec.perplexity(dense, file, seq_len=16).text_sha256


@pytest.mark.slow
def test_a_training_takes_them_too(dense, texts, tmp_path):
    parts, file = texts
    coec.prune(dense, tmp_path / "out", calibration=parts, **PRUNING)
    training = {"tokens": 512, "seq_len": 16, "learning_rate": 1e-3}
    given, same = (
        coec.recover(dense, tmp_path / "out", tmp_path / name, text=text, **training)
        for name, text in (("given", parts), ("file", file))
    )
    assert given.recoveries[-1]["curve"] == same.recoveries[-1]["curve"]
    assert given.recoveries[-1]["text"]["source"] == "documents"


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_documents_only(dense, texts, tmp_path, monkeypatch):
    parts, _ = texts
    out, settings = tmp_path / "out", PRUNING | {"preset": "paper", "rotation": "left"}
    interrupt(monkeypatch, coec.prune, dense, out, calibration=parts, **settings)
    with pytest.raises(UnfinishedError, match="calibration"):
        coec.prune(dense, out, calibration=parts[:-1], **settings)
    seen = []
    coec.prune(dense, out, calibration=list(parts), progress=lambda *a: seen.append(a), **settings)
    assert ("resuming blocks", 1, 2) in seen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (7, "text is a name, a path, token ids, a list of strings or a data set, got a int"),
        ((part for part in "ab"), "got a generator"),
        (b"bytes", "got a bytes"),
        ({"train": ["a"]}, r"text has several splits \(train\): give one"),
        ([], "'documents' holds no text"),
        (["", "  "], "'documents' holds no text"),
        (["a", 5], "document 2 of the text is a int, no string"),
        ([{"body": "a"}], r"row 1 .* no text in column 'text' \(it has: body\); .*text_column"),
        (["too short"], "too little calibration text: 'documents' has 9 tokens"),
    ],
)
def test_what_is_no_text_is_one_line(text, message, dense, tmp_path):
    with pytest.raises(CalibrationError, match=message):
        coec.prune(dense, tmp_path / "out", calibration=text, **PRUNING)
    assert not list(tmp_path.iterdir())
