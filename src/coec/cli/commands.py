"""The commands, put together: names, help, completion.

A command's module is imported when the command is called: `coec --help` needs only this one.
"""

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import coec

HELP_ALL = "help_all"
"""Parameter of commands with many flags; its name in a context says that it was given."""
_DETAIL = ("More: ", "Options of --compensation")
"""How headings begin that the first screen of help leaves out."""


class Entry(NamedTuple):
    """A command: the module of its function, one line of help, and examples."""

    module: str
    help: str
    examples: tuple[str, str]


COMMANDS = {
    "prune": Entry(
        "prune", "Prune MODEL and write the smaller dense model to OUT.",
        ("coec prune MODEL OUT --sparsity 0.3",
         "coec prune MODEL OUT --preset best --recover 20M"),
    ),
    "compensate": Entry(
        "prune",
        "Compensate DENSE for the units that another program removed in PRUNED, and write OUT.",
        ("coec compensate DENSE PRUNED OUT --preset best",
         "coec compensate DENSE PRUNED OUT --calibration my-text.txt"),
    ),
    "recover": Entry(
        "recover", "Train PRUNED to predict as DENSE does, and write the best state to OUT.",
        ("coec recover DENSE PRUNED OUT --text my-text.txt --tokens 20M",
         "coec recover DENSE PRUNED --lora 16 --dry-run"),
    ),
    "collect": Entry(
        "collect", "Keep the statistics of MODEL's dense pass in STATS, for many prunings.",
        ("coec collect MODEL STATISTICS --samples 128",
         "coec collect MODEL STATISTICS --calibration my-text.txt"),
    ),
    "eval": Entry(
        "evaluate", "Measure the token perplexity of MODEL, and its distance from a baseline.",
        ("coec eval OUT --baseline MODEL", "coec eval OUT --text my-text.txt --bos off"),
    ),
    "export": Entry(
        "export", "Write MODEL as one GGUF file, for llama.cpp and programs that use it.",
        ("coec export OUT model.gguf --dtype q8_0",
         "coec export OUT model.gguf --context 8192"),
    ),
    "methods": Entry(
        "methods", "List presets, selections, compensations with their options, and architectures.",
        ("coec methods", "coec methods --json"),
    ),
}  # fmt: skip


class _Command(TyperCommand):
    """Command whose usage names arguments as its texts do: `MODEL`, not `{MODEL}`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Leave details out unless `--help-all` asks for them."""
        options: list[Any] = self.params
        for option in options:
            heading = getattr(option, "rich_help_panel", None) or ""
            option.hidden = heading.startswith(_DETAIL) and not ctx.meta.get(HELP_ALL)
        super().format_help(ctx, formatter)


def command_of(name: str) -> Any:
    """Import a command, and return it as typer has it."""
    entry = COMMANDS[name]
    function = getattr(import_module(f"coec.cli.{entry.module}"), f"{name}_command")
    alone = typer.Typer(**_SETTINGS, add_completion=False)
    epilog = "\n\n".join(("Examples:", *entry.examples))
    alone.command(name, cls=_Command, epilog=epilog)(function)
    return typer.main.get_command(alone)


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the line of help by the command itself."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = command_of(args[0])
        return super().resolve_command(ctx, args)


_SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    name="coec",
    cls=_Group,
    help="Training-free structured pruning of large language models.",
    epilog="What a pruning would take: coec prune MODEL --sparsity 0.3 --dry-run\n\n"
    "Then do it: coec prune MODEL OUT --sparsity 0.3",
    no_args_is_help=True,
    **_SETTINGS,
)
for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.help)(lambda: None)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", metavar="")
    ] = False,
) -> None:
    if version:
        print(f"coec {coec.__version__}")
        raise typer.Exit
