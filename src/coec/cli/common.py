"""Shared parts of the commands: where text goes, and how an option is declared."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import typer
from rich.console import Console

from coec.settings import TABLE, Setting

Values: TypeAlias = dict[str, Any]
"""Arguments by their names."""

notes = Console(stderr=True, highlight=False, soft_wrap=True)
results = Console(highlight=False, soft_wrap=True)

NAME, WHOLE, NUMBER, TEXT, PATH = "NAME", "N", "X", "TEXT", "PATH"
"""What stands for a value in help."""
_METAVARS: dict[object, str] = {float: NUMBER, int: WHOLE, str: TEXT, Path: PATH}


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


_DEVICE = next(row.text for row in TABLE if row.name == "device")
Device = Annotated[str | None, setting(_DEVICE, TEXT)]
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
    Path | None, setting("TOML file with any of the settings here; flags win.", PATH)
]
StatisticsFolder = Annotated[
    Path | None,
    setting("What `coec collect` wrote, instead of a dense pass; brings its settings.", PATH),
]
Force = Annotated[bool, switch("--force", "Replace the model that OUT holds.")]
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
        metavar = self.metavar or _METAVARS.get(self.type, NAME)
        name = self.name.replace("_", "-")
        names = [f"--{name}/--no-{name}"] if self.type is bool else []
        option = setting(self.text, None if names else metavar, self.panel, *names)
        annotation = Annotated[value_type | None, option]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=None, annotation=annotation)


DEVICE_FLAG = CommandFlag("device", str, _DEVICE)


def with_flags(
    first: Sequence[CommandFlag | Setting], last: Sequence[CommandFlag | Setting] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**flags` in a command's signature by a parameter for every flag.

    Args:
        first: listed before the command's own switches.
        last: listed at the end of its help.
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


def given(flags: Mapping[str, Any], table: Sequence[CommandFlag] | None = None) -> Values:
    """Pick the flags that the user gave, or those of one table."""
    names = flags if table is None else [flag.name for flag in table]
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
