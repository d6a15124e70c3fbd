"""Flags of the commands: made of the fields of settings, or declared one by one.

The package is used from Python too, where nobody can pass a flag. So a message that tells what to
change writes a keyword argument, `seq_len=64`, of which `spelled` makes `--seq-len 64`.
"""

import inspect
import re
import runpy
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, get_origin

import typer

from coec.config import Described, Settings, described
from coec.errors import OptionError, did_you_mean, first_line

Values: TypeAlias = dict[str, Any]
"""Arguments by their names."""
_METAVARS: dict[Any, str] = {float: "X", int: "N", str: "TEXT", Path: "PATH"}
"""What stands for a value in help; NAME if only some names are allowed."""


class Flag(NamedTuple):
    """A flag of a command.

    Attributes:
        name: as in Python.
        type: of its value; None for a switch, which has no value.
        text: its help.
        heading: the heading under which help lists it.
        metavar: what stands for a value in help.
        names: allowed values: in addition to numbers or functions, or as the only ones.
        functions: whether a function of the user's own is allowed, as FILE.py:NAME.
        callback: called if the switch is given, before anything else is read.
    """

    name: str
    type: Any
    text: str
    heading: str = ""
    metavar: str | None = None
    names: tuple[str, ...] = ()
    functions: bool = False
    callback: Callable[[typer.Context, bool], None] | None = None

    @classmethod
    def of(cls, field: Described) -> "Flag":
        """Return the flag of a field of settings."""
        number = next((kind for kind in (bool, float, int) if kind in field.kinds), str)
        is_text = str in field.kinds or Any in field.kinds
        kind, names = (str, ()) if is_text else (number, field.names)
        functions = any(get_origin(kind) is Callable for kind in field.kinds)
        return cls(field.name, kind, field.text, field.heading, names=names, functions=functions)

    def parameter(self) -> inspect.Parameter:
        """Return the parameter of the command's function."""
        flag, is_switch = flag_of(self.name), self.type is None
        forms = [flag] if is_switch else [f"{flag}/--no-{flag[2:]}"] if self.type is bool else []
        only_names = bool(self.names) and self.type is str and not self.functions
        metavar, parser = "|".join((_METAVARS.get(self.type, ""), *self.names)), None
        if self.functions:
            metavar, parser = "NAME|FILE.py:NAME", self.function_or_name
        elif only_names:
            metavar, parser = "NAME", self._name
        elif self.names:
            parser = self._number_or_name
        option = typer.Option(
            *forms, help=self.text, show_default=False, rich_help_panel=self.heading or None,
            metavar="" if forms else self.metavar or metavar,
            parser=parser,
            is_eager=self.callback is not None, callback=self.callback,
        )  # fmt: skip
        annotation: Any = Annotated[bool if is_switch else self.type | None, option]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=False if is_switch else None,
            annotation=annotation,
        )  # fmt: skip

    def _name(self, value: str) -> str:
        if value not in self.names:
            hint = did_you_mean(value, self.names)
            raise typer.BadParameter(f"'{value}' is not one of {', '.join(self.names)}{hint}")
        return value

    def _number_or_name(self, value: str) -> Any:
        try:
            return value if value in self.names else self.type(value)
        except ValueError as error:
            names = " or ".join(("a number", *self.names))
            raise typer.BadParameter(f"'{value}' is not {names}") from error

    def function_or_name(self, value: str) -> Any:
        """Return the function that FILE.py:NAME names, or a name that is allowed.

        Raises:
            BadParameter: the value is neither.
        """
        file, _, name = value.rpartition(":")
        if value in self.names:
            return value
        if not file.endswith(".py"):
            raise typer.BadParameter(f"'{value}' is not {', '.join(self.names)} or FILE.py:NAME")
        try:
            defined = runpy.run_path(file)
        except Exception as error:  # the user's own code
            raise typer.BadParameter(f"'{file}' cannot be run: {first_line(error)}") from error
        if name not in defined:
            raise typer.BadParameter(f"'{file}' defines no {name}")
        return defined[name]


def switch(name: str, text: str, heading: str = "") -> Flag:
    """Return a flag without a value."""
    return Flag(name, None, text, heading)


def argument(text: str, metavar: str) -> Any:
    """Declare an argument by the name that help texts have for it."""
    return typer.Argument(help=text, show_default=False, metavar=metavar)


def flags_of(cls: type[Settings], *without: str) -> list[Flag]:
    """Return the flags of all fields of settings but some."""
    return [Flag.of(field) for field in described(cls) if field.name not in without]


FLAGS: set[str] = set()
"""Arguments that are a flag of some command; `with_flags` adds them."""


def with_flags(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**flags` in a command's signature by a parameter for every flag."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature, parameters = inspect.signature(command), [flag.parameter() for flag in flags]
        places = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        vars(command)["__signature__"] = signature.replace(parameters=[*places, *parameters])
        command.__annotations__ |= {flag.name: flag.annotation for flag in parameters}
        FLAGS.update(flag.name for flag in flags)
        return command

    return decorate


def given(flags: Mapping[str, Any], names: Iterable[str]) -> Values:
    """Return the flags of these names that the user gave."""
    return {name: flags[name] for name in names if flags.get(name) is not None}


def read_config(path: Path, flags: Mapping[str, Flag]) -> Values:
    """Return the settings of a TOML file, by the flags that take them.

    Dashes and underscores in keys are alike.

    Raises:
        OptionError: the file cannot be read, is not TOML, or holds something else than a setting.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(
            f"'{path}' is no TOML file that can be read: {first_line(error)}"
        ) from error
    settings = {key.replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise OptionError(f"'{path}' holds a setting twice, with a dash and an underscore")
    for name, value in settings.items():
        if name not in flags:
            hint = did_you_mean(name, flags)
            raise OptionError(f"'{path}' holds '{name}', which is no setting{hint}")
        if flags[name].functions and ".py:" in str(value):
            try:
                settings[name] = flags[name].function_or_name(value)
            except typer.BadParameter as error:
                raise OptionError(f"'{path}', {name}: {error}") from error
    return settings


_ARGUMENT = re.compile(
    r"(?P<quoted>(?<!\w)'[^']*')"  # a path, or text of the user: left unchanged
    r"|^(?P<first>\w+)(?= must )"
    r"|(?<![\w.])(?P<name>[a-z][a-z_]*)=(?P<value>\"[^\"]*\"|[\w.:/+-]*[\w/+-])"
)


def flag_of(name: str) -> str:
    """Return the flag of an argument."""
    return f"--{name.replace('_', '-')}"


def spelled(message: str) -> str:
    """Write every argument of Python in a message as a flag: `force=True` is `--force`."""

    def flag(match: re.Match[str]) -> str:
        name = match["first"] or match["name"]
        if name not in FLAGS:
            return match[0]
        value = (match["value"] or "True").strip('"')
        return flag_of(name) if value == "True" else f"{flag_of(name)} {value}"

    return _ARGUMENT.sub(flag, message)
