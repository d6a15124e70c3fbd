"""What numbers were measured under, in one line."""

from collections.abc import Iterable, Sequence
from typing import Any

from coec.experiments.reporting.tables import value_text
from coec.experiments.rows import Row

DIGEST = 12
"""Characters of a digest that are shown."""


def protocol(rows: Sequence[Row], *, varies: Sequence[str] = ()) -> str:
    """Evaluation text and calibration of some rows; what differs among them as a list or range.

    Args:
        varies: settings that the table itself shows.
    """
    sentences = [_perplexity(rows), _zero_shot(rows), _calibration(rows, varies)]
    return " ".join(sentence for sentence in sentences if sentence)


def listed(values: Iterable[Any], limit: int = 4) -> str:
    """Distinct values joined by commas; numbers beyond the limit as a range."""
    distinct = list(dict.fromkeys(value for value in values if value is not None))
    if len(distinct) <= limit:
        return ", ".join(_plain(value) for value in distinct)
    if all(isinstance(value, int | float) for value in distinct):
        return f"{_plain(min(distinct))} to {_plain(max(distinct))}"
    return f"{', '.join(_plain(value) for value in distinct[:limit])} and others (see Record)"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else value_text(value)


def _perplexity(rows: Sequence[Row]) -> str:
    measured = [row.perplexity for row in rows if row.perplexity]
    if not measured:
        return ""
    texts = listed(_text(p.text, p.text_sha256) for p in measured)
    windows, length = (
        listed(getattr(p, name) for p in measured) for name in ("windows", "seq_len")
    )
    return f"Perplexity: {texts}, {windows} windows of {length} tokens."


def _text(name: Any, digest: Any) -> str:
    short = f" (sha256 {digest[:DIGEST]})" if digest else ""
    return f"{value_text(name)}{short}"


def _zero_shot(rows: Sequence[Row]) -> str:
    tasks = [task for row in rows for task in row.zero_shot.tasks]
    if not tasks:
        return ""
    return f"Zero-shot: {', '.join(dict.fromkeys(tasks))}."


def _calibration(rows: Sequence[Row], varies: Sequence[str]) -> str:
    pruned = [row for row in rows if not row.dense]
    if not pruned:
        return ""
    shown = {
        name: "as shown" if name in varies else listed(row.setting(name) for row in pruned)
        for name in ("calibration", "samples", "seq_len", "seed", "holdout")
    }
    seeds = f", seed {shown['seed']}" if shown["seed"] else ""
    held = f", {shown['holdout']} of the windows held out" if _held_out(pruned) else ""
    count = "windows, as many as shown," if "samples" in varies else f"{shown['samples']} windows"
    return (
        f"Calibration: {shown['calibration']}, {count} of {shown['seq_len']} tokens{seeds}{held}."
    )


def _held_out(rows: Sequence[Row]) -> bool:
    return any(row.setting("holdout") for row in rows)
