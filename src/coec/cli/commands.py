"""The commands, put together: names, help, completion."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import coec
from coec.cli import common
from coec.cli.collect import collect_command
from coec.cli.evaluate import eval_command
from coec.cli.export import export_command
from coec.cli.methods import methods_command
from coec.cli.prune import compensate_command, prune_command
from coec.cli.recover import recover_command

_DETAIL = ("More: ", "Options of --compensation")
"""How headings begin that the first screen of help leaves out."""
_EXAMPLES = {
    "prune": ("coec prune MODEL OUT --sparsity 0.3",
              "coec prune MODEL OUT --preset best --recover 20M"),
    "compensate": ("coec compensate DENSE PRUNED OUT --preset best",
                   "coec compensate DENSE PRUNED OUT --calibration my-text.txt"),
    "recover": ("coec recover DENSE PRUNED OUT --text my-text.txt --tokens 20M",
                "coec recover DENSE PRUNED --lora 16 --dry-run"),
    "collect": ("coec collect MODEL STATISTICS --samples 128",
                "coec collect MODEL STATISTICS --calibration my-text.txt"),
    "eval": ("coec eval OUT --baseline MODEL", "coec eval OUT --text my-text.txt --seq-len 2048"),
    "export": ("coec export OUT model.gguf --dtype q8_0",
               "coec export OUT model.gguf --context 8192"),
    "methods": ("coec methods", "coec methods --json"),
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
            option.hidden = heading.startswith(_DETAIL) and not ctx.meta.get(common.HELP_ALL.name)
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="coec",
    help="Training-free structured pruning of large language models.",
    epilog="What a pruning would take: coec prune MODEL --sparsity 0.3 --dry-run\n\n"
    "Then do it: coec prune MODEL OUT --sparsity 0.3",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    prune_command, compensate_command, recover_command, collect_command, eval_command,
    export_command, methods_command,
):  # fmt: skip
    _name = _command.__name__.removesuffix("_command")
    _epilog = "\n\n".join(("Examples:", *_EXAMPLES[_name]))
    app.command(_name, cls=_Command, epilog=_epilog)(_command)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", metavar="")
    ] = False,
) -> None:
    if version:
        print(f"coec {coec.__version__}")
        raise typer.Exit
