"""Outputs at URLs: the files of a folder, whole or not at all."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

import bucket
import coec
import tiny_models as tm
from coec.errors import OutputError
from coec.execution.output import is_url
from coec.pipeline import write as writing

SETTINGS = {"preset": "paper", "samples": 8, "seq_len": 32, "compensation": "ridge-to-slice"}


@pytest.fixture(autouse=True)
def _places(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(bucket.PLACE, str(tmp_path / "bucket"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama", torch.float32), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture
def pruned(dense, tmp_path):
    tokens = tm.token_file(tmp_path / "tokens.npy")

    def prune(out, **more):
        return coec.prune(dense, out, calibration=tokens, **SETTINGS | more)

    return prune


URL = "bucket://models/out"


def held(folder):
    """Every file there but the report, which holds seconds, by its path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "coec.json"
    }


@pytest.fixture
def there(tmp_path):
    """The folder that URL leads to."""
    return tmp_path / "bucket/models/out"


def test_a_model_at_a_url_is_that_of_a_folder(pruned, there, tmp_path):
    assert pruned(URL).out == URL
    pruned(tmp_path / "out")
    assert "model.safetensors" in held(there)
    assert held(there) == held(tmp_path / "out")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nothing is left of it
    with pytest.raises(OutputError, match="is not empty; choose another folder"):
        pruned(URL)


@pytest.mark.parametrize("path", [False, True])
def test_a_url_of_this_machine_is_its_folder(path, pruned, dense, tmp_path):
    """It is judged as that, and the model is made beside it."""
    url = f"file://{tmp_path}/made/out"
    report = pruned(Path(url) if path else url)
    assert Path(report.out) == tmp_path / "made/out"
    assert not (tmp_path / "cache").exists()
    with pytest.raises(OutputError, match="lie inside each other"):
        coec.prune(report.out, f"file://{tmp_path}/made/out", force=True, **SETTINGS)


@pytest.mark.parametrize("name", ["precious", "results/mine.txt", "coec/other", "LICENSES/mine"])
def test_only_a_model_of_ours_and_nothing_else_is_replaced(name, pruned, there):
    mine = there / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for force, match in ((False, "is not empty"), (True, "has no coec.json")):
        with pytest.raises(OutputError, match=match):
            pruned(URL, force=force)
    mine.unlink()
    pruned(URL)
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match=f"holds '{name}': only a folder that holds a model and"):
        pruned(URL, force=True)
    assert mine.read_text() == "mine"


def test_a_model_is_replaced_and_nothing_of_it_stays(pruned, there):
    pruned(URL)
    (there / "model-00001-of-00002.safetensors").write_text("of another")
    (there / "odd.py").write_text("from .parts import x")
    (there / "parts.py").write_text("")
    own = {"auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (there / "tokenizer_config.json").write_text(json.dumps(own))
    before = held(there).keys()
    pruned(URL, force=True)
    assert before - held(there).keys() == {"model-00001-of-00002.safetensors", "odd.py", "parts.py"}


def test_the_dense_model_is_not_replaced_by_what_is_made_of_it(pruned, there):
    pruned(URL)
    dense = held(there)
    with pytest.raises(OutputError, match="holds the model '.*', of which it would be made"):
        coec.prune(there, URL, calibration="self", force=True, **SETTINGS)
    assert held(there) == dense


def test_what_appears_while_the_model_is_made_or_copied_stays(pruned, there, monkeypatch):
    def appear(*state):
        there.mkdir(parents=True, exist_ok=True)
        (there / "mine.txt").write_text("mine")

    with pytest.raises(OutputError, match="is not empty"):
        pruned(URL, progress=appear)
    assert list(held(there)) == ["mine.txt"]
    (there / "mine.txt").unlink()

    def torn(self, here, path, **options):
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(bucket.Bucket, "put_file", torn)
        with pytest.raises(OutputError, match="gone"):
            pruned(URL)
    appear()
    with pytest.raises(OutputError, match="holds 'mine.txt', which appeared while the model was"):
        pruned(URL)
    (there / "mine.txt").unlink()
    pruned(URL)


@pytest.mark.parametrize("force", [False, True])
def test_a_copy_that_was_cut_off_anywhere_goes_on_with_what_is_missing(
    force, pruned, there, monkeypatch, tmp_path
):
    """Every file arrives once, the configuration last."""
    monkeypatch.setattr(writing, "MAX_SHARD", "40KB")
    if force:
        pruned(URL, compensation="none")
    put, copied, cut = bucket.Bucket.put_file, [], [0]

    def torn(self, here, path, **options):
        if len(copied) == cut[0]:
            Path(self._join(path)).parent.mkdir(parents=True, exist_ok=True)
            Path(self._join(path)).write_text("half")
            raise ConnectionError("the server is gone")
        put(self, here, path, **options)
        copied.append(path.removeprefix("models/out/"))

    seen = []
    monkeypatch.setattr(bucket.Bucket, "put_file", torn)

    while copied[-1:] != ["config.json"]:
        with contextlib.suppress(OutputError):
            pruned(URL, force=force, progress=lambda *state: seen.append(state[0]))
        cut[0] += 1
    assert seen.count("solving") == 2  # every block once
    assert len(copied) == len(set(copied)) > 8
    assert copied[-1] == "config.json"
    pruned(tmp_path / "out")
    assert held(there) == held(tmp_path / "out")


def test_a_server_that_does_not_answer_loses_nothing(pruned, there, monkeypatch, tmp_path):
    def gone(self, *arguments, **options):
        raise TimeoutError

    for refuses in ("put_file", "isfile"):
        with monkeypatch.context() as patch:
            patch.setattr(bucket.Bucket, refuses, gone)
            with pytest.raises(OutputError, match="TimeoutError; the same command goes on from"):
                pruned(URL)
    seen = []
    pruned(URL, progress=lambda *state: seen.append(state[0]))
    assert "solving" not in seen
    pruned(tmp_path / "out")
    assert held(there) == held(tmp_path / "out")


def test_half_a_copy_is_not_begun_anew_upon(pruned, there, monkeypatch):
    """Without its journal nobody knows whose it is; the journal is not thrown away for that."""
    put = bucket.Bucket.put_file

    def torn(self, here, path, **options):
        if path.endswith("coec.json"):
            raise ConnectionError("gone")
        put(self, here, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(bucket.Bucket, "put_file", torn)
        with pytest.raises(OutputError, match="gone"):
            pruned(URL)
    for force, match in ((False, "is not empty"), (True, "has no coec.json")):
        with pytest.raises(OutputError, match=match):
            pruned(URL, restart=True, force=force)
    seen = []
    pruned(URL, progress=lambda *state: seen.append(state[0]))
    assert "solving" not in seen


def test_a_file_that_did_not_arrive_whole_is_an_error(pruned, monkeypatch):
    put = bucket.Bucket.put_file

    def short(self, here, path, **options):
        put(self, here, path, **options)
        Path(self._join(path)).write_bytes(b"")

    monkeypatch.setattr(bucket.Bucket, "put_file", short)
    with pytest.raises(OutputError, match="has 0 bytes there"):
        pruned(URL)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nosuch://bucket/out", "cannot be used: Protocol not known: nosuch"),
        ("file:///proc/no/such/out", "not enough disk space"),
        ("memory://x", "would be gone with it: give a folder, or the URL of a server"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_work(url, match, pruned):
    with pytest.raises(OutputError, match=match):
        pruned(url)


def test_a_place_that_may_not_be_written_is_refused_before_work(pruned, monkeypatch):
    def denied(self, path, value):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bucket.Bucket, "pipe_file", denied)
    with pytest.raises(OutputError, match="cannot be written: .*Permission denied"):
        pruned(URL, progress=lambda *state: pytest.fail("work had begun"))


def test_other_commands_write_no_urls(dense, tmp_path):
    with pytest.raises(OutputError, match="is a URL, and only `coec prune` writes models there"):
        coec.collect(dense, "s3://bucket/stats", calibration=tm.token_file(tmp_path / "t.npy"))


@pytest.mark.parametrize(
    ("out", "expected"),
    [("s3://b/x", True), ("memory://x", True), ("out", False), ("/a:b/c", False), ("C:/x", False),
     ("a/b://c", False)],
)  # fmt: skip
def test_what_is_a_url(out, expected):
    assert is_url(out) == expected
