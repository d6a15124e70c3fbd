"""A file that appears whole or not at all."""

import pytest

from coec.checkpoint.folder import JOURNAL, LOCK, NEW, appearing, check_file
from coec.errors import OutputError

KIND = b"GGUF"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "model.gguf"


def whole(partial):
    partial.write_bytes(b"GGUF new")


def write(out, work=whole, force=False):
    with appearing(out, KIND, force) as partial:
        work(partial)


def names(out):
    return sorted(path.name for path in out.parent.iterdir())


def test_it_appears_whole(out):
    def half(partial):
        whole(partial)
        assert not out.exists()

    write(out, half)
    assert out.read_bytes() == b"GGUF new"
    assert names(out) == ["model.gguf"]


def test_nothing_is_left_of_a_run_that_failed(out):
    def interrupted(partial):
        partial.write_bytes(b"GGUF half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(out, interrupted)
    assert names(out) == []


def partial(out):
    """A folder as a killed run leaves it."""
    folder = out.parent / "model.gguf.partial"
    folder.mkdir()
    (folder / LOCK).touch()
    return folder


def test_what_a_killed_run_left_is_written_anew(out):
    (partial(out) / NEW).write_bytes(b"GGUF half of a file that was longer")
    write(out)
    assert out.read_bytes() == b"GGUF new"
    assert names(out) == ["model.gguf"]


def test_a_file_of_somebody_elses_is_not_touched(out):
    strange = out.parent / "model.gguf.partial"
    strange.write_bytes(b"a letter to my aunt")
    with pytest.raises(OutputError, match="is a file .*, which coec did not write: move it away"):
        write(out)
    assert strange.read_bytes() == b"a letter to my aunt"


def test_an_unfinished_run_into_a_folder_of_that_name_is_kept(out):
    (partial(out) / JOURNAL).write_text("finished pieces")
    with pytest.raises(OutputError, match="holds an unfinished run into a folder"):
        write(out)
    assert (out.parent / "model.gguf.partial" / JOURNAL).read_text() == "finished pieces"


def test_what_is_there_stays_without_force(out):
    out.write_bytes(b"GGUF old")
    with pytest.raises(OutputError, match="pass force=True to replace it"):
        check_file(out, KIND, False)
    check_file(out, KIND, True)
    write(out, force=True)
    assert out.read_bytes() == b"GGUF new"


def test_the_old_file_is_there_until_the_new_one_is_whole(out):
    out.write_bytes(b"GGUF old")

    def full(partial):
        partial.write_bytes(b"GGUF half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        write(out, full, force=True)
    assert out.read_bytes() == b"GGUF old"
    assert names(out) == ["model.gguf"]


def test_force_replaces_nothing_of_another_kind(out):
    out.write_bytes(b"a letter to my aunt")
    with pytest.raises(OutputError, match="only such a file is replaced"):
        check_file(out, KIND, True)
    out.unlink()
    out.mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        check_file(out, KIND, True)


def test_what_appears_meanwhile_stays(out):
    def late(partial):
        whole(partial)
        out.write_bytes(b"GGUF of another")
        (out.parent / "model-1.gguf").write_bytes(b"GGUF of a third")

    with pytest.raises(OutputError, match=r"the result is in '.*model-2.gguf'"):
        write(out, late)
    assert out.read_bytes() == b"GGUF of another"
    assert (out.parent / "model-2.gguf").read_bytes() == b"GGUF new"
    assert names(out) == ["model-1.gguf", "model-2.gguf", "model.gguf"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(OutputError, match="is not a folder, so"):
        check_file(tmp_path / "none" / "model.gguf", KIND, False)
