"""Events, progress and tables: what a run tells.

Events are safeguards that fired, recorded for the report: there are no silent fallbacks. Numerical
code calls `record`. The owner of a report wraps the work in `recording` and stores the list.
Outside of `recording` an event becomes a Python warning.
"""

import html
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


@contextmanager
def showing(progress: Progress | bool | None, *, first: bool = True) -> Iterator[Progress | None]:
    """Yield a caller's callback, or bars on stderr: for True, for None in a terminal or notebook.

    Only the `first` of several processes shows bars.
    """
    if callable(progress):
        yield progress
        return
    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not first or not (seen if progress is None else progress):
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
