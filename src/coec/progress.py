"""Progress: bars on a terminal or in a notebook, plain lines in a file or a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coec.events import Progress, duration
from coec.parallel import is_first

_HALF_MINUTE = 30.0
"""Seconds between two lines; lines of finished blocks are printed at once."""
_LONG = ("solving", "allocating")
"""Phases of blocks, each of which may take long and has a line when it is finished."""


@contextmanager
def showing(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """Yield a caller's callback, or bars on stderr: for True, for None in a terminal or notebook.

    Only the first of several processes shows bars.
    """
    if callable(progress):
        yield progress
        return
    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not is_first() or not (seen if progress is None else progress):
        yield None
        return
    from rich.console import Console

    with bars(Console(stderr=True)) as advance:
        yield advance


@contextmanager
def bars(console: Any) -> Iterator[Progress]:
    """Show a bar of rich for every phase, with its remaining time."""
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("{task.description:<16}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, progress.TaskID] = {}

    def advance(phase: str, count: int, total: int) -> None:
        bar.start()  # only now: an error in the checks leaves no empty line
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total)
        bar.update(tasks[phase], completed=count, total=total)

    try:
        yield advance
    finally:
        if tasks:
            bar.stop()


@dataclass
class ProgressLines:
    """Plain lines, few enough for a log of hours.

    Attributes:
        say: prints a line.
        clock: seconds.
    """

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _starts: dict[str, tuple[float, int]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _last: float | None = None

    def advance(self, phase: str, count: int, total: int) -> None:
        """Print how far a phase is, if it is time for that."""
        # Clock of the phase → whether it is time for a line → remaining time, by the rate so far
        time_now = self.clock()
        self._last = time_now if self._last is None else self._last
        if count <= self._counts.get(phase, -1):  # the phase begins once more
            del self._starts[phase]
        self._counts[phase] = count
        began, first = self._starts.setdefault(phase, (time_now, count))
        if not phase.startswith(_LONG):
            if time_now - self._last < _HALF_MINUTE:
                return
            self._last = time_now
        line = f"{phase}: {count:,} of {total:,}"
        if first < count < total:
            seconds = (time_now - began) / (count - first) * (total - count)
            line += f", about {duration(seconds)} left"
        self.say(line)
