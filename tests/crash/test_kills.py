"""A run that is ended at any moment goes on to the same result, and leaves nothing else.

    pytest -m crash                        100 boundaries and 100 random moments of each command
    COEC_CRASH_RUNS=1000 pytest -m crash   every boundary, and 1,000 moments

A boundary is every call that changes the folder, and every fsync (`driver`).
"""

from random import Random

import pytest
from runs import COMMANDS, FORCED, RUNS, spread

PRUNINGS = [name for name, argv in COMMANDS.items() if argv[0] == "prune"]
STATUS = {"kill": -9, "power": -9, "term": 143}


def _end_and_go_on(here, wanted, solved, **how):
    """Ends the command at one moment, and sees that it goes on to what is wanted.

    Args:
        here: where it runs.
        wanted: what an undisturbed run leaves.
        solved: the blocks that such a run solves.
        how: it is ended.
    """
    answer = here.run(**how)
    if "at" in how:
        assert answer["status"] == STATUS[how["what"]], here.log()
    before, done = here.recorded(), here.finished(wanted)
    answer = here.run()
    if done and here.name not in FORCED:
        assert (answer["status"], "make room" in here.log()) == (1, False), here.log()
        assert any(said in here.log() for said in ("is not empty", "exists; choose")), here.log()
    else:
        assert answer["status"] == 0, here.log()
        if here.name in PRUNINGS:
            assert sorted(answer["solved"]) == sorted(set(solved) - before)
    assert here.listing() == wanted
    here.clear()


def _at_boundaries(here, undisturbed, what, count):
    wanted, answer = undisturbed(here.name)
    events = answer["events"]
    wrong = []
    for at in spread(len(events), count):
        try:
            _end_and_go_on(here, wanted, answer["solved"], at=at, what=what)
        except AssertionError as error:
            wrong.append(f"{what} before event {at}, {events[at]}: {error}")
            here.clear()
            if len(wrong) == 3:
                break
    assert not wrong, "\n".join(wrong)


@pytest.mark.crash
@pytest.mark.parametrize("what", STATUS)
@pytest.mark.parametrize("name", COMMANDS)
def test_ended_at_boundaries(name, what, place, undisturbed):
    _at_boundaries(place(name), undisturbed, what, RUNS)


@pytest.mark.crash
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments(name, place, undisturbed):
    here, (wanted, answer) = place(name), undisturbed(name)
    draw = Random(name)
    for _ in range(RUNS):
        after = draw.uniform(0, answer["seconds"])
        try:
            _end_and_go_on(here, wanted, answer["solved"], after=after)
        except AssertionError as error:
            raise AssertionError(f"killed after {after:.4f} s: {error}") from error
