"""Finished pieces survive whatever ends a run, and only what is whole and asked for is used."""

import errno
import json
import os

import pytest

from coec.checkpoint import journal as module
from coec.checkpoint.folder import JOURNAL, LOCK, NEW, WORK
from coec.checkpoint.journal import describe_differences, encode_line, journal, unfinished
from coec.errors import ModelError, NumericalError, OptionError, OutputError, UnfinishedError
from coec.events import recording
from outcomes import raising

ASKED = {"sparsity": 0.3, "statistics": {"samples": 64, "model": "a" * 64}}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def text(words):
    return lambda path: path.write_text(words)


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def interrupted(out, pieces, identity=ASKED, error=KeyboardInterrupt, **options):
    """A run that finishes some pieces and is then ended by an error."""
    with pytest.raises(error), journal(out, identity, **options) as done:  # noqa: PT012
        for name in pieces:
            done.put(name, done.new / name, text(name), size=len(name))
        raise error("stop")


def refused(out, match, identity=ASKED, error=OutputError):
    """A run that may not begin."""
    with pytest.raises(error, match=match), journal(out, identity):
        raise AssertionError("work had begun")


def gone_on(out, there=(), missing=()):
    """The run goes on to its end, with some pieces and without others; returns the events."""
    with recording() as events, journal(out, ASKED) as done:
        assert all(name in done for name in there)
        assert not any(name in done for name in missing)
        done.complete()
    return events


full = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def killed_while_it_tidied_up(folder, monkeypatch):
    """A run that had put its one piece in place."""
    with monkeypatch.context() as patch:
        patch.setattr(module.output, "empty", lambda partial: None)
        with journal(folder / "out", ASKED) as done:
            done.put("one", done.new / "one", text("one"))
            done.complete()
    return folder / "out"


def test_what_is_finished_is_there_for_the_next_run(tmp_path):
    out = tmp_path / "a/out"
    interrupted(out, ["one", "two"])
    assert unfinished(out)
    assert listing(tmp_path) == [
        f"a/out.partial/{LOCK}", f"a/out.partial/{JOURNAL}",
        f"a/out.partial/{NEW}/one", f"a/out.partial/{NEW}/two",
    ]  # fmt: skip
    with journal(out, ASKED) as done:
        assert "one" in done
        assert "two" in done
        assert "three" not in done
        assert done.facts("two") == {"size": 3}
        assert done.path("two").read_text() == "two"
        done.put("three", done.work / "three", text("three"))
        done.complete()
    assert listing(tmp_path) == ["a/out/one", "a/out/two"]
    assert not unfinished(out)


def test_a_run_that_never_finished_a_piece_leaves_nothing(tmp_path):
    interrupted(tmp_path / "a/out", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [SystemExit, MemoryError, OutputError, RuntimeError, ModelError, NumericalError, OptionError],
)
def test_errors_keep_what_is_finished_and_say_so(error, tmp_path):
    with pytest.raises(error) as caught, journal(tmp_path / "out", ASKED) as done:  # noqa: PT012
        done.put("one", done.new / "one", text("one"))
        raise error("stop")
    assert caught.value.__notes__ == [f"what is finished is kept in '{tmp_path / 'out.partial'}'"]
    gone_on(tmp_path / "out", ["one"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsity": 0.5}, r"sparsity was 0\.3, now 0\.5"),
        ({"statistics": {"samples": 32, "model": "a" * 64}}, "samples was 64, now 32"),
        ({"statistics": {"samples": 64, "model": "b" * 64}}, 'model was "aaaaaaaaaaa…, now "bbb'),
        ({"alpha": 0.9}, r"alpha was null, now 0\.9"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "and 1 more"),
        ({"options": {"samples": 3}}, "samples was null, now 3"),  # not those of the statistics
        (None, r"something else \(by another command\)"),
    ],
)
def test_a_run_that_was_asked_for_something_else_is_named(changes, said, out, tmp_path):
    other = {"recovery": {"tokens": 1}, "pruned": "c", **dict.fromkeys("abcdefgh", 1)}
    asked = other if changes is None else ASKED | changes
    interrupted(out, ["one"])
    before = listing(tmp_path)
    refused(out, f"{said}.*restart=True", asked)
    assert listing(tmp_path) == before
    with journal(out, asked, restart=True) as done:
        assert "one" not in done
        done.complete()
    assert listing(tmp_path) == []
    assert out.is_dir()


def test_a_setting_of_two_stages_is_named_once():
    before, after = ({"pruning": {"seed": str(n)}, "recovery": {"seed": n}} for n in (0, 3))
    assert describe_differences(before, after) == "seed was 0, now 3"


def test_a_run_without_pieces_hinders_no_other(tmp_path):
    """Killed before its first piece, it has nothing to lose."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / LOCK).touch()
    (partial / JOURNAL).write_bytes(encode_line({"identity": {"sparsity": 0.1}}))
    with journal(tmp_path / "out", ASKED) as done:
        done.put("one", done.new / "one", text("one"))
        done.complete()
    assert listing(tmp_path) == ["out/one"]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_a_piece_that_was_not_finished(cut, out, tmp_path):
    interrupted(out, ["one", "two"])
    path = tmp_path / "out.partial" / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    with journal(out, ASKED) as done:
        assert "one" in done
        assert "two" not in done
        assert not (done.new / "two").exists()
        done.put("two", done.new / "two", text("again"))
        done.complete()
    assert (out / "two").read_text() == "again"


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "{}", '"x"', '{"name": "x"}',
        '{"name": "x", "file": "/etc/passwd", "bytes": 1, "sha256": "", "facts": {}}',
        '{"name": "x", "file": "new/../../x", "bytes": 1, "sha256": "", "facts": {}}',
        '{"name": 3, "file": "new/x", "bytes": 1, "sha256": "", "facts": {}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_journal_is_refused_by_its_line(line, number, out, tmp_path):
    interrupted(out, ["one"])
    path = tmp_path / "out.partial" / JOURNAL
    lines = path.read_text().splitlines()
    if line.startswith('{"name"'):  # whole, but not what a run writes
        line = encode_line(json.loads(line)).decode().strip()
    path.write_text("\n".join([*lines[:number], line, *lines[number:]]) + "\n")
    refused(out, f"line {number + 1}, is damaged: pass restart=True")
    with journal(out, ASKED, restart=True) as done:
        done.complete()


def test_a_line_that_says_something_else_than_what_was_written_is_refused(out, tmp_path):
    """What was recorded goes into the report, and no other file vouches for it."""
    interrupted(out, ["one", "two"])
    path = tmp_path / "out.partial" / JOURNAL
    path.write_text(path.read_text().replace('"size": 3', '"size": 4', 1))
    refused(out, "line 2, is damaged: pass restart=True", error=UnfinishedError)
    assert "new/two" in "".join(listing(tmp_path / "out.partial"))


@pytest.mark.parametrize("damage", [lambda p: p.write_text("eno"), lambda p: p.write_text("")])
def test_a_piece_whose_file_was_changed_is_made_again(damage, out, tmp_path):
    interrupted(out, ["one", "two"])
    damage(tmp_path / "out.partial/new/one")
    events = gone_on(out, ["two"], ["one"])
    assert "is not what was written: it is made again" in events[0]
    assert listing(out) == ["two"]


def test_files_that_nobody_recorded_go(out, tmp_path):
    interrupted(out, ["one"])
    (tmp_path / "out.partial/new/half.writing").write_text("")
    (tmp_path / f"out.partial/{WORK}/x").mkdir(parents=True)
    (tmp_path / f"out.partial/{WORK}/x/y").write_text("")
    gone_on(out)
    assert listing(tmp_path) == ["out/one"]


def test_a_run_killed_after_its_last_rename_is_found_finished(tmp_path, monkeypatch):
    """All that was left was to tidy up."""
    out = killed_while_it_tidied_up(tmp_path, monkeypatch)
    assert unfinished(out)
    assert (out / "one").exists()
    with journal(out, ASKED) as done:
        assert done.finished
    assert listing(tmp_path) == ["out/one"]


def test_what_appeared_instead_is_not_taken_for_the_result(tmp_path, monkeypatch):
    out = killed_while_it_tidied_up(tmp_path, monkeypatch)
    (out / "one").write_text("eno")
    refused(out, "is not empty")
    assert (out / "one").read_text() == "eno"


@pytest.mark.parametrize("when", ["write", "sync", "rename"])
def test_a_full_disk_keeps_what_is_finished(when, out, tmp_path, monkeypatch):
    with (  # noqa: PT012
        pytest.raises(OutputError, match="No space left on device; make room"),
        journal(out, ASKED) as done,
    ):
        done.put("one", done.new / "one", text("one"))
        if when != "write":
            monkeypatch.setattr(module.os, {"sync": "fsync", "rename": "rename"}[when], full)
        done.put("two", done.new / "two", full if when == "write" else text("two"))
    monkeypatch.undo()
    with journal(out, ASKED) as done:
        assert "one" in done
        assert "two" not in done
        done.put("two", done.new / "two", text("two"))
        done.complete()
    assert listing(tmp_path) == ["out/one", "out/two"]


def test_a_disk_that_was_full_from_the_start_has_nothing_left_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "fsync", full)
    refused(tmp_path / "out", "make room")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_thrown_away_by_an_interrupt_while_it_is_read(
    out, tmp_path, monkeypatch
):
    interrupted(out, ["one"])
    with monkeypatch.context() as patch:
        patch.setattr(module, "seal", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as caught, journal(out, ASKED):
            raise AssertionError("work had begun")
    assert caught.value.__notes__ == [f"what is finished is kept in '{tmp_path / 'out.partial'}'"]
    gone_on(out, ["one"])


def test_after_a_run_that_was_finished_another_one_may_be_asked_for(tmp_path, monkeypatch):
    """Killed while it tidied up, it has nothing to lose."""
    out = killed_while_it_tidied_up(tmp_path, monkeypatch)
    refused(out, "is not empty", ASKED | {"sparsity": 0.5})
    assert listing(tmp_path) == ["out/one"]


def test_removed_pieces_are_made_again_without_a_word(out):
    with pytest.raises(KeyboardInterrupt), journal(out, ASKED) as done:  # noqa: PT012
        done.put("one", done.work / "one", text("one"))
        done.put("two", done.work / "two", text("two"))
        done.remove("one")
        assert "one" not in done
        raise KeyboardInterrupt
    assert gone_on(out, ["two"], ["one"]) == []
