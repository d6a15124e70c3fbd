"""A disk that fills up at any moment: one line that says so, and the same command goes on."""

import subprocess

import pytest
from runs import RUNS, spread

FULL = "No space left on device"


@pytest.fixture
def disk(tmp_path):
    """A file system of 48 MB: what a run wants to find free, and a little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system: run the tests as root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fills_up(here, wanted, at):
    start = here.listing()
    answer = here.run(at=at, what="fill")
    (here.root / "filler").unlink()
    said = [line for line in here.log().splitlines() if line.startswith("coec: ")]
    assert "Traceback" not in here.log()
    if answer["status"]:
        assert answer["status"] == 1
        assert FULL in said[0], here.log()
        assert "make room" in said[0]
        kept = [line for line in said[1:] if "what is finished is kept in" in line]
        assert bool(kept) == here.partial.exists(), here.log()
        if not kept:
            assert here.listing() == start, "something is left"
        answer = here.run()
        assert answer["status"] == 0, here.log()
    assert here.listing() == wanted
    here.clear()
    return bool(said)


@pytest.mark.crash
@pytest.mark.parametrize("name", ["prune", "export", "recover"])
def test_a_disk_that_fills_up_at_boundaries(name, disk, place, undisturbed):
    here, (wanted, answer) = place(name, disk), undisturbed(name)
    refused = [
        _fills_up(here, wanted, at)
        for at in spread(len(answer["events"]), min(6, RUNS) if name == "recover" else RUNS)
    ]
    assert 3 * sum(refused) >= len(refused)  # a full disk matters until the last byte is written
