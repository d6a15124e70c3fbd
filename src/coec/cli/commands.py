"""The commands, put together: names, help, completion."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import coec
from coec.cli.analyze import analyze_command
from coec.cli.collect import collect_command
from coec.cli.evaluate import eval_command
from coec.cli.export import export_command
from coec.cli.methods import methods_command
from coec.cli.prune import compensate_command, prune_command
from coec.cli.recover import recover_command
from coec.cli.sweep import report_command, sweep_command


class _Command(TyperCommand):
    """Command whose usage names arguments as its texts do: `MODEL`, not `{MODEL}`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


app = typer.Typer(
    name="coec",
    help="Training-free structured pruning of large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    prune_command, compensate_command, recover_command, collect_command, eval_command,
    export_command, sweep_command, analyze_command, methods_command, report_command,
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
