"""`coec recover`: what training would take, for `--dry-run`, and what it gave."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.common import CommandFlag, Values, switch
from coec.cli.progress import showing_progress
from coec.settings.recovery import Recovery

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coec.models.description import Description
    from coec.models.files import JsonDict
    from coec.pipeline.report import Report

_TABLE = Recovery.table()
_FLAGS = [
    CommandFlag(row.name, str, row.text, metavar="N") if row.name == "tokens" else row
    for row in _TABLE
]


@common.with_flags(
    *_FLAGS,
    switch("dry_run", "Print memory, time and disk of every way to train; no weights are read."),
    common.FORCE, common.RESTART, common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip
def recover_command(
    dense: Annotated[str, common.argument("The dense model: folder or hub name.", "DENSE")],
    pruned: Annotated[str, common.argument("Model that coec pruned from DENSE.", "PRUNED")],
    out: Annotated[
        Path | None, common.argument("Folder to make; --dry-run needs none.", "OUT")
    ] = None,
    **flags: Any,
) -> None:
    """Train PRUNED to predict as DENSE does, and write the best state to OUT.

    The best state is that of lowest KL on validation windows; OUT is never worse than PRUNED there.
    If a run is killed, repeat the command: it resumes. On several GPUs: torchrun -m coec recover …
    """
    common.check_out(out, flags)
    common.quieten()
    chosen = common.given(flags, _TABLE)
    if out is None or flags["dry_run"]:
        record, lines = ways_to_train(dense, pruned, chosen)
        common.show(record, lines, flags["json"])
        return
    from coec.recovery import recover
    from coec.recovery.processes import is_first

    handling = common.given(flags, ("force", "restart", "trust_remote_code"))
    # Under torchrun several processes train: the first one speaks.
    quiet = flags["quiet"] or not is_first()
    with showing_progress(quiet) as advance, common.noting():
        report = recover(dense, pruned, out, progress=advance, **handling, **chosen)
    if is_first():
        record = {"out": report.out, **report.as_dict()}
        common.show(record, recovery_lines(report), flags["json"])


def recovery_lines(report: "Report") -> Iterator[str]:
    """Yield lines on what a training gave."""
    from coec.recovery.text import most_tokens

    record = report.recoveries[-1]
    text, validation = record["text"], record["held_out"]
    weights = "all weights" if record["lora"] is None else f"additions of rank {record['lora']}"
    passes = f"{record['passes']:.2g}"
    yield f"wrote {common.named(report.out)}"
    yield (
        f"trained          {weights} on {record['tokens']:,} tokens of {text['source']} "
        f"({passes} {'pass' if passes == '1' else 'passes'}), "
        f"learning rate {record['learning_rate']:.2g}"
    )
    windows = f"{validation['windows']} validation windows"
    divergence = f"KL to dense      {validation['before']:.4f}"
    if record["improved"]:
        gain = 1 - validation["after"] / validation["before"]
        yield f"{divergence} → {validation['after']:.4f} (−{gain:.0%}) on {windows}"
    else:
        yield (
            f"{divergence}: no state was better on {windows}, and the weights are those of the "
            "start; give more text, or a lower --learning-rate"
        )
    # Of a training that ended early, because it diverged, the text was long enough.
    trained = text["windows"] - validation["windows"]
    if most_tokens(trained, record["seq_len"]) < 0.9 * record["asked"]:
        yield (
            f"the text has {text['windows'] * record['seq_len']:,} tokens, which were read "
            f"{passes} times, and {record['asked']:,} were asked for: more text "
            "gives more"
        )
    yield f"seconds          {record['seconds']:.1f}"
    yield common.measuring(report.model, report.out, text["source"])


def ways_to_train(
    dense: "str | Description", pruned: "str | Description", settings: Values
) -> tuple["JsonDict", tuple["RenderableType", ...]]:
    """Return memory, time and disk of every way to train, and whether it fits: record, lines."""
    from coec.devices import FreeMemory, choose_device, product_rate
    from coec.recovery import plan

    recovery = Recovery.of(settings)
    device = choose_device(recovery.device)
    free = FreeMemory.of(device).computing
    ways = plan.footprints(dense, pruned, recovery, device, free)
    rate = product_rate(device, ways[0].dtype)
    # A line and a record for every way to train, the one that would be taken first
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
