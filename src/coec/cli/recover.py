"""`coec recover`: the cost of training, for `--dry-run`, and its result."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.flags import Values, argument, flags_of, given, switch, with_flags
from coec.config.recovery import Recovery

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coec.checkpoint.report import Report
    from coec.models.description import Description
    from coec.models.files import JsonDict

_FLAGS = [
    flag._replace(type=str, metavar="N") if flag.name == "tokens" else flag
    for flag in flags_of(Recovery)
]


@with_flags(
    *_FLAGS,
    switch("dry_run", "Print memory, time and disk of every way to train; no weights are read."),
    common.FORCE, common.RESTART, common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip
def recover_command(
    dense: Annotated[str, argument("The dense model: folder or hub name.", "DENSE")],
    pruned: Annotated[str, argument("Model that coec pruned from DENSE.", "PRUNED")],
    out: Annotated[Path | None, argument("Folder to make; --dry-run needs none.", "OUT")] = None,
    **flags: Any,
) -> None:
    """Train PRUNED to predict as DENSE does, and write the best state to OUT.

    The best state has the lowest KL on validation windows; OUT is never worse than PRUNED there. If
    a run is killed, repeat the command: it resumes. On several GPUs: torchrun -m coec recover …
    """
    common.check_out(out, flags)
    common.quieten()
    settings = given(flags, Recovery.model_fields)
    if out is None or flags["dry_run"]:
        record, lines = ways_to_train(dense, pruned, settings)
        common.show(record, lines, flags["json"])
        return
    from coec import parallel
    from coec.recovery import recover

    handling = given(flags, ("force", "restart", "trust_remote_code"))
    with (
        common.showing_progress(flags["quiet"] or not parallel.is_first()) as advance,
        common.noting(),
    ):
        report = recover(dense, pruned, out, progress=advance, **handling, **settings)
    record = {"out": report.out, **report.as_dict()}
    common.show(record, recovery_lines(report), flags["json"])


def recovery_lines(report: "Report") -> Iterator[str]:
    """Yield lines on the result of a training."""
    from coec.recovery.text import most_tokens

    record = report.recoveries[-1]
    text, validation = record["text"], record["held_out"]
    weights = "all weights" if record["lora"] is None else f"additions of rank {record['lora']}"
    yield f"wrote {common.named(report.out)}"
    yield (
        f"trained          {weights} on {record['tokens']:,} tokens of {text['source']} "
        f"({record['passes']:.2g} passes), learning rate {record['learning_rate']:.2g}"
    )
    windows = f"{validation['windows']} validation windows"
    label = "KL to dense"
    if record["teacher"] is not None:
        yield f"{'taught by':<17}{record['teacher']}"
        label = "KL to teacher"
    divergence = f"{label:<17}{validation['before']:.4f}"
    if record["improved"]:
        gain = 1 - validation["after"] / validation["before"]
        yield f"{divergence} → {validation['after']:.4f} (−{gain:.0%}) on {windows}"
    else:
        yield (
            f"{divergence}: no state was better on {windows}, and the weights are those of the "
            "start; give more text, or a lower --learning-rate"
        )
    # The text limits a training that used it up; one that diverged ended early for another reason.
    if most_tokens(text["windows"] - validation["windows"], record["seq_len"]) < record["asked"]:
        yield f"the text is shorter than {record['asked']:,} tokens: more text helps more"
    yield f"seconds          {record['seconds']:.1f}"
    yield common.measuring(
        report.model, report.out, text["source"], record["text_column"],
        compared="vocabulary" not in report.plan["widths"],
    )  # fmt: skip


def ways_to_train(
    dense: "str | Description", pruned: "str | Description", settings: Values
) -> tuple["JsonDict", tuple["RenderableType", ...]]:
    """Return memory, time and disk of every way to train, and whether it fits: record, lines."""
    from coec.devices import FreeMemory, choose_device, product_rate
    from coec.recovery import plan

    recovery = Recovery(**settings)
    device = choose_device(recovery.device)
    free = FreeMemory.of(device).computing
    ways = plan.footprints(recovery.teacher or dense, pruned, recovery, device, free)
    rate = product_rate(device, ways[0].dtype)
    # A line and a record for every way to train; the way that would be chosen comes first
    rows, records = [], []
    for way in ways:
        seconds = way.operations / rate if recovery.minutes is None else 60 * recovery.minutes
        fits = free is None or way.bytes <= free
        records.append({
            "way": way.flags, "fits": fits, "memory": way.memory, "bytes": way.bytes,
            "disk": way.disk, "seconds": seconds,
        })  # fmt: skip
        rows.append((
            ("→ " if way is ways[0] else "  ") + way.flags, f"{way.bytes / 1e9:.2f} GB",
            "yes" if fits else "no", common.rough(seconds), f"{way.disk / 1e9:.2f} GB",
        ))  # fmt: skip
    room = "" if free is None else f"; {free / 1e9:.1f} GB of memory are free"
    lines = (
        common.table(("", "memory", "fits", "time", "disk meanwhile"), rows),
        f"\non {device}{room}; times are rough: operations at the rate of one matrix product here",
    )
    return {"device": str(device), "free": free, "ways": records}, lines
