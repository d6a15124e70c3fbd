"""`coec prune` and `coec compensate`: what a pruning would do, for `--dry-run`, and what it did."""

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec import settings
from coec.cli import common
from coec.cli.commands import HELP_ALL
from coec.cli.flags import Flag, Values, argument, given, read_config, switch, with_flags
from coec.cli.progress import showing_progress
from coec.settings.fields import Setting, Settings
from coec.settings.parts import CHOOSING, PresetName

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from coec.models.files import JsonDict
    from coec.pipeline.report import Report
    from coec.planning import Forecast, Plan

_BETTER: dict[str, PresetName] = {
    "paper": "balanced",
    "fast": "balanced",
    "balanced": "best",
}
"""The preset that the last line of a run by another names."""
_WIDTHS = (
    ("mlp", "MLP channels", "per block"),
    ("experts", "expert channels", "per expert"),
    ("shared", "shared channels", "per block"),
    ("whole_experts", "experts", "per block"),
    ("kv_groups", "KV groups", "per block"),
    ("query_heads", "query heads", "per block"),
)
"""Names of widths in a report, and the words for them."""


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[HELP_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_HELP_ALL = switch(HELP_ALL, "Show every flag, and those of each compensation.")._replace(
    callback=_show_all
)


def flag_of_setting(row: Flag | Setting) -> Flag:
    """Return the flag of a setting; options of a compensation have a heading of their own."""
    if isinstance(row, Flag):
        return row
    kind, names = (str, row.kind) if isinstance(row.kind, tuple) else (row.kind or str, row.words)
    heading = f"Options of --compensation {', '.join(row.methods)}" if row.methods else ""
    return Flag(row.name, kind, row.text, heading, names=names)


def settings_of(flags: Mapping[str, Any]) -> Values:
    """Combine the settings of a file and the flags, which win."""
    content = read_config(flags["config"], settings.NAMES) if flags["config"] else {}
    content |= given(flags, (name for name in flags if name in settings.NAMES))
    return content | {"trust_remote_code": flags["trust_remote_code"]}


_RUNNING = (
    common.CONFIG_FILE,
    Flag(
        "statistics", Path,
        "Folder that `coec collect` wrote: replaces the dense pass, and sets calibration.",
    ),
    common.FORCE, common.RESTART, common.TRUST_REMOTE_CODE,
    common.QUIET, common.JSON, _HELP_ALL,
)  # fmt: skip
"""Options of both commands besides settings."""


_RECOVER = Flag(
    "recover", str,
    "Train the result on so many tokens of the calibration text, such as 300k or 20M, before "
    "it is written to OUT, as `coec recover` does.", metavar="TOKENS",
)  # fmt: skip
HEADINGS = {
    "What to remove": ("sparsity", "budget_parameters", "non_uniform", "multiple_of", "target"),
    "How to compensate": ("preset", "recover"),
    "Calibration": ("calibration", "samples", "seq_len"),
    "Where to run": ("dry_run", "device", "executor"),
    "Output": ("config", "force", "trust_remote_code", "quiet", "json"),
}
"""Headings of the first screen of help, and the flags under each."""
_MORE: dict[str, type[Settings]] = {
    "More: what to remove": settings.Pruning, "More: how to compensate": settings.Reconstruction,
    "More: calibration": settings.Calibration, "More: where to run": settings.Runtime,
}  # fmt: skip
"""Headings that only `--help-all` has, and the settings under each."""


def _arranged(*rows: Flag | Setting) -> list[Flag]:
    """Return flags under their headings, those of the first screen first."""
    details = {heading: [row.name for row in members.table()] for heading, members in _MORE.items()}
    details["More: where to run"] += ["statistics", "restart"]
    # Flags that a heading lists, in its order; then all others as they come.
    flags = {row.name: flag_of_setting(row) for row in rows}
    placed = [
        flags.pop(name)._replace(heading=heading)
        for heading, names in {**HEADINGS, **details}.items() for name in names if name in flags
    ]  # fmt: skip
    return [*placed, *flags.values()]


@with_flags(
    *_arranged(
        *settings.RECIPE,
        _RECOVER,
        switch("dry_run", "Print the plan from the configuration alone."),
        *_RUNNING,
        *settings.OPTIONS,
    )
)
def prune_command(
    model: Annotated[str, argument("Model folder (or its config.json), or a hub name.", "MODEL")],
    out: Annotated[
        str | None,
        argument("Folder to make; --dry-run needs none.", "OUT"),
    ] = None,
    **flags: Any,
) -> None:
    """Prune MODEL and write the smaller dense model to OUT.

    If a run is killed, repeat the command: it resumes at the first missing block.
    """
    # Wrong usage is told before anything is imported that takes seconds.
    common.check_out(out, flags)
    tokens = flags["recover"]
    if tokens is not None:
        _check_recover(flags)
    common.quieten()
    from coec.pipeline import prune as pruning

    chosen = settings_of(flags)
    if out is None or flags["dry_run"]:
        plan = pruning.plan(model, statistics=flags["statistics"], **chosen)
        _show_plan(plan, model, out, flags, tokens)
        return
    with showing_progress(flags["quiet"]) as advance:
        running = {"progress": advance, **_handling(flags), **chosen}
        if tokens is None:
            _show_report(pruning.prune(model, out, **running), flags)
            return
        from coec.cli.recover import recovery_lines
        from coec.recovery import prune_and_recover

        with common.noting():
            report = prune_and_recover(model, out, tokens, **running)
    lines = itertools.chain(_lines(report), recovery_lines(report))
    common.show({"out": report.out, **report.as_dict()}, lines, flags["json"])


@with_flags(
    *_arranged(
        *(row for row in settings.RECIPE if row.name not in CHOOSING),
        switch("dry_run", "Print the plan; the weights of both are read for it."),
        *_RUNNING,
        *settings.OPTIONS,
    )
)
def compensate_command(
    model: Annotated[str, argument("Model folder before it was pruned, or a hub name.", "DENSE")],
    pruned: Annotated[str, argument("Model that another program pruned.", "PRUNED")],
    out: Annotated[Path | None, argument("Folder to make; --dry-run needs none.", "OUT")] = None,
    **flags: Any,
) -> None:
    """Compensate DENSE for the units that another program removed in PRUNED, and write OUT.

    The kept units are found from the rows of PRUNED; nothing else of it is used. All else is as in
    coec prune.
    """
    common.check_out(out, flags)
    common.quieten()
    from coec.pipeline import compensate as compensating
    from coec.pipeline import prune as pruning
    from coec.planning.recipe import Recipe

    chosen = settings_of(flags)
    # A run reads the kept units itself; a plan reads the weights of both models for them.
    if out is not None and not flags["dry_run"]:
        with showing_progress(flags["quiet"]) as advance:
            report = compensating.compensate_pruned(
                model, pruned, out, progress=advance, **chosen, **_handling(flags)
            )
        _show_report(report, flags)
        return
    compensating.check_settings(chosen, pruned)
    Recipe(**chosen)  # before the weights are read
    with showing_progress(flags["quiet"]) as advance:
        kept = compensating.infer_kept(model, pruned, advance)
    plan = pruning.plan(model, statistics=flags["statistics"], **chosen, kept=kept)
    _show_plan(plan, model, out, flags)


def _check_recover(flags: Mapping[str, Any]) -> None:
    """Raise BadParameter for what has no training behind it."""
    if flags["statistics"]:
        raise typer.BadParameter(
            "--recover does not go with --statistics, which hold no text: run coec recover then"
        )


def _handling(flags: Mapping[str, Any]) -> Values:
    return given(flags, ("statistics", "force", "restart"))


def _show_plan(
    plan: "Plan",
    model: str,
    out: str | Path | None,
    flags: Mapping[str, Any],
    tokens: str | None = None,
) -> None:
    """Print what a pruning would do and take; then OptionError where it does not fit in the memory.

    Where statistics are given, no text is run. With tokens, what a training on them takes is
    printed too; of widths that are not decided, as if every block had the same.
    """
    from coec.devices import FreeMemory, choose_device, product_rate
    from coec.planning import ComputeConfig, Forecast
    from coec.planning.run import check_room, close_fits, within

    # Free memory → batch sizes that fit → phases, and one rough total of time → a refusal
    device = choose_device(plan.recipe.runtime.device)
    room = FreeMemory.of(device)
    compute = ComputeConfig.of(plan, device, measured=flags["statistics"] is not None)
    compute = within(plan, compute, room)
    close = close_fits(plan, compute, room)
    forecast = Forecast.of(plan, compute)
    seconds = forecast.operations / product_rate(device, compute.forward)
    record = {"model": model, **plan.record(), **forecast.record(), "seconds": seconds}
    record |= {"device": str(device), "close": list(close)}
    training: tuple[RenderableType, ...] = ()
    if tokens is not None:
        from coec.cli.recover import ways_to_train
        from coec.models.description import Description
        from coec.recovery import settings_like
        from coec.recovery.job import check_alone

        check_alone(plan.model)
        pruned = Description.of(plan.output.config)
        record["recover"], ways = ways_to_train(
            plan.model, pruned, settings_like(plan.recipe, tokens)
        )
        alike = "" if plan.decided else ", as if every block had the same widths"
        training = (f"\ntraining on the calibration text, afterwards{alike}:", *ways)
    lines = itertools.chain(_planned(plan, forecast, record, out), training)
    common.show(record, lines, flags["json"])
    check_room(plan, compute, room)


def _planned(
    plan: "Plan", forecast: "Forecast", record: "JsonDict", out: str | Path | None
) -> Iterator["RenderableType"]:
    from coec.execution.output import free_space

    yield from _sizes(plan, forecast.alternatives, record)
    yield _memory(forecast, record["device"])
    yield (
        f"\ntime: {common.rough(record['seconds'])}, a rough total: {forecast.operations:.1e} "
        "operations at the rate of one matrix product here"
    )
    yield from record["close"]
    output, partial = forecast.output, forecast.partial
    yield f"disk: {_gigabytes(output)}, and {_gigabytes(partial)} of unfinished work meanwhile"
    if out is not None and (free := free_space(Path(out))) < output + partial:
        yield f"'{out}' has {_gigabytes(free)} free: choose a folder on another disk"


def _sizes(
    plan: "Plan", alternatives: dict[str, "Plan"], record: "JsonDict"
) -> Iterator["RenderableType"]:
    from coec.models.layout import split_over
    from coec.pipeline.card import counted

    # Sizes → what validation windows may choose instead → format → who loads it
    if plan.dropped:
        layers = plan.dense.layers
        yield f"blocks: {layers} → {layers - len(plan.dropped)}, chosen by what they do on the text"
    rows = [
        (f"{name.replace('_', ' ')} × {plan.dense.layers} blocks",
         counted(width["before"]), counted(width["after"]))
        for name, width in record["widths"].items()
    ]  # fmt: skip
    before, after = plan.parameters_before, plan.parameters_after
    rows.append(("parameters", f"{before:,}", f"{after:,} ({after / before:.1%})"))
    yield common.table(("", "dense", "pruned"), rows)
    for rule, candidate in alternatives.items():
        yield (
            f"or, by validation windows (kv_groups = {rule}): {candidate.pruned.kv_heads} KV "
            f"groups, {candidate.pruned.ffn:,} MLP channels, stored as "
            f"{candidate.output.model_type}"
        )
    yield from plan.notes
    code = f", built by {record['code']} beside the weights" if record["code"] else ""
    yield f"\nstored as {plan.output.model_type}{code}"
    if plan.output.relabelled:
        yield f"  ({plan.output.relabelled})"
    for loader, finding in plan.output.loads_in.items():
        yield f"  {loader:<14} {finding}"
    if plan.decided:
        yield f"  {'split':<14} {split_over(record['tensor_parallel'])}"
    yield ""


def _memory(forecast: "Forecast", device: str) -> "Table":
    """Return a line for every phase: memory at its fullest moment, and what takes most of it."""
    # On a CPU the memory of the device is that of the host.
    alone = device == "cpu"
    rows = []
    for phase in forecast.phases:
        sizes = [phase.host] if alone else [phase.device, phase.host]
        largest = max(sizes[0], key=sizes[0].__getitem__, default="")
        rows.append((phase.name, *(_gigabytes(sum(size.values())) for size in sizes), largest))
    peak = [sum(forecast.peak)] if alone else forecast.peak
    rows.append(("largest", *map(_gigabytes, peak), ""))
    memory = ["memory"] if alone else [device, "host"]
    return common.table(("phase", *memory, "most of it"), rows)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _show_report(report: "Report", flags: Mapping[str, Any]) -> None:
    """Print what a pruning did, and safeguards that fired on stderr."""
    lines = itertools.chain(_lines(report), _next(report, text_read=not flags["statistics"]))
    common.show({"out": report.out, **report.as_dict()}, lines, flags["json"])
    for event, modules in report.events.items() if not flags["json"] else ():
        place = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        common.notes.print(f"note: {place}: {event}")


def _next(report: "Report", *, text_read: bool) -> Iterator[str]:
    """Yield a better preset, and the commands that measure the result, and train it on its text.

    Without the text, and in float16, no preset trains blocks.
    """
    from coec.models.architectures import ARCHITECTURES

    preset = report.recipe.get("preset", "")
    untold = preset == "balanced" and ARCHITECTURES[report.plan["model_type"]].adds
    trains = text_read and report.recipe["forward_dtype"] != "float16"
    if preset in _BETTER and trains and not untold:
        better = _BETTER[preset]
        times = settings.PRESETS[better].time / settings.PRESETS[preset].time
        yield f"nearer to the dense model: --preset {better}, in about {times:.2g} times the time"
    text = str(report.recipe["calibration"])
    model, out, trained = map(common.named, (report.model, report.out, f"{report.out}-trained"))
    if text_read and "," not in text and text != "self":  # docs/lab/RESULTS.md: what one decides
        both = shlex.quote(f"{text},OTHER.txt")
        yield f"good on other kinds of text too: --calibration {both}, windows of each"
    yield common.measuring(report.model, report.out, text)
    if report.plan["inside"]:  # of models of text and images none is trained
        return
    yield f"train it a little: coec recover {model} {out} {trained}{common.text_flag(text)}"
    yield f"  {_ten_minutes(report)}"


def _ten_minutes(report: "Report") -> str:
    """Say what ten minutes of training would be here, and what training gave a real model."""
    import torch

    from coec.config.recovery import KNOWN_GAIN, Recovery
    from coec.devices import at_hand, product_rate
    from coec.recovery import plan

    device, tokens = at_hand(torch.device(report.environment["device"])), 10**6
    way = plan.footprints(report.model, report.out, Recovery(tokens=tokens), device, None)[0]
    count = tokens * 600 * product_rate(device, way.dtype) / way.operations
    return (
        f"ten minutes are {float(f'{count:.1g}'):,.0f} tokens here at the most, in "
        f"{way.bytes / 1e9:.1f} GB of memory; {KNOWN_GAIN}"
    )


def _lines(report: "Report") -> Iterator[str]:
    from coec.models.layout import split_over
    from coec.pipeline.card import counted

    # Sizes → errors by kind of site → training → format and who loads it → time
    plan, widths = report.plan, report.plan["widths"]
    before, after = plan["parameters"]["before"], plan["parameters"]["after"]
    yield f"wrote {common.named(report.out)}"
    yield f"parameters       {before:,} → {after:,} ({after / before:.1%})"
    for name, label, unit in _WIDTHS:
        if width := widths.get(name):
            yield f"{label:<16} {counted(width['before'])} → {counted(width['after'])} {unit}"
    if dropped := plan["dropped_blocks"]:
        left_out = ", ".join(map(str, dropped))
        layers = plan["layers"]
        yield f"{'blocks':<16} {layers} → {layers - len(dropped)} (left out: {left_out})"
    yield from plan["notes"]
    for site in report.kinds:
        before, after = report.mean_errors(site)
        yield (
            f"{site + ' error':<16} {before:.4f} → {after:.4f} "
            "(relative output error on the calibration data, mean over blocks)"
        )
        rows = [row for row in report.sites if row["site"] == site]
        fitted, validated = (
            sum(row.get(key) is not None for row in rows)
            for key in ("error_after", "holdout_after")
        )
        if validated:
            before, after = report.mean_errors(site, held_out=True)
            few = f" (where tokens are few: {validated} of {fitted})" * (validated < fitted)
            yield f"{'  validation':<16} {before:.4f} → {after:.4f}{few}"
    yield from _reconstruction(report)
    if plan["relabelled"]:
        yield f"stored as        {plan['output_model_type']} ({plan['relabelled']})"
    if plan.get("code"):
        yield (
            f"built by         {plan['code']}, beside the weights: loads with "
            "trust_remote_code=True"
        )
    loaders = [
        name if finding == "yes" else f"{name} ({finding})"
        for name, finding in plan["loads_in"].items() if not finding.startswith("no")
    ]  # fmt: skip
    yield f"loads in         {', '.join(loaders)}"
    if sizes := plan.get("tensor_parallel"):
        yield f"tensor parallel  {split_over(sizes)}"
    yield f"seconds          {sum(report.seconds.values()):.1f}"


def _reconstruction(report: "Report") -> Iterator[str]:
    """Yield errors before and after training, and candidates' predictions of validation windows."""
    facts = report.reconstruction
    # A training of blocks, and one on predictions, are told apart by their fields.
    for training, label, of_what in (
        ("reconstruction", "trained", "hidden-state error relative to the dense hidden state, on"),
        ("predictions", "on predictions", "KL of the predictions after the last block, on"),
    ):
        trained = [row[training] for row in report.sites if training in row]
        if trained:
            before = sum(block["errors"][0] for block in trained) / len(trained)
            after = sum(block["errors"][block["taken"]] for block in trained) / len(trained)
            yield f"{label:<16} {before:.4f} → {after:.4f} ({of_what} {report.measured_on} windows)"
    for name, tried in facts.get("candidates", {}).items():
        chosen = ", chosen" if name == facts["kv_groups"] else ""
        divergence = tried["kl"] if tried["kl"] is not None else math.inf
        line = _prediction(f"groups {name}", tried)
        yield f"{line}, KL {divergence:.3f}, before training{chosen}"
    if "dense" in facts:
        yield _prediction("predicts", facts)


def _prediction(label: str, facts: Mapping[str, Any]) -> str:
    """Line on how well a model predicts validation windows, beside the dense one."""
    pruned, dense = (facts[model] or math.inf for model in ("perplexity", "dense"))
    return f"{label:<16} perplexity {pruned:.2f} (dense {dense:.2f}) on validation windows"
