"""Progress of a command: bars on a terminal, plain lines in a file or a log, or nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from coec.cli.common import notes
from coec.cli.signals import interruptible
from coec.events import RESUMING, Progress, bars, duration

_HALF_MINUTE = 30.0
"""Seconds between two lines; lines of finished blocks and cells are printed at once."""
_LONG = ("solving", "allocating")
"""Phases of blocks, each of which may take long and has a line when it is finished."""


@contextmanager
def showing_progress(quiet: bool = False) -> Iterator[Progress]:
    """Show on stderr how far each phase is, and how long the rest of it takes.

    A line says from where a run goes on, in any case, apart from the progress of this run.
    """
    interruptible()
    # Bars on a terminal, lines in a log, nothing if quiet
    display: AbstractContextManager[Progress] = bars(notes)
    if quiet:
        display = nullcontext(lambda phase, count, total: None)
    elif not notes.is_terminal:
        display = nullcontext(ProgressLines().advance)
    with display as show:

        def advance(phase: str, count: int, total: int) -> None:
            if not phase.startswith(RESUMING):
                show(phase, count, total)
                return
            items = phase.removeprefix(RESUMING).strip()
            notes.print(f"resuming: {count:,} of {total:,} {items} are done")

        yield advance


@dataclass
class ProgressLines:
    """Plain lines, few enough for a log of hours.

    Attributes:
        clock: seconds.
        say: prints a line.
    """

    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda line: notes.print(line)
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
