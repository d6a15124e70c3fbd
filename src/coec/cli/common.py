"""What the commands share: where text goes, how an option is declared, progress bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from coec.cli import interruptible
from coec.settings import TABLE, DtypeName

notes = Console(stderr=True, highlight=False, soft_wrap=True)
results = Console(highlight=False, soft_wrap=True)

Dtype: TypeAlias = DtypeName
NAME, WHOLE, NUMBER, TEXT, PATH = "NAME", "N", "X", "TEXT", "PATH"
"""What stands for a value in help."""


def switch(flag: str, text: str) -> Any:
    """An option that is there or not."""
    return typer.Option(flag, help=text, metavar="")


def setting(text: str, metavar: str, **more: Any) -> Any:
    """An option whose help text says its default."""
    return typer.Option(help=text, show_default=False, metavar=metavar, **more)


def argument(text: str, metavar: str) -> Any:
    """An argument by the name that the texts have for it."""
    return typer.Argument(help=text, show_default=False, metavar=metavar)


Device = Annotated[
    str | None,
    setting(next(one.text for one in TABLE if one.name == "device"), TEXT),
]
Json = Annotated[bool, switch("--json", "One JSON object on stdout, nothing else.")]
TrustRemoteCode = Annotated[
    bool,
    switch(
        "--trust-remote-code",
        "Let the model's tokenizer run its own Python code. Only for a model you trust.",
    ),
]


def quieten() -> None:
    """Keeps transformers and the hub's client from writing beside the results."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in flags.items() if value is not None}


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per phase on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    interruptible()
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
