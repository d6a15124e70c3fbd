"""How far a command is, in a log."""

import pytest

from coec import pruning
from coec.progress import ProgressLines
from outcomes import succeeded
from problems import failing

FEW = ("--preset", "paper", "--samples", 4, "--seq-len", 32, "--compensation", "none",
       "--device", "cpu")  # fmt: skip


@pytest.fixture
def said(dense, text, tmp_path):
    """A pruning into a folder that is still to be named."""
    return lambda out: ("prune", dense, tmp_path / out, "--calibration", text, *FEW)


def told(*calls):
    """The lines of calls `(seconds, phase, done, total)`."""
    said, now = [], [0.0]
    lines = ProgressLines(clock=lambda: now[0], say=said.append)
    for seconds, *call in calls:
        now[0] = seconds
        lines.advance(*call)
    return said


def test_every_block_has_a_line_with_what_is_left():
    assert told((0, "solving", 1, 4), (60, "solving", 2, 4), (120, "solving", 3, 4),
                (180, "solving", 4, 4), (190, "trying all", 1, 2)) == [
        "solving: 1 of 4",
        "solving: 2 of 4, about 2 min left",
        "solving: 3 of 4, about 60 s left",
        "solving: 4 of 4",
        "trying all: 1 of 2",
    ]  # fmt: skip


def test_of_other_phases_there_is_a_line_every_half_minute():
    calls = [(seconds, "calibrating", seconds + 1, 1000) for seconds in range(100)]
    assert told(*calls) == [
        "calibrating: 31 of 1,000, about 16 min left",
        "calibrating: 61 of 1,000, about 16 min left",
        "calibrating: 91 of 1,000, about 15 min left",
    ]


def test_a_phase_that_begins_once_more_is_timed_anew():
    first = [(60 * n, "calibrating", n + 1, 100) for n in range(100)]
    second = [(6000 + 60 * n, "calibrating", n + 1, 100) for n in range(3)]
    assert told(*first, *second)[-2:] == [
        "calibrating: 2 of 100, about 98 min left",
        "calibrating: 3 of 100, about 97 min left",
    ]


def test_a_run_into_a_log_says_how_far_it_is_and_quiet_says_nothing(said, run):
    _, err = succeeded(run(*said("out")))
    assert "solving: 1 of 2\n" in err
    assert "solving: 2 of 2\n" in err
    status, _, err = run(*said("again"), "--quiet")
    assert (status, err) == (0, "")


@pytest.mark.parametrize("more", [(), ("--quiet",)])
def test_a_run_that_goes_on_says_so(more, said, run, monkeypatch):
    once = failing(pruning.solve, KeyboardInterrupt(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "solve", once)
        status, _, err = run(*said("out"), *more)
    assert status == 130
    assert "resuming" not in err
    _, err = succeeded(run(*said("out"), *more))
    assert "resuming: 1 of 2 blocks are done\n" in err
