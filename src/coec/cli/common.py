"""Shared parts of the commands: where text goes, how an option is declared, how flags are spelled.

The package is used from Python too, where nobody can pass a flag. So a message that tells what to
change writes a keyword argument, `seq_len=64`, of which `spelled` makes `--seq-len 64`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import typer
from rich.console import Console

from coec.settings import NAMES, TABLE, Setting

Values: TypeAlias = dict[str, Any]
"""Arguments by their names."""

notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
results = Console(highlight=False, markup=False, soft_wrap=True)

_METAVARS: dict[object, str] = {
    float: "X", int: "N", str: "TEXT", Path: "PATH", list[str]: "TEXT", list[Path]: "PATH",
}  # fmt: skip
"""What stands for a value in help; NAME for the names that are allowed."""


def switch(flag: str, text: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(flag, help=text, metavar="")


def setting(text: str, metavar: str | None, panel: str | None = None, *names: str) -> Any:
    """Declare an option whose help text says its default."""
    return typer.Option(
        *names, help=text, show_default=False, metavar=metavar, rich_help_panel=panel
    )


def argument(text: str, metavar: str) -> Any:
    """Declare an argument by the name that help texts have for it."""
    return typer.Argument(help=text, show_default=False, metavar=metavar)


Json = Annotated[bool, switch("--json", "One JSON object on stdout, nothing else.")]
TrustRemoteCode = Annotated[
    bool,
    switch(
        "--trust-remote-code",
        "Run the Python code that a tokenizer's files name, of MODEL and of every model whose "
        "tokenizer is read (a baseline, those of a grid): all that it imports, a configuration's "
        "class, and code of other hub repositories that it refers to. Code that builds models is "
        "never run. Only for models you trust.",
    ),
]
Config = Annotated[
    Path | None, setting("TOML file with any of the settings here; flags win.", "PATH")
]
Restart = Annotated[
    bool, switch("--restart", "Throw away what an unfinished run into the same folder left.")
]


class CommandFlag(NamedTuple):
    """Option of a command: its name as in Python, the type of its value or the names that are
    allowed, its help, the heading under which help lists it, and what stands for a value.
    """

    name: str
    type: Any
    text: str
    panel: str | None = None
    metavar: str | None = None

    @classmethod
    def of(cls, row: Setting) -> "CommandFlag":
        """CommandFlag of a setting; options of a compensation stand under its name."""
        panel = f"Options of --compensation {', '.join(row.methods)}" if row.methods else None
        return cls(row.name, row.kind, row.text, panel)

    def parameter(self) -> inspect.Parameter:
        """Parameter of the command's function."""
        value_type: Any = Literal[self.type] if isinstance(self.type, tuple) else self.type
        is_name = isinstance(self.type, tuple) or self.type is None
        metavar = self.metavar or ("NAME" if is_name else _METAVARS.get(self.type))
        flag = flag_of(self.name)
        names = [f"{flag}/--no-{flag[2:]}"] if self.type is bool else []
        option = setting(self.text, "" if names else metavar, self.panel, *names)
        annotation = Annotated[value_type | None, option]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=None, annotation=annotation)


DEVICE_FLAG = CommandFlag("device", str, next(row.text for row in TABLE if row.name == "device"))


def with_flags(
    first: Sequence[CommandFlag | Setting], last: Sequence[CommandFlag | Setting] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**flags` in a command's signature by a parameter for every flag.

    Help lists the `first` ones before the command's own switches, and the `last` behind them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        before, after = (
            [(CommandFlag.of(row) if isinstance(row, Setting) else row).parameter() for row in rows]
            for rows in (first, last)
        )
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        places = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        switches = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*places, *before, *switches, *after]
        )
        command.__annotations__ |= {flag.name: flag.annotation for flag in (*before, *after)}
        return command

    return decorate


def given(flags: Mapping[str, Any], table: Iterable[CommandFlag | str] | None = None) -> Values:
    """Pick the flags that the user gave, or those of one table."""
    names = [f if isinstance(f, str) else f.name for f in (flags if table is None else table)]
    return {name: flags[name] for name in names if flags[name] is not None}


def settings_of(
    config: Path | None, flags: Mapping[str, Any], *, trust_remote_code: bool
) -> Values:
    """Combine the settings of a file and the flags, which win."""
    from coec.planning.recipe import read_settings

    settings = read_settings(config) if config else {}
    return settings | given(flags) | {"trust_remote_code": trust_remote_code}


def quieten() -> None:
    """Keep transformers and the hub's client from writing beside the results."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


FLAGS = NAMES | {
    "baseline", "batch_size", "context", "dtype", "force", "jobs", "limit", "max_windows", "model",
    "new_tokens", "no_tokenizer", "prompt_tokens", "repeats", "restart", "statistics", "tasks",
    "tasks_data", "text", "trust_remote_code", "warmup",
}  # fmt: skip
"""Arguments that are a flag of some command."""
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
