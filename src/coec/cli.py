"""The command: flags to settings, results to text or JSON. Nothing is computed here.

Results go to stdout, everything else to stderr. Exit status 0; 1 for an error the user can mend;
2 for wrong usage.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch
import typer
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

import coec
from coec.compensation import COMPENSATIONS, options_of
from coec.errors import CoecError
from coec.evaluation.perplexity import perplexity
from coec.models.architectures import ARCHITECTURES
from coec.planning import Plan, choose_device, choose_forward_dtype, stored_dtype
from coec.pruning import plan as make_plan
from coec.pruning import prune as run_prune
from coec.recipe import DTYPES, SOLVE_DTYPES, Recipe, read_settings
from coec.report import Report
from coec.selection import SELECTIONS

app = typer.Typer(
    name="coec",
    help="Training-free structured pruning of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130
"""The exit status that typer gives to Ctrl-C."""

notes = Console(stderr=True, highlight=False, soft_wrap=True)
results = Console(highlight=False, soft_wrap=True)

if TYPE_CHECKING:
    Dtype: TypeAlias = str
    SolveDtype: TypeAlias = str
    Selection: TypeAlias = str
    Method: TypeAlias = str
else:
    Dtype = Literal[tuple(DTYPES)]
    SolveDtype = Literal[SOLVE_DTYPES]
    Selection = Literal[tuple(SELECTIONS)]
    Method = Literal[tuple(COMPENSATIONS)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def main() -> None:
    """Runs the command line; errors a user can mend become one line and exit status 1."""
    try:
        app()
    except CoecError as error:
        _fail(str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).strip().splitlines()[:1]
        _fail(f"out of memory: lower --samples or --seq-len, or use --device cpu {reason}")
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # what torch raises for the CPU's memory
            raise
        _fail("out of memory: lower --samples or --seq-len")
    except SystemExit as error:
        if error.code == INTERRUPTED:
            print("coec: interrupted; nothing was written", file=sys.stderr)
        raise


def _fail(message: str) -> None:
    print(f"coec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


def _option_help(method: Callable[..., Any]) -> dict[str, str]:
    """Texts of the `Args:` section of a docstring, by argument."""
    helps: dict[str, str] = {}
    name, inside = "", False
    for line in (inspect.getdoc(method) or "").splitlines():
        if not line.startswith(" "):
            inside = line == "Args:" or (inside and not line)
        elif inside and line.startswith("     "):
            helps[name] += " " + line.strip()
        elif inside:
            name, _, text = line.strip().partition(": ")
            helps[name] = text
    return helps


def _method_parameters() -> list[inspect.Parameter]:
    """A flag for every option of every compensation, described by its docstring."""
    found: dict[str, inspect.Parameter] = {}
    owners: dict[str, list[str]] = {}
    for name, method in COMPENSATIONS.items():
        helps = _option_help(method)
        for option, parameter in options_of(method).items():
            owners.setdefault(option, []).append(name)
            optional: Any = parameter.annotation | None
            annotation: Any = Annotated[
                optional,
                typer.Option(
                    help=f"{helps[option]} Default: {parameter.default}.",
                    rich_help_panel=f"Options of --compensation {', '.join(owners[option])}",
                    show_default=False,
                ),
            ]
            found[option] = inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
    return list(found.values())


def _with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces `**options` in a command's signature by the flags of all compensations."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = _method_parameters()
    command.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
    return command


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


def _setting(text: str, **more: Any) -> Any:
    return typer.Option(help=text, show_default=False, **more)


@app.command("prune")
@_with_method_options
def prune_command(
    model: Annotated[str, typer.Argument(help="Model folder (or its config.json), or a hub name.")],
    out: Annotated[Path | None, typer.Argument(help="Folder to make.", show_default=False)] = None,
    *,
    sparsity: Annotated[
        float | None, _setting("Fraction of units removed, between 0 and 1. Default: 0.3.")
    ] = None,
    selection: Annotated[
        Selection | None, _setting("Which score picks the units. Default: rcpu.")
    ] = None,
    compensation: Annotated[
        Method | None, _setting("How the kept weights are repaired. Default: coec.")
    ] = None,
    calibration: Annotated[
        str | None,
        _setting(
            "wikitext2; self (text sampled from the model); or a .txt, .jsonl, .parquet, .npy or "
            ".safetensors file. Default: wikitext2."
        ),
    ] = None,
    samples: Annotated[int | None, _setting("Calibration windows. Default: 128.")] = None,
    seq_len: Annotated[
        int | None,
        _setting("Tokens per window. Default: 2048, or the model's maximum if less."),
    ] = None,
    seed: Annotated[int | None, _setting("Draws the windows. Default: 0.")] = None,
    text_column: Annotated[
        str | None, _setting("Column of a jsonl or parquet file. Default: text.")
    ] = None,
    device: Annotated[str | None, _setting("auto, cpu, cuda, cuda:1, … Default: auto.")] = None,
    dtype: Annotated[
        Dtype | None, _setting("Of the written weights. Default: the model's.")
    ] = None,
    forward_dtype: Annotated[
        Dtype | None,
        _setting("Of the dense forward pass. Default: the model's on a GPU, float32 on the CPU."),
    ] = None,
    solve_dtype: Annotated[
        SolveDtype | None, _setting("Of the compensation. Default: float64.")
    ] = None,
    config: Annotated[
        Path | None, _setting("TOML file with any of these settings; flags win.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan from the configuration alone.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model that OUT holds.")
    ] = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Prune MODEL and write the smaller dense model to OUT."""
    flags = {
        "sparsity": sparsity, "selection": selection, "compensation": compensation,
        "calibration": calibration, "samples": samples, "seq_len": seq_len, "seed": seed,
        "text_column": text_column, "device": device, "dtype": dtype,
        "forward_dtype": forward_dtype, "solve_dtype": solve_dtype, **options,
    }  # fmt: skip
    settings = read_settings(config) if config else {}
    settings |= {name: value for name, value in flags.items() if value is not None}
    recipe = Recipe.of(**settings)
    if dry_run:
        _show_plan(make_plan(model, recipe), model, as_json)
        return
    if out is None:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    with _progress() as advance:
        report = run_prune(model, out, recipe, force=force, progress=advance)
    if as_json:
        print(json.dumps({"out": report.out, **report.as_dict()}))
    else:
        _show_report(report)


@app.command("eval")
def eval_command(
    model: Annotated[str, typer.Argument(help="Model folder or hub name.")],
    *,
    text: Annotated[
        str,
        typer.Option(
            help="wikitext2; a file as in `coec prune`; or self (text sampled from the baseline)."
        ),
    ] = "wikitext2",
    seq_len: Annotated[
        int | None, _setting("Tokens per window. Default: 4096, or the model's maximum if less.")
    ] = None,
    baseline: Annotated[
        str | None, _setting("The dense model: adds KL divergence and the perplexity ratio.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Windows to sample, for --text self.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the sampled text, for --text self.")] = 1,
    text_column: Annotated[str, typer.Option(help="Column of a jsonl or parquet file.")] = "text",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    dtype: Annotated[
        Dtype | None,
        _setting("Of the forward pass. Default: the model's on a GPU, float32 on the CPU."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure token perplexity of MODEL, and with a baseline its distance from the dense model."""
    with _progress() as advance:
        result = perplexity(
            model, text, seq_len=seq_len, baseline=baseline, samples=samples, seed=seed,
            text_column=text_column, device=device, dtype=dtype, progress=advance,
        )  # fmt: skip
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    for name, value in result.as_dict().items():
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int) else value
            shown = f"{value:.4f}" if isinstance(value, float) else shown
            results.print(f"{name.replace('_', ' '):<20} {shown}", markup=False)


@app.command("methods")
def methods_command(as_json: Json = False) -> None:
    """List selections, compensations and architectures, with the source of each."""
    listing = {
        "selections": {name: _described(f) for name, f in SELECTIONS.items()},
        "compensations": {name: _described(f) for name, f in COMPENSATIONS.items()},
        "architectures": {
            a.model_type: f"{a.families} [{a.source}]" for a in ARCHITECTURES.values()
        },
    }
    if as_json:
        print(json.dumps(listing))
        return
    for kind, entries in listing.items():
        results.print(f"[bold]{kind}[/bold]")
        for name, line in entries.items():
            results.print(f"  {name:<16} {line}", markup=False)


def _described(f: Callable[..., Any]) -> str:
    """A docstring's first line, and its source."""
    doc = inspect.getdoc(f) or ""
    source = doc.partition("Source: ")[2].partition("\n")[0].rstrip(".")
    return f"{doc.splitlines()[0].rstrip('.')} [{source}]"


def _show_plan(plan: Plan, model: str, as_json: bool) -> None:
    device = choose_device(plan.recipe.device)
    stored = stored_dtype(plan.output.config)
    forward = choose_forward_dtype(plan.recipe.forward_dtype, stored, device)
    memory = plan.memory(stored, forward)
    record = {
        "model": model,
        **plan.record(),
        "memory_bytes": {**memory, "total": sum(memory.values())},
        "device": str(device),
    }
    if as_json:
        print(json.dumps(record))
        return
    table = Table("", "dense", "pruned", box=None, header_style="bold")
    for what, width in record["widths"].items():
        table.add_row(
            f"{what.replace('_', ' ')} × {plan.dense.layers} blocks",
            f"{width['before']:,}",
            f"{width['after']:,}",
        )
    before, after = plan.parameters_before, plan.parameters_after
    table.add_row("parameters", f"{before:,}", f"{after:,} ({after / before:.1%})")
    results.print(table)
    results.print(f"\nstored as {plan.output.model_type}", markup=False)
    if plan.output.relabelled:
        results.print(f"  ({plan.output.relabelled})", markup=False)
    for loader, how in plan.output.loads_in.items():
        results.print(f"  {loader:<14} {how}", markup=False)
    results.print(f"\nmemory on {device}: about {sum(memory.values()) / 1e9:.2f} GB")
    for purpose, size in memory.items():
        results.print(f"  {purpose:<22} {size / 1e9:8.2f} GB", markup=False)


def _show_report(report: Report) -> None:
    parameters, widths = report.plan["parameters"], report.plan["widths"]
    before, after = parameters["before"], parameters["after"]
    lines = [
        f"wrote {report.out}",
        f"parameters       {before:,} → {after:,} ({after / before:.1%})",
        f"MLP channels     {widths['mlp']['before']:,} → {widths['mlp']['after']:,} per block",
        f"KV groups        {widths['kv_groups']['before']} → {widths['kv_groups']['after']} "
        "per block",
    ]
    for site in ("attention", "mlp"):
        error = report.mean_errors(site)
        lines.append(
            f"{site + ' error':<16} {error[0]:.4f} → {error[1]:.4f} "
            "(relative output error on the calibration data, mean over blocks)"
        )
    if report.plan["relabelled"]:
        lines.append(
            f"stored as        {report.plan['output_model_type']} ({report.plan['relabelled']})"
        )
    lines.append(f"seconds          {sum(report.seconds.values()):.1f}")
    for line in lines:
        results.print(line, markup=False)
    for event, modules in report.events.items():
        where = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        notes.print(f"note: {where}: {event}", markup=False)
    results.print(f"measure it: coec eval {report.out} --baseline {report.model}", markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per phase on stderr."""
    columns = (
        TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=notes)
    tasks: dict[str, Any] = {}

    def advance(phase: str, done: int, total: int) -> None:
        bar.start()  # only now: an error in the checks leaves no empty line
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total)
        bar.update(tasks[phase], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            bar.stop()
