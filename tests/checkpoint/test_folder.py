"""A folder appears whole or not at all, and nothing is lost for it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import portalocker
import pytest
import torch

import coec
import tiny_models as tm
from coec.checkpoint import folder as module
from coec.checkpoint.folder import JOURNAL, LOCK, check_output, check_space, claimed
from coec.checkpoint.journal import journal
from coec.errors import ModelError, OutputError
from coec.events import recording
from coec.models.folder import carry_files, foreign_entry
from outcomes import WORK, one_line, raising


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return tm.save(tm.tiny("llama", torch.float32), root / "model", tokenizer=False)


@pytest.fixture
def model(original, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(original, tmp_path / "model")


def fill(folder, text="new"):
    (folder / "model.safetensors").write_text(text)
    (folder / "config.json").write_text('{"model_type": "llama"}')


@contextmanager
def new_folder(out, *, force=False):
    """A run without pieces: its folder appears where it ends well."""
    with journal(out, {}, force=force) as done:
        yield done.new
        done.complete()


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


WHOLE = ["out", "out/config.json", "out/model.safetensors"]


def refused(match, run):
    """A run that may not begin."""
    with pytest.raises(OutputError, match=match), run:
        raise WORK


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
def test_on_any_error_no_folder_and_no_parent_is_left(error, tmp_path):
    def write():
        with new_folder(tmp_path / "a/b/out") as folder:
            fill(folder)
            raise error("stop")

    with pytest.raises(OutputError if error is OSError else error, match="stop"):
        write()
    assert not list(tmp_path.iterdir())


def test_the_folder_appears_only_at_the_end(tmp_path):
    out = tmp_path / "out"
    with new_folder(out) as folder:
        fill(folder)
        assert not out.exists()
        assert folder.parent == tmp_path / "out.partial"
    assert listing(tmp_path) == WHOLE
    (tmp_path / "plain").mkdir()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        fill(folder)
    assert listing(tmp_path) == WHOLE


@pytest.fixture
def old(tmp_path):
    """An output that holds a model."""
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "old")
    return tmp_path / "out"


def test_a_model_is_replaced_when_that_is_asked_for(old, tmp_path):
    with new_folder(old, force=True) as folder:
        fill(folder)
        assert (old / "model.safetensors").read_text() == "old"
    assert (old / "model.safetensors").read_text() == "new"
    assert listing(tmp_path) == WHOLE


def test_an_exchange_that_fails_puts_the_old_folder_back(old, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "rename", raising(OSError("no")))
    with pytest.raises(OutputError, match="could not write"), new_folder(old, force=True) as folder:
        fill(folder)
    assert (old / "model.safetensors").read_text() == "old"
    assert (tmp_path / "out.partial/new/model.safetensors").read_text() == "new"


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_during_the_run_is_never_replaced(force, tmp_path):
    """The result is not thrown away either: it may have taken hours."""
    out = tmp_path / "out"

    def write():
        with new_folder(out, force=force) as folder:
            fill(folder)
            out.mkdir()
            (out / "notes.txt").write_text("mine")

    with pytest.raises(OutputError, match="appeared during the run.*out-1'|holds 'notes.txt'"):
        write()
    assert (out / "notes.txt").read_text() == "mine"
    result = tmp_path / ("out.partial/new" if force else "out-1") / "model.safetensors"
    assert result.read_text() == "new"
    assert (tmp_path / "out.partial").exists() == force


def tidy(out):
    """What the next run into a folder does with what a killed one left."""
    with module.claimed(out):
        module.empty(module.partial_of(out))


def test_of_two_runs_into_one_folder_the_second_is_refused(tmp_path):
    out = tmp_path / "out"
    with new_folder(out) as folder:
        fill(folder)
        refused("another run is writing", new_folder(out))
        with pytest.raises(OutputError, match="another run is writing"):
            tidy(out)
    assert listing(tmp_path) == WHOLE
    refused("is not empty", new_folder(out))


CHILD = """
import os, signal, sys
from pathlib import Path
from coec.checkpoint.journal import journal
from coec.checkpoint import folder as output
with journal(Path(sys.argv[1]), {}, force=True) as done:
    output.rename = lambda one, to: (os.rename(one, to), os.kill(os.getpid(), signal.SIGKILL))
    (done.new / "model.safetensors").write_text("half")
    (done.new / "config.json").write_text("{}")
    done.complete()
"""


@pytest.mark.slow
def test_a_model_whose_replacement_was_killed_comes_back(old, tmp_path):
    """Between the two renames; at every other moment in `tests/crash`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", CHILD, old], env=environment)
    assert child.returncode == -signal.SIGKILL
    assert not old.exists()
    tidy(old)
    assert (old / "model.safetensors").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_that_name_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.tex").write_text("mine")
    refused("holds 'thesis.tex', which coec did not write", new_folder(tmp_path / "out"))
    assert listing(tmp_path) == ["out.partial", "out.partial/thesis.tex"]


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_folder_named_like_ours_is_not_emptied_without_our_lock(name, tmp_path):
    mine = tmp_path / f"out.partial/{name}/thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    refused(f"holds '{name}'", new_folder(tmp_path / "out"))
    with pytest.raises(OutputError, match=f"holds '{name}'"):
        tidy(tmp_path / "out")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["new", "work", "old", JOURNAL])
def test_nothing_behind_a_link_among_ours_is_removed(name, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("mine")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / LOCK).write_text("")
    target = precious / "thesis.tex" if name == JOURNAL else precious
    (tmp_path / "out.partial" / name).symlink_to(target)
    for attempt in (new_folder(tmp_path / "out"), claimed(tmp_path / "out")):
        refused(f"holds a '{name}' that is a link", attempt)
    assert (precious / "thesis.tex").read_text() == "mine"


def test_a_link_to_a_place_of_another_name_is_not_ours(tmp_path):
    (tmp_path / "precious/new").mkdir(parents=True)
    (tmp_path / "precious" / LOCK).write_text("")
    (tmp_path / "out.partial").symlink_to(tmp_path / "precious")
    refused("is a link", new_folder(tmp_path / "out"))
    assert listing(tmp_path / "precious") == [LOCK, "new"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_an_event(code, tmp_path, monkeypatch):
    error = portalocker.LockException("no locks")
    error.__cause__ = OSError(code, "no locks")
    monkeypatch.setattr(module.portalocker, "lock", raising(error))
    with recording() as events, new_folder(tmp_path / "out") as folder:
        fill(folder)
    assert "has no locks (no locks)" in events[0]
    assert listing(tmp_path) == WHOLE


def test_a_place_that_may_not_be_written_is_an_error_of_the_output(tmp_path, monkeypatch):
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr(module.Path, "mkdir", raising(denied))
    refused("could not write .*Permission denied", new_folder(tmp_path / "new/out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "entry", [".git/HEAD", "src/main.py", "index.html", "notes.md", "coec/other", "data/x.csv",
              "package.json", "node_modules/a.js"]
)  # fmt: skip
def test_only_what_is_a_model_and_nothing_else_is_replaced(entry, model, original, tmp_path):
    check_output(model, original, force=True)
    path = model / entry
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(OutputError, match=f"holds '{entry.split('/')[0]}.*nothing else is rep"):
        check_output(model, original, force=True)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (["config.json", "README.md", "LICENSE"], "holds no weights"),
        (["model.safetensors"], "holds no config.json"),
        (["model.safetensors", "config.json"], "holds a config.json that is of no model"),
    ],
)
def test_a_configuration_alone_makes_no_model(files, why, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    assert foreign_entry(tmp_path).startswith(why)


def test_a_link_to_a_folder_is_not_ours(model, tmp_path):
    (tmp_path / "precious").mkdir()
    (model / "coec").symlink_to(tmp_path / "precious")
    assert foreign_entry(model) == "holds 'coec/'"


def test_licences_travel_by_their_kind(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    names = ["LICENSE", "LICENSE.txt", "license.md", "LICENCE", "NOTICE.md", "USE_POLICY.md",
             "COPYING", "tokenizer.json", "generation_config.json"]  # fmt: skip
    for name in [*names, "model.safetensors", "config.json", "README.md", "train.py"]:
        (tmp_path / "a" / name).write_text(name)
        (tmp_path / "a" / name).chmod(0o400)
    carry_files(tmp_path / "a", tmp_path / "b")
    assert listing(tmp_path / "b") == sorted(names)


@pytest.mark.parametrize(
    ("mode", "copied"), [(0o444, 0o644), (0o664, 0o644), (0o400, 0o600), (0o640, 0o640)]
)
def test_nobody_else_may_read_what_travels_who_could_not_before(mode, copied, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/LICENSE").write_text("mine")
    (tmp_path / "a/LICENSE").chmod(mode)
    mask = os.umask(0o022)
    try:
        carry_files(tmp_path / "a", tmp_path / "b")
    finally:
        os.umask(mask)
    assert (tmp_path / "b/LICENSE").stat().st_mode & 0o777 == copied


@pytest.mark.parametrize(
    ("target", "travels"),
    [("secret", False), ("model/README.md", True), ("other/LICENSE", True),
     ("hub/models--a--b/blobs/0a1b", True), ("hub/blobs/0a1b", False)],
)  # fmt: skip
def test_a_link_out_of_the_model_is_not_followed_to_what_is_not_of_a_model(
    target, travels, original, model, tokens, tmp_path
):
    """But to the hub's blobs, and to a file of that name: models are folders of links, too."""
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / target).write_text("text")
    (model / "LICENSE").symlink_to(tmp_path / target)
    copy = tmp_path / "copy"
    copy.mkdir()
    if travels:
        carry_files(model, copy)
        assert (copy / "LICENSE").read_text() == "text"
        assert not (copy / "LICENSE").is_symlink()
        return
    with pytest.raises(ModelError, match="LICENSE' is a link to '.*', which would be copied"):
        coec.prune(model, tmp_path / "out", calibration=tokens, samples=24, seq_len=32)
    assert not (tmp_path / "out.partial").exists()


def test_a_tokenizer_s_own_code_and_vocabulary_travel_and_may_be_replaced(model, tmp_path):
    own = {"auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    (model / "odd.py").write_text("import os\nfrom .parts import x\n")
    names = ["odd.py", "parts.py", "x.tiktoken", "tekken.json", "tokenizer.model.v3"]
    for name in [*names[1:], ".gitattributes", ".DS_Store"]:
        (model / name).write_text("")
    (model / ".cache/huggingface/download").mkdir(parents=True)
    assert foreign_entry(model) is None
    (tmp_path / "b").mkdir()
    carry_files(model, tmp_path / "b")
    assert set(names) < set(listing(tmp_path / "b"))
    assert not [name for name in listing(tmp_path / "b") if name.startswith(".")]
    (model / "train.py").write_text("")
    assert foreign_entry(model) == "holds 'train.py'"
    (model / "train.py").unlink()
    (model / ".cache/mine").mkdir()
    assert foreign_entry(model) == "holds '.cache/'"


@pytest.mark.parametrize(
    ("out", "match"),
    [
        ("link", "lie inside each other"),
        ("link/out", "lie inside each other"),
        ("file/out", "is not a folder"),
        ("loop/out", "is no place for an output"),
        ("x" * 300, "is no place for an output"),
        ("a\0b", "is no place for an output"),
    ],
)
def test_where_no_output_can_be_it_is_refused(out, match, model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    with one_line(OutputError, match=match):
        check_output(tmp_path / out, model, force=True)


def test_an_empty_folder_may_be_filled_and_a_model_replaced(model, original, tmp_path):
    (tmp_path / "empty").mkdir()
    for out in ("empty", "not/yet/there"):
        check_output(tmp_path / out, original, force=False)
    check_output(model, original, force=True)
    with pytest.raises(OutputError, match=r"pass force=True to replace"):
        check_output(model, original, force=False)


def test_space_is_asked_of_the_disk_that_will_hold_the_output(tmp_path, monkeypatch):
    asked, usage = [], shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda path: asked.append(path) or usage._replace(free=10**9)
    )
    check_space(tmp_path / "a/b", 10**9)
    with pytest.raises(OutputError, match=r"2\.00 GB needed, 1\.00 GB free"):
        check_space(tmp_path / "a/b", 2 * 10**9)
    assert asked == [tmp_path, tmp_path]


@pytest.mark.parametrize("out", ["~", "~/out", "~user/out"])
def test_a_home_directory_that_nobody_named_is_no_place(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for check in (
        lambda: module.resolved(Path(out)),
        lambda: check_output(Path(out), tmp_path / "model", force=False),
        lambda: module.check_file(Path(out), b"", force=False),
    ):
        with pytest.raises(OutputError, match="nobody replaced ~: give the whole path"):
            check()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["s3://bucket/out", Path("hf://org/out"), "file:///tmp/out"])
def test_an_output_at_a_url_is_refused(out, model):
    with pytest.raises(OutputError, match=r"is a URL: write to a folder, and copy .*hf upload"):
        coec.prune(model, out, calibration="self")
