"""How far a command is: bars on a terminal, plain lines in a file or a log, or nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from coec.cli import interruptible
from coec.cli.common import notes, switch
from coec.events import RESUMING, Progress, duration

Quiet: TypeAlias = Annotated[
    bool, switch("--quiet", "No progress on stderr, neither bars nor lines.")
]

HALF_MINUTE = 30.0
"""Seconds between two lines, but for those of finished blocks and cells."""
LONG = ("solving", "reconstructing", "allocating", "trying", "cells")
"""Phases of blocks or cells, each of which may take long: every one has a line when it is done."""


@contextmanager
def showing_progress(quiet: bool = False) -> Iterator[Progress]:
    """Shows on stderr how far each phase is, and how long the rest of it takes.

    What a run goes on from is said in any case, in one line.
    """
    interruptible()
    if quiet:
        yield _resuming_or(lambda phase, done, total: None)
    elif notes.is_terminal:
        with _bars() as advance:
            yield _resuming_or(advance)
    else:
        yield _resuming_or(Lines().advance)


def _resuming_or(show: Progress) -> Progress:
    """Tells what an earlier run has done from how far this one is."""

    def advance(phase: str, done: int, total: int) -> None:
        if not phase.startswith(RESUMING):
            show(phase, done, total)
            return
        what = phase.removeprefix(RESUMING).strip()
        notes.print(f"resuming: {done:,} of {total:,} {what} are done", markup=False)

    return advance


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar per phase."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Bars(*columns, console=notes)
    tasks: dict[str, TaskID] = {}

    def advance(phase: str, done: int, total: int) -> None:
        bar.start()  # only now: an error in the checks leaves no empty line
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total)
        bar.update(tasks[phase], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            bar.stop()


@dataclass
class Lines:
    """Plain lines, few enough for a log of hours.

    Attributes:
        clock: seconds.
        say: prints a line.
    """

    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda line: notes.print(line, markup=False)
    _begun: dict[str, tuple[float, int]] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)
    _last: float | None = None

    def advance(self, phase: str, done: int, total: int) -> None:
        """Prints how far a phase is, if it is time for that."""
        now = self.clock()
        self._last = now if self._last is None else self._last
        if done <= self._done.get(phase, -1):  # the phase begins once more
            del self._begun[phase]
        self._done[phase] = done
        began, first = self._begun.setdefault(phase, (now, done))
        if not phase.startswith(LONG):
            if now - self._last < HALF_MINUTE:
                return
            self._last = now
        line = f"{phase}: {done:,} of {total:,}"
        if done > first and done < total:
            line += f", about {duration((now - began) / (done - first) * (total - done))} left"
        self.say(line)
