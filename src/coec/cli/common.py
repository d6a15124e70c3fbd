"""What the commands share: where text goes, how an option is declared, progress bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from coec.compensation import COMPENSATIONS
from coec.recipe import DTYPES, SOLVE_DTYPES
from coec.selection import SELECTIONS

notes = Console(stderr=True, highlight=False, soft_wrap=True)
results = Console(highlight=False, soft_wrap=True)

if TYPE_CHECKING:
    Dtype: TypeAlias = str
    SolveDtype: TypeAlias = str
    Selection: TypeAlias = str
    Method: TypeAlias = str
else:
    Dtype = Literal[tuple(DTYPES)]
    SolveDtype = Literal[SOLVE_DTYPES]
    Selection = Literal[tuple(SELECTIONS)]
    Method = Literal[tuple(COMPENSATIONS)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def setting(text: str, **more: Any) -> Any:
    """An option whose help text says its default."""
    return typer.Option(help=text, show_default=False, **more)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per phase on stderr."""
    columns = (
        TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=notes)
    tasks: dict[str, Any] = {}

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
