"""The tables of `benchmarks.gguf_speed`, of what it kept; llama.cpp is not needed for them."""

from typing import Any

import numpy as np

from benchmarks import record

FFN, KV_HEADS = 2816, 6
"""Of the dense model."""
PROMPT, NEW = 256, 32
"""Tokens read at once, and tokens written one by one."""
ANALYZE = "coec analyze, float32"


def described(content: dict[str, Any]) -> list[str]:
    """Three tables of ratios, of reading, writing and sizes: a line for every pruned model."""
    rows = content["rows"]
    programs = list(dict.fromkeys(row["program"] for row in rows))
    found = {(row["program"], row["removed"], row["align"]): row for row in rows}
    files = [name for name in programs if name != ANALYZE]
    tables = [_rates(content["models"], found, programs, what) for what in ("read", "write")]
    sizes = [
        [*_model(one), *(_size(found.get((kind, one["removed"], one["align"]))) for kind in files)]
        for one in content["models"]
    ]
    return [*tables, record.table([*COLUMNS, *(f"MB, {kind}" for kind in files)], sizes)]


COLUMNS = ["removed", "channels", "KV groups", "parameters"]
TITLES = {"read": f"reads {PROMPT}", "write": f"writes {NEW}"}


def _rates(
    models: list[dict[str, Any]], found: dict[Any, Any], programs: list[str], what: str
) -> str:
    """Ratios to the dense model with their range, and first the dense model's rates."""
    dense = {
        name: np.median(
            [row[what]["dense"]["median"] for key, row in found.items() if key[0] == name]
        )
        for name in programs
    }
    lines = [["–", str(FFN), str(KV_HEADS), "1", *(f"{dense[n]:.3g} tokens/s" for n in programs)]]
    for one in models:
        cells = []
        for name in programs:
            row = found.get((name, one["removed"], one["align"]))
            paired_ = row and row[what]["paired"]
            cells.append(
                f"{paired_['median']:.2f} ({paired_['least']:.2f}–{paired_['greatest']:.2f})"
                if paired_ else "–"
            )  # fmt: skip
        lines.append([*_model(one), *cells])
    return record.table([*COLUMNS, *(f"{TITLES[what]}, {name}" for name in programs)], lines)


def _model(one: dict[str, Any]) -> list[str]:
    aligned = f" (× {one['align']})" if one["align"] > 1 else ""
    return [f"{one['removed']} %", f"{one['ffn']}{aligned}", str(one["kv_heads"]),
            f"{one['parameters']:.3f}"]  # fmt: skip


def _size(row: dict[str, Any] | None) -> str:
    return f"{row['megabytes'][0]:.0f} → {row['megabytes'][1]:.0f}" if row else "–"
