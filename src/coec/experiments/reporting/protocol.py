"""Conditions under which numbers were measured, in one line."""

from collections.abc import Iterable, Sequence

from coec.experiments.reporting.values import setting_text
from coec.experiments.rows import Row

DIGEST = 12
"""Characters of a digest that are shown."""


def protocol(rows: Sequence[Row], *, varies: Sequence[str] = ()) -> str:
    """Describe evaluation text and calibration of some rows; differences as a list or range.

    Args:
        varies: settings that the table itself shows.
    """
    sentences = [_perplexity(rows), _zero_shot(rows), _calibration(rows, varies)]
    return " ".join(sentence for sentence in sentences if sentence)


def listed(values: Iterable[object], limit: int = 4) -> str:
    """Join distinct values by commas; numbers beyond the limit as a range."""
    distinct = list(dict.fromkeys(value for value in values if value is not None))
    texts = [f"{v:,}" if isinstance(v, int) else setting_text(v) for v in distinct]
    if len(distinct) <= limit:
        return ", ".join(texts)
    if all(isinstance(value, int | float) for value in distinct):
        text_of = dict(zip(distinct, texts))
        return f"{text_of[min(distinct)]} to {text_of[max(distinct)]}"  # type: ignore[type-var]
    return f"{', '.join(texts[:limit])} and others (see Record)"


def _perplexity(rows: Sequence[Row]) -> str:
    measured = [row.perplexity for row in rows if row.perplexity]
    if not measured:
        return ""
    texts = listed(
        setting_text(p.text) + (f" (sha256 {p.text_sha256[:DIGEST]})" if p.text_sha256 else "")
        for p in measured
    )
    windows, length = listed(p.windows for p in measured), listed(p.seq_len for p in measured)
    return f"Perplexity: {texts}, {windows} windows of {length} tokens."


def _zero_shot(rows: Sequence[Row]) -> str:
    tasks = dict.fromkeys(task for row in rows for task in row.zero_shot.tasks)
    return f"Zero-shot: {', '.join(tasks)}." if tasks else ""


def _calibration(rows: Sequence[Row], varies: Sequence[str]) -> str:
    pruned = [row for row in rows if not row.dense]
    if not pruned:
        return ""
    text, samples, length, seed, holdout = (
        "as shown" if name in varies else listed(row.setting(name) for row in pruned)
        for name in ("calibration", "samples", "seq_len", "seed", "holdout")
    )
    held_out = any(row.setting("holdout") for row in pruned)
    count = "windows, as many as shown," if "samples" in varies else f"{samples} windows"
    return (
        f"Calibration: {text}, {count} of {length} tokens"
        + (f", seed {seed}" if seed else "")
        + (f", {holdout} of the windows held out." if held_out else ".")
    )
