"""The commands, put together: names, help, completion."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import coec
from coec.cli.analyze import analyze_command
from coec.cli.collect import collect_command
from coec.cli.evaluate import eval_command
from coec.cli.export import export_command
from coec.cli.methods import methods_command
from coec.cli.prune import compensate_command, prune_command
from coec.cli.report import report_command
from coec.cli.sweep import sweep_command


class _Plain:
    """Usage and help in the words of the texts: `MODEL [OUT]`, and no type beside a switch."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}") for piece in pieces]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_Plain, TyperCommand):
    pass


class _Group(_Plain, TyperGroup):
    pass


app = typer.Typer(
    name="coec",
    cls=_Group,
    help="Training-free structured pruning of large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    prune_command, compensate_command, collect_command, eval_command, export_command,
    sweep_command, analyze_command, methods_command, report_command,
):  # fmt: skip
    app.command(_command.__name__.removesuffix("_command"), cls=_Command)(_command)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", metavar="")
    ] = False,
) -> None:
    if version:
        print(f"coec {coec.__version__}")
        raise typer.Exit
