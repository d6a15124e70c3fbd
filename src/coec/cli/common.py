"""What the commands share: where text goes, how an option is declared."""

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console

from coec.settings import TABLE, DtypeName, Setting

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
        "Run the Python code that a tokenizer's files name, of MODEL and of every model whose "
        "tokenizer is read (a baseline, those of a grid): all that it imports, a configuration's "
        "class, and code of other hub repositories that it refers to. Code that builds models is "
        "never run. Only for models you trust.",
    ),
]
Config = Annotated[
    Path | None, setting("TOML file with any of the settings here; flags win.", PATH)
]
Statistics = Annotated[
    Path | None,
    setting("What `coec collect` wrote, instead of a dense pass; brings its settings.", PATH),
]
Force = Annotated[bool, switch("--force", "Replace the model that OUT holds.")]
Restart = Annotated[
    bool, switch("--restart", "Throw away what an unfinished run into the same folder left.")
]

METAVARS: dict[Any, str] = {float: NUMBER, int: WHOLE, str: TEXT}


def _parameter(one: Setting) -> inspect.Parameter:
    """A setting as an argument of a command."""
    kind: Any = Literal[one.kind] if isinstance(one.kind, tuple) else one.kind
    panel = f"Options of --compensation {', '.join(one.methods)}" if one.methods else None
    metavar = METAVARS.get(one.kind, NAME)
    option = setting(one.text, metavar, rich_help_panel=panel)
    if one.kind is bool:
        flag = one.name.replace("_", "-")
        option = typer.Option(
            f"--{flag}/--no-{flag}", help=one.text, show_default=False, rich_help_panel=panel
        )
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def with_settings(
    *tables: tuple[Setting, ...],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces `**flags` in a command's signature by a flag for every setting.

    Those of the last table come after the command's own switches, and so end its help.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        places = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        switches = [p for p in own if p.kind is p.KEYWORD_ONLY]
        *first, last = [[_parameter(one) for one in table] for table in tables]
        flags = [*itertools.chain.from_iterable(first), *last]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*places, *itertools.chain.from_iterable(first), *switches, *last]
        )
        command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
        return command

    return decorated


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
