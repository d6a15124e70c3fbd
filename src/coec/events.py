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
