"""What a safeguard did, recorded where the caller can report it: there are no silent fallbacks.

Numerical code calls `record`; whoever owns a report wraps the work in `recording` and stores the
list. With nobody recording, an event becomes a Python warning.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]
"""Told how far a long computation is: `(phase, done, total)`."""
RESUMING = "resuming"
"""The phase, followed by what is counted, in which a run says what it need not do again."""


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_current: ContextVar[list[str] | None] = ContextVar("coec_events", default=None)


@contextmanager
def recording() -> Iterator[list[str]]:
    """Collects the events recorded inside the `with` block, each distinct text once, in order."""
    events: list[str] = []
    token = _current.set(events)
    try:
        yield events
    finally:
        _current.reset(token)


def record(event: str) -> None:
    """Notes that a safeguard changed the course of a computation."""
    events = _current.get()
    if events is None:
        warnings.warn(event, RuntimeWarning, stacklevel=2)
    elif event not in events:
        events.append(event)
