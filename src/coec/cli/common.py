"""What several commands share: flags, consoles, and lines that more than one of them prints."""

import json
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from coec.cli.flags import Flag, spelled, switch
from coec.cli.signals import interruptible
from coec.events import RESUMING, Progress, duration, recording

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
results = Console(highlight=False, markup=False, soft_wrap=True)

CONFIG_FILE = Flag("config", Path, "TOML file with any of the settings here; flags win.")
FORCE = switch("force", "Replace the model that OUT holds.")
RESTART = switch("restart", "Discard an unfinished run into the same folder, and begin anew.")
TRUST_REMOTE_CODE = switch(
    "trust_remote_code",
    "Run the Python code that a model's tokenizer names; with eval --via transformers, the code "
    "that builds the model too. Use it only for models that you trust.",
)
QUIET = switch("quiet", "No progress on stderr, neither bars nor lines.")
JSON = switch("json", "One JSON object on stdout, nothing else.")


@contextmanager
def showing_progress(quiet: bool = False) -> Iterator[Progress]:
    """Show on stderr how far each phase is, and how long the rest of it takes.

    A line says from where a run goes on, in any case, apart from the progress of this run.
    """
    from coec.progress import ProgressLines, bars  # imports torch

    interruptible()
    # Bars on a terminal, lines in a log, nothing if quiet
    display: AbstractContextManager[Progress] = bars(notes)
    if quiet:
        display = nullcontext(lambda phase, count, total: None)
    elif not notes.is_terminal:
        display = nullcontext(ProgressLines(notes.print).advance)
    with display as show:

        def advance(phase: str, count: int, total: int) -> None:
            if not phase.startswith(RESUMING):
                show(phase, count, total)
                return
            items = phase.removeprefix(RESUMING).strip()
            notes.print(f"resuming: {count:,} of {total:,} {items} are done")

        yield advance


def check_out(out: object, flags: Mapping[str, Any]) -> None:
    """Raise BadParameter for a missing OUT."""
    if out is None and not flags["dry_run"]:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")


def show(record: object, lines: Iterable["RenderableType"], as_json: bool) -> None:
    """Print the result of a command: as one JSON object, or in lines and tables.

    Of several processes only the first prints.
    """
    from coec.parallel import is_first  # imports torch

    if not is_first():
        return
    if as_json:
        print(json.dumps(record))
        return
    for line in lines:
        (print if isinstance(line, str) else results.print)(line)


def table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> "Table":
    """Return a table without lines."""
    from rich.table import Table

    rich_table = Table(*heads, box=None, header_style="bold")
    for row in rows:
        rich_table.add_row(*row)
    return rich_table


def rough(seconds: float) -> str:
    """Return an estimate of time in words: at least a minute, part of which is the start."""
    return f"about {duration(seconds)}" if seconds >= 120 else "about 1 min"


@contextmanager
def noting() -> Iterator[None]:
    """Print as notes the events that are recorded inside, which no report holds."""
    with recording() as events:
        try:
            yield
        finally:
            for event in events:
                notes.print(f"note: {spelled(event)}")


def quieten() -> None:
    """Keep transformers, peft and the hub's client from writing between the results."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


def measuring(
    model: str, out: str, text: str, column: str = "text", *, compared: bool = True
) -> str:
    """Return a line with the command that measures `out`, on other text than it was made from.

    If the two models have different vocabularies, they are not `compared` by token.
    """
    from coec.config import OWN
    from coec.text.sources import is_named

    other = is_named(text) or (compared and text == OWN)  # test split, or seed
    baseline = f" --baseline {named(model)}" if compared else ""
    evaluated = text_flag(text, column) if other else text_flag("OTHER.txt")
    return f"measure it: coec eval {named(out)}{baseline}{evaluated}"


def text_flag(text: str, column: str = "text") -> str:
    """Return the flags that name a text; "" for the text that commands take without one."""
    if text == "wikitext2":
        return ""
    named_column = "" if column == "text" else f" --text-column {shlex.quote(column)}"
    return f" --text {shlex.quote(text)}{named_column}"


def named(path: str) -> str:
    """Return a path as a command line in the current folder names it."""
    current = Path.cwd()
    inside = Path(path).is_relative_to(current)
    return shlex.quote(str(Path(path).relative_to(current)) if inside else path)
