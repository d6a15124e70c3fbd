"""Outputs at URLs: the files of a folder, whole or not at all."""

import shutil

import fsspec
import pytest
import torch

import coec
import tiny_models as tm
from coec.errors import OutputError
from coec.execution import remote as module
from coec.execution.remote import Remote, is_url

SETTINGS = {"samples": 8, "seq_len": 32, "compensation": "ridge-to-slice"}


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    yield
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama", torch.float32), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture
def pruned(dense, tmp_path):
    tokens = tm.token_file(tmp_path / "tokens.npy")

    def prune(out, **more):
        return coec.prune(dense, out, calibration=tokens, **SETTINGS | more)

    return prune


def held(url):
    """Every file there but the report, which holds seconds, by its path."""
    files, root = fsspec.core.url_to_fs(url)
    return {
        path.removeprefix(root).strip("/"): files.cat_file(path)
        for path in files.find(root)
        if not path.endswith("coec.json")
    }


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_model_at_a_url_is_that_of_a_folder(kind, pruned, tmp_path):
    url = "memory://bucket/models/out" if kind == "memory" else f"file://{tmp_path}/made/out"
    report = pruned(url)
    assert report.out == url
    pruned(tmp_path / "out")
    here = held(f"file://{tmp_path}/out")
    assert "model.safetensors" in here
    assert held(url) == here
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nothing is left of it
    with pytest.raises(OutputError, match="is not empty; choose another place"):
        pruned(url)


def test_only_a_model_of_ours_is_replaced_and_nothing_of_it_stays(pruned):
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/out/notes.txt", b"mine")
    for force, match in ((False, "is not empty"), (True, "has no coec.json")):
        with pytest.raises(OutputError, match=match):
            pruned("memory://bucket/out", force=force)
    assert files.cat_file("/bucket/out/notes.txt") == b"mine"
    files.pipe_file("/bucket/out/coec.json", b"{}")
    pruned("memory://bucket/out", force=True)
    assert "notes.txt" not in held("memory://bucket/out")


def test_a_copy_that_fails_is_taken_up_again_without_solving(pruned, monkeypatch, tmp_path):
    put, copied = Remote.put, []

    def torn(self, folder):
        raise OutputError("the place refuses")

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", torn)
        with pytest.raises(OutputError, match="the place refuses"):
            pruned("memory://bucket/out")
    assert not held("memory://bucket/out")
    monkeypatch.setattr(
        Remote, "put", lambda self, folder: copied.append(folder) or put(self, folder)
    )
    seen = []
    pruned("memory://bucket/out", progress=lambda *state: seen.append(state[0]))
    assert "solving" not in seen
    assert copied
    pruned(tmp_path / "out")
    assert held("memory://bucket/out") == held(f"file://{tmp_path}/out")


def test_the_configuration_comes_last(pruned, monkeypatch):
    order, files = [], type(fsspec.filesystem("memory"))
    put = files.put_file
    monkeypatch.setattr(
        files, "put_file", lambda self, here, there: order.append(there) or put(self, here, there)
    )
    pruned("memory://bucket/out")
    assert order[-1].endswith("/config.json")
    assert len(order) > 3


def test_a_copy_that_was_killed_before_it_tidied_up_is_forgotten(pruned):
    staged = module._staged("memory://bucket/out")
    shutil.copytree(shutil.os.path.dirname(__file__), staged)
    pruned("memory://bucket/out")
    assert not staged.exists()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nosuch://bucket/out", "cannot be used: Protocol not known: nosuch"),
        ("file:///proc/no/such/out", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_work(url, match, pruned):
    with pytest.raises(OutputError, match=match):
        pruned(url)


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
