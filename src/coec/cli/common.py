"""Shared parts of the commands: where text goes, how an option is declared, how flags are spelled.

The package is used from Python too, where nobody can pass a flag. So a message that tells what to
change writes a keyword argument, `seq_len=64`, of which `spelled` makes `--seq-len 64`.
"""

import inspect
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer
from rich.console import Console

from coec.events import duration, recording
from coec.settings import NAMES, TABLE, Setting

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Values: TypeAlias = dict[str, Any]
"""Arguments by their names."""

notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
results = Console(highlight=False, markup=False, soft_wrap=True)

_METAVARS: dict[object, str] = {
    float: "X", int: "N", str: "TEXT", Path: "PATH", list[str]: "TEXT", list[Path]: "PATH",
}  # fmt: skip
"""What stands for a value in help; NAME for the names that are allowed."""


def argument(text: str, metavar: str) -> Any:
    """Declare an argument by the name that help texts have for it."""
    return typer.Argument(help=text, show_default=False, metavar=metavar)


class CommandFlag(NamedTuple):
    """Option of a command.

    Attributes:
        name: as in Python.
        type: of its value, or the names that are allowed; None for a switch, which has no value.
        text: its help.
        panel: the heading under which help lists it.
        metavar: what stands for a value in help.
        words: names that are allowed beside numbers.
        ends: ends the command where a switch is given, before anything else is read.
    """

    name: str
    type: Any
    text: str
    panel: str | None = None
    metavar: str | None = None
    words: tuple[str, ...] = ()
    ends: Callable[[typer.Context, bool], None] | None = None

    @classmethod
    def of(cls, row: "Option") -> "CommandFlag":
        """Return the flag of a setting; options of a compensation stand under its name."""
        if isinstance(row, CommandFlag):
            return row
        panel = f"Options of --compensation {', '.join(row.methods)}" if row.methods else None
        metavar = "|".join((_METAVARS[row.kind], *row.words)) if row.words else None
        return cls(row.name, row.kind, row.text, panel, metavar, row.words)

    def parameter(self) -> inspect.Parameter:
        """Return the parameter of the command's function."""
        flag, is_name = flag_of(self.name), isinstance(self.type, tuple)
        is_switch = self.type is None
        forms = [flag] if is_switch else [f"{flag}/--no-{flag[2:]}"] if self.type is bool else []
        metavar = self.metavar or ("NAME" if is_name else _METAVARS.get(self.type))
        option = typer.Option(
            *forms, help=self.text, show_default=False, metavar="" if forms else metavar,
            rich_help_panel=self.panel, parser=self._number_or_word if self.words else None,
            is_eager=self.ends is not None, callback=self.ends,
        )  # fmt: skip
        value_type: Any = Literal[self.type] if is_name else self.type
        annotation: Any = Annotated[bool if is_switch else value_type | None, option]
        keyword, default = inspect.Parameter.KEYWORD_ONLY, False if is_switch else None
        return inspect.Parameter(self.name, keyword, default=default, annotation=annotation)

    def _number_or_word(self, value: str) -> float | str:
        try:
            return value if value in self.words else float(value)
        except ValueError as error:
            names = " or ".join(("a number", *self.words))
            raise typer.BadParameter(f"'{value}' is not {names}") from error


Option: TypeAlias = CommandFlag | Setting


def switch(name: str, text: str) -> CommandFlag:
    """Return an option without a value."""
    return CommandFlag(name, None, text)


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[HELP_ALL.name] = True
        print(ctx.get_help())
        raise typer.Exit


HELP_ALL = switch("help_all", "Show every flag, and those of each compensation.")._replace(
    ends=_show_all
)
"""The flag of commands with many flags; its name in a context says that it was given."""
DEVICE = CommandFlag.of(next(row for row in TABLE if row.name == "device"))
CONFIG_FILE = CommandFlag("config", Path, "TOML file with any of the settings here; flags win.")
FORCE = switch("force", "Replace the model that OUT holds.")
RESTART = switch("restart", "Discard an unfinished run into the same folder, and begin anew.")
TRUST_REMOTE_CODE = switch(
    "trust_remote_code",
    "Run the Python code that the tokenizer of MODEL, or of another model that is read, names: "
    "with all that it imports, a configuration's class, and code of other hub repositories. "
    "Code that builds models is run by `eval --via transformers` alone. Use it only for models "
    "that you trust.",
)
QUIET = switch("quiet", "No progress on stderr, neither bars nor lines.")
JSON = switch("json", "One JSON object on stdout, nothing else.")


def with_flags(*rows: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**flags` in a command's signature by a parameter for every flag."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [CommandFlag.of(row).parameter() for row in rows]
        # Places of the command as they are → **flags replaced by the flags → typer reads both
        signature = inspect.signature(command)
        places = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*places, *flags]
        )
        command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
        FLAGS.update(flag.name for flag in flags)
        return command

    return decorate


def given(flags: Mapping[str, Any], table: Iterable[Option | str]) -> Values:
    """Pick the flags of a table that the user gave."""
    names = [flag if isinstance(flag, str) else flag.name for flag in table]
    return {name: flags[name] for name in names if flags.get(name) is not None}


def settings_of(flags: Mapping[str, Any]) -> Values:
    """Combine the settings of a file and the flags, which win."""
    from coec.planning.recipe import read_settings

    # File → flags, which win
    settings = read_settings(flags["config"]) if flags["config"] else {}
    settings |= given(flags, (name for name in flags if name in NAMES))
    return settings | {"trust_remote_code": flags["trust_remote_code"]}


def check_out(out: object, flags: Mapping[str, Any]) -> None:
    """Raise BadParameter for a missing OUT."""
    if out is None and not flags["dry_run"]:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")


def show(record: object, lines: Iterable["RenderableType"], as_json: bool) -> None:
    """Print what a command found: as one JSON object, or in lines and tables."""
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
    """Return an estimate of time in words: a minute at least, of which starting takes a part."""
    return f"about {duration(seconds)}" if seconds >= 120 else "about 1 min"


@contextmanager
def noting() -> Iterator[None]:
    """Print as notes what is recorded inside, which no report holds."""
    with recording() as events:
        try:
            yield
        finally:
            for event in events:
                notes.print(f"note: {spelled(event)}")


def quieten() -> None:
    """Keep transformers and the hub's client from writing beside the results.

    What a later release will remove is for those who call it, peft or us, and not for users. Nor is
    what peft says of fused experts, whose parts get their additions under other names.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


FLAGS: set[str] = set()
"""Arguments that are a flag of some command; `with_flags` adds them."""
_ARGUMENT = re.compile(
    r"(?P<quoted>(?<!\w)'[^']*')"  # a path, or what the user wrote: left as it is
    r"|(?<![\w.])(?P<name>[a-z][a-z_]*)=(?P<value>\"[^\"]*\"|[\w.:/+-]*[\w/+-])"
)


def flag_of(name: str) -> str:
    """Flag of an argument."""
    return f"--{name.replace('_', '-')}"


def spelled(message: str) -> str:
    """Write every argument of Python in a message as a flag: `force=True` is `--force`."""

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in FLAGS:
            return match[0]
        value = value.strip('"')
        return flag_of(name) if value == "True" else f"{flag_of(name)} {value}"

    return _ARGUMENT.sub(flag, message)


def measuring(model: str, out: str, text: str) -> str:
    """Return a line with the command that measures `out`, on other text than it was made from."""
    from coec.calibration.sources import is_named

    evaluated = text if is_named(text) or text == "self" else "OTHER.txt"  # test split, or seed
    return f"measure it: coec eval {named(out)} --baseline {named(model)}{text_flag(evaluated)}"


def text_flag(text: str) -> str:
    """Return the flag that names a text; "" for the text that commands take without one."""
    return "" if text == "wikitext2" else f" --text {shlex.quote(text)}"


def named(path: str) -> str:
    """Return a path as a command line in the current folder names it."""
    current = Path.cwd()
    inside = Path(path).is_relative_to(current)
    return shlex.quote(str(Path(path).relative_to(current)) if inside else path)
