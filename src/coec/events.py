"""Events, and the form of what a run tells.

Events are safeguards that fired, recorded for the report: there are no silent fallbacks. Numerical
code calls `record`. The owner of a report wraps the work in `recording` and stores the list.
Outside of `recording` an event becomes a Python warning.
"""

import html
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]
"""Callback for the progress of a long computation: `(phase, done, total)`."""
RESUMING = "resuming"
"""Phase of the work that a run need not do again; the counted thing follows it."""


def duration(seconds: float) -> str:
    """Write seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def as_html(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a table for notebooks."""
    cells = (f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in rows)
    return f"<table>{''.join(cells)}</table>"


_current: ContextVar[list[str] | None] = ContextVar("coec_events", default=None)


@contextmanager
def recording() -> Iterator[list[str]]:
    """Collect the events recorded inside the `with` block, each distinct text once, in order."""
    events: list[str] = []
    token = _current.set(events)
    try:
        yield events
    finally:
        _current.reset(token)


def record(event: str) -> None:
    """Note that a safeguard changed the course of a computation."""
    events = _current.get()
    if events is None:
        warnings.warn(event, RuntimeWarning, stacklevel=2)
    elif event not in events:
        events.append(event)
