"""The command: flags to settings, results to text or JSON. Nothing is computed here.

Results go to stdout, everything else to stderr. Exit status 0; 1 for an error the user can mend;
2 for wrong usage. One module per command.
"""

import sys
from typing import Annotated

import torch
import typer
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

import coec
from coec.cli.analyze import analyze_command
from coec.cli.evaluate import eval_command
from coec.cli.methods import methods_command
from coec.cli.prune import prune_command
from coec.cli.report import report_command
from coec.cli.signals import ENDING, end_tidily
from coec.cli.sweep import sweep_command
from coec.errors import CoecError

app = typer.Typer(
    name="coec",
    help="Training-free structured pruning of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("prune")(prune_command)
app.command("eval")(eval_command)
app.command("sweep")(sweep_command)
app.command("analyze")(analyze_command)
app.command("methods")(methods_command)
app.command("report")(report_command)
INTERRUPTED = (130, *(128 + number for number in ENDING))
"""The exit status that typer gives to Ctrl-C, and those of the other signals that end a run."""
LOWER = "--samples or --seq-len (of --tasks, --batch-size)"


def main() -> None:
    """Runs the command line; errors a user can mend become one line and exit status 1."""
    end_tidily()
    try:
        app()
    except CoecError as error:
        _fail(str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).strip().splitlines()[:1]
        _fail(f"out of memory: lower {LOWER}, or use --device cpu {reason}")
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # what torch raises for the CPU's memory
            raise
        _fail(f"out of memory: lower {LOWER}")
    except SystemExit as error:
        if error.code in INTERRUPTED:
            print("coec: interrupted; nothing half-written is left", file=sys.stderr)
        raise


def _fail(message: str) -> None:
    print(f"coec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"coec {coec.__version__}")
        raise typer.Exit
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
