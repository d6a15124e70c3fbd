"""`coec prune`: print the plan of a pruning, for `--dry-run`, and its result."""

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli import common
from coec.cli.commands import HELP_ALL
from coec.cli.flags import (
    Flag,
    argument,
    flags_of,
    given,
    read_config,
    switch,
    with_flags,
)
from coec.config.recipe import CoecOptions, Recipe, RidgeOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coec.checkpoint.report import Report
    from coec.planning.plan import Plan

_WIDTHS = {
    "mlp": "MLP channels", "experts": "expert channels", "shared": "shared channels",
    "whole_experts": "experts", "kv_groups": "KV groups", "query_heads": "query heads",
    "vocabulary": "vocabulary",
}  # fmt: skip
"""Names of widths in a report, and the words for them."""
FIRST_SCREEN = (
    "sparsity", "budget", "by_block", "preset", "calibration", "samples", "seq_len", "device",
)  # fmt: skip
"""Settings that help shows without `--help-all`."""


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[HELP_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_RECOVER = Flag(
    "recover", str,
    "Train the result on so many tokens of the calibration text, such as 300k or 20M, before it is "
    "written to OUT, as `coec recover` does.", "How to compensate", "TOKENS",
)  # fmt: skip
_HELP_ALL = switch(HELP_ALL, "Show every flag, and those of each compensation.")._replace(
    callback=_show_all
)
_OPTIONS = [
    flag._replace(heading=f"Options of --compensation {method}")
    for method, flags in {
        "coec": flags_of(CoecOptions),
        "ridge-to-slice, least-squares": flags_of(RidgeOptions),
    }.items()
    for flag in flags
]
_SETTINGS = [
    flag if flag.name in FIRST_SCREEN else flag._replace(heading=f"More: {flag.heading.lower()}")
    for flag in flags_of(Recipe, "options", "trust_remote_code")
]
_FLAGS = {flag.name: flag for flag in (*_SETTINGS, *_OPTIONS)}


@with_flags(
    *(flag for flag in _SETTINGS if flag.name in FIRST_SCREEN),
    _RECOVER,
    switch("dry_run", "Print the plan from the configuration alone."),
    common.CONFIG_FILE, common.FORCE, common.RESTART, common.TRUST_REMOTE_CODE, common.QUIET,
    common.JSON, _HELP_ALL,
    *(flag for flag in _SETTINGS if flag.name not in FIRST_SCREEN),
    *_OPTIONS,
)  # fmt: skip
def prune_command(
    model: Annotated[str, argument("Model folder (or its config.json), or a hub name.", "MODEL")],
    out: Annotated[str | None, argument("Folder to make; --dry-run needs none.", "OUT")] = None,
    **flags: Any,
) -> None:
    """Prune MODEL and write the smaller dense model to OUT.

    If a run is killed, repeat the command: it resumes at the first missing block.

    On several GPUs or machines: torchrun --nproc-per-node N -m coec prune …
    """
    common.check_out(out, flags)  # before anything is imported that takes seconds
    common.quieten()
    from coec import parallel, pruning

    chosen = read_config(flags["config"], _FLAGS) if flags["config"] else {}
    chosen |= given(flags, _FLAGS) | {"trust_remote_code": flags["trust_remote_code"]}
    if out is None or flags["dry_run"]:
        _show_plan(pruning.plan(model, **chosen), model, out, flags)
        return
    with common.showing_progress(flags["quiet"] or not parallel.is_first()) as advance:
        running = {"progress": advance, **given(flags, ("force", "restart")), **chosen}
        if flags["recover"] is None:
            report, lines = pruning.prune(model, out, **running), _next
        else:
            from coec.cli.recover import recovery_lines as lines
            from coec.recovery import prune_and_recover

            with common.noting():
                report = prune_and_recover(model, out, flags["recover"], **running)
    record = {"out": report.out, **report.as_dict()}
    common.show(record, itertools.chain(_lines(report), lines(report)), flags["json"])
    noted = parallel.is_first() and not flags["json"]
    for event, modules in report.events.items() if noted else ():
        place = modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
        common.notes.print(f"note: {place}: {event}")


def _show_plan(plan: "Plan", model: str, out: str | None, flags: Mapping[str, Any]) -> None:
    """Print the plan of a pruning and its costs; raise OptionError if it does not fit in memory."""
    from coec.devices import product_rate
    from coec.planning.memory import disk, memory, operations, placed

    # Plan → memory at the fullest moments, one rough total of time → a refusal
    fullest = [max(memory(plan), key=lambda m: m.needed[place]) for place in (0, 1)]
    seconds = operations(plan) / product_rate(plan.device, plan.forward)
    output, partial = disk(plan)
    record = {"model": model, **plan.record(), "device": str(plan.device), "seconds": seconds}
    record |= {
        "memory_bytes": dict(zip(("device", "host"), (m.needed[n] for n, m in enumerate(fullest)))),
        "disk_bytes": {"output": output, "partial": partial},
    }
    training: tuple[RenderableType, ...] = ()
    if flags["recover"] is not None:
        from coec.cli.recover import ways_to_train
        from coec.recovery import settings_like

        settings = settings_like(plan.recipe, flags["recover"])
        record["recover"], ways = ways_to_train(plan.model, plan.pruned_model, settings)
        training = ("\ntraining on the calibration text, afterwards:", *ways)

    def lines() -> Iterator["RenderableType"]:
        yield from _sizes(plan, Path(model))
        for place, (name, needed) in enumerate(record["memory_bytes"].items()):
            if needed:
                what = f"{fullest[place].moment}: {fullest[place].largest(place)}"
                yield f"memory of the {name}: {_gigabytes(needed)} ({what})"
        yield f"time: {common.rough(seconds)}, a rough total at the rate of one matrix product here"
        yield f"disk: {_gigabytes(output)}, and {_gigabytes(partial)} of unfinished work meanwhile"
        yield from training

    common.show(record, lines(), flags["json"])
    placed(plan)
    if out is not None:
        from coec.checkpoint.folder import check_space

        check_space(Path(out), output + partial)


def _sizes(plan: "Plan", model: Path) -> Iterator["RenderableType"]:
    """Yield sizes, notes, the format and who loads it."""
    from coec.models.folder import has_chat_template
    from coec.models.layout import in_words, split_over
    from coec.text.sources import is_named

    record = plan.record()
    if plan.dropped:
        layers = plan.dense.layers
        yield f"blocks: {layers} → {layers - len(plan.dropped)}"
    rows = [
        (name if name == "vocabulary" else f"{name.replace('_', ' ')} × {plan.dense.layers} blocks",
         in_words(width["before"]), in_words(width["after"]))
        for name, width in record["widths"].items()
    ]  # fmt: skip
    before, after = plan.parameters_before, plan.parameters_after
    rows.append(("parameters", f"{before:,}", f"{after:,} ({after / before:.1%})"))
    if active := record["active"]:
        before, after = active.values()
        rows.append(("active per token", f"{before:,}", f"{after:,} ({after / before:.1%})"))
    yield common.table(("", "dense", "pruned"), rows)
    text, folder = str(plan.recipe.calibration), model.parent if model.is_file() else model
    if is_named(text) and has_chat_template(folder):
        yield (
            "the model answers chats: its answers to your prompts as half of the text keep them "
            f"better (--calibration {text}=1,self:prompts.jsonl=1)"
        )
    yield from plan.notes
    code = f", built by {record['code']}, written with the weights" if record["code"] else ""
    yield f"\nstored as {plan.output.model_type}{code}"
    if plan.output.relabelled:
        yield f"  ({plan.output.relabelled})"
    for loader, finding in plan.output.loads_in.items():
        yield f"  {loader:<14} {finding}"
    if plan.decided:
        yield f"  {'split':<14} {split_over(record['tensor_parallel'])}"
    yield ""


def _lines(report: "Report") -> Iterator[str]:
    """Yield the result, sizes, errors by kind of site, training, format and loaders, time."""
    from coec.models.layout import in_words, split_over

    plan, widths = report.plan, report.plan["widths"]
    before, after = plan["parameters"]["before"], plan["parameters"]["after"]
    if facts := report.reconstruction:
        pruned, dense, kl = (facts[name] or math.inf for name in ("perplexity", "dense", "kl"))
        yield (
            f"perplexity {pruned:.4g} (dense {dense:.4g}, × {pruned / dense:.3g}), KL {kl:.3f}, on "
            f"{facts['count']} validation windows of the calibration text"
        )
    yield f"wrote {common.named(report.out)}"
    yield f"parameters       {before:,} → {after:,} ({after / before:.1%})"
    if active := plan.get("active"):
        yield f"active per token {active['before']:,} → {active['after']:,}"
    for name, label in _WIDTHS.items():
        if width := widths.get(name):
            yield f"{label:<16} {in_words(width['before'])} → {in_words(width['after'])}"
    if dropped := plan["dropped_blocks"]:
        yield f"{'blocks':<16} without {', '.join(map(str, dropped))}"
    yield from plan["notes"]
    for site in report.kinds:
        before, after = report.mean_errors(site)
        yield f"{site + ' error':<16} {before:.4f} → {after:.4f} (of outputs, mean over blocks)"
    for training, label in {"reconstruction": "trained", "predictions": "on predictions"}.items():
        if trained := [row[training] for row in report.sites if training in row]:
            before = sum(block["errors"][0] for block in trained) / len(trained)
            after = sum(block["errors"][block["taken"]] for block in trained) / len(trained)
            yield f"{label:<16} {before:.4f} → {after:.4f} (on {report.measured_on} windows)"
    if plan["relabelled"]:
        yield f"stored as        {plan['output_model_type']} ({plan['relabelled']})"
    if plan.get("code"):
        yield f"built by         {plan['code']}: loads with trust_remote_code=True"
    loaders = [
        name if finding == "yes" else f"{name} ({finding})"
        for name, finding in plan["loads_in"].items() if not finding.startswith("no")
    ]  # fmt: skip
    yield f"loads in         {', '.join(loaders)}"
    yield f"tensor parallel  {split_over(plan['tensor_parallel'])}"
    yield f"seconds          {sum(report.seconds.values()):.1f}"


def _next(report: "Report") -> Iterator[str]:
    """Yield the commands that measure the result, and train it on its text."""
    text, column = str(report.recipe["calibration"]), report.recipe["text_column"]
    compared = "vocabulary" not in report.plan["widths"]
    yield common.measuring(report.model, report.out, text, column, compared=compared)
    if not report.plan["inside"]:  # of models of text and images none is trained
        model, out, trained = map(common.named, (report.model, report.out, f"{report.out}-trained"))
        flags = common.text_flag(text, column)
        yield f"train it a little: coec recover {model} {out} {trained}{flags}"
    if "," not in text and not text.startswith(
        "self"
    ):  # docs/lab/RESULTS.md: the text decides more
        both = shlex.quote(f"{text},OTHER.txt")
        yield f"to preserve other kinds of text as well: --calibration {both}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
