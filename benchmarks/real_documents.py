"""What README and docs/lab/RESULTS.md show of the real model, from the rows that are kept.

    python -m benchmarks.real_documents

Writes the tables between `<!-- real … -->` marks, and benchmarks/results/real.png. A test compares
both documents with the rows.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.real import ABLATION, DENSE, EQUAL, TRAININGS, USUAL, key_of, tables

README = (
    ("the dense model", "", DENSE),
    ("Wanda-sp, no compensation", "", "none"),
    ("FLAP", "", "FLAP"),
    ("RCPU", "`--preset paper --compensation rcpu`", "RCPU"),
    ("OSSCAR, its authors' code", "", "OSSCAR"),
    ("COEC", "`--preset paper`", "paper"),
    ("closed forms", "`--preset fast`", "fast"),
    ("blocks trained, the default", "`--preset balanced`", "balanced"),
    ("closed forms, widths by block", "`--preset fast --by-block`", "fast, by block"),
    ("blocks trained, widths by block", "`--by-block`", "balanced, by block"),
    (
        "blocks trained, widths by block, then `coec recover` on 100,000 tokens", "`--by-block`",
        "balanced, by block, recover 100k",
    ),
)  # fmt: skip
"""A method in words, the flags that make it, and the name of its row."""
MAIN = (
    ("Wanda-sp, no compensation", "none"), ("Wanda-sp, COEC", "none, COEC"),
    ("FLAP, bias", "FLAP"), ("FLAP, COEC", "FLAP, COEC"),
    ("RCPU", "RCPU"), ("RCPU, COEC", "paper"),
)  # fmt: skip
"""The paper's main table."""
SAME = {"+ tempering": "paper", "+ alignment": "paper"}
"""Rows of the ablation that are `paper` where no KV group goes: alignment is for attention."""
_WIKI, _STORIES = "../shared/data/wikitext-2/valid.raw.txt", "../shared/data/tinystories/train.txt"
CALIBRATED = {
    "WikiText-2": {},
    "stories": {"calibration": _STORIES},
    "half of each": {"calibration": f"{_WIKI}=1,{_STORIES}=1"},
}
"""Texts that calibrated, and the settings of their rows."""
_THIRD = {"attention_sparsity": 0.33334}
_EXACT = {"multiple_of": 1}
UNITS: dict[str, tuple[str, dict[str, Any]]] = {
    "channels": ("fast", _EXACT),
    **{
        f"{count} of 30 blocks, and channels": ("fast", {"drop_blocks": count} | _EXACT)
        for count in (1, 2, 3, 6)
    },
    "one of three KV groups, and channels": ("fast", _THIRD),
    "one of three heads in every group, and channels": (
        "fast", {"attention_units": "heads"} | _THIRD,
    ),
    "channels by block": ("fast, by block", {}),
    "2 of 30 blocks, and channels by block": ("fast, by block", {"drop_blocks": 2}),
}  # fmt: skip
"""Row and settings besides, by what is removed, all with the parameters that `fast` leaves."""
BUDGETS = {0.2: 0.889009, 0.3: 0.827348}
Rows = Mapping[tuple[str, float], dict[str, Any]]


def main() -> None:
    """Write the documents and the picture."""
    for name, blocks in documents().items():
        path = record.ROOT / name
        text = path.read_text(encoding="utf-8")
        for mark, content in blocks.items():
            text = replaced(text, mark, content)
        path.write_text(text, encoding="utf-8")
    draw(equal(), record.RESULTS / "real.png")


def kept(settings: dict[str, Any] | None = None, seed: int = 0) -> Rows:
    """Return the rows of the CPU table under these settings and a seed, by name and sparsity."""
    return {
        (row["row"], row["sparsity"]): row
        for row in record.load("real").get("rows", [])
        if row["key"] == key_of(row["row"], row["sparsity"], settings, seed=seed)
    }


def equal(seed: int = 0) -> Rows:
    """Return the rows of README: of one size where they were made so, with the CPU seconds of
    the others, which were measured on CPUs with products of bfloat16.
    """
    rows = kept(seed=seed)
    seconds = {key: {"cpu": row["cpu"]} for key, row in rows.items()}
    same = kept(EQUAL, seed).items()
    return {**rows, **{key: row | seconds.get(key, {}) for key, row in same}}


def documents() -> dict[str, dict[str, str]]:
    """Return what stands between the marks of every document."""
    rows = kept()
    pruned = [row for (name, _), row in rows.items() if name not in TRAININGS]
    every = tables(pruned, "cpu").strip()
    measured = record.load("real").get("rows", [])
    blocks = {
        "real": every, "real main": main_table(rows), "real ablation": ablation(rows),
        "real gpu": tables(measured, "gpu").strip(), "real text": by_text(measured),
        "real equal": by_size(equal()), "real units": by_units(measured),
    }  # fmt: skip
    return {
        "README.md": {"real": readme(equal(), equal(seed=1))}, "docs/lab/RESULTS.md": blocks,
        "docs/RECOVER.md": {"real recover": recovered(rows)},
    }  # fmt: skip


def replaced(text: str, mark: str, content: str) -> str:
    """Return a document with other content between its marks."""
    pattern = re.compile(f"(<!-- {mark} -->\n).*?(\n<!-- /{mark} -->)", re.DOTALL)
    assert pattern.search(text), mark
    return pattern.sub(lambda found: found[1] + content + found[2], text)


def readme(rows: Rows, again: Rows) -> str:
    """Return README's table, at 30 %, with the KL under another draw of windows."""
    lines = []
    for method, flags, name in README:
        row = rows.get((name, 0.0 if name == DENSE else 0.3))
        cells = ["–"] * 5
        if row is not None:
            start = rows.get((TRAININGS[name][0], 0.3), {}) if name in TRAININGS else row
            removed = f"{100 * start['removed']:.1f} %" if "removed" in start else "–"
            minutes = "–" if name == DENSE else f"{row['cpu'] / 60:.0f}"
            both = [row, again.get((name, 0.3), {})]
            kl, stories = (
                ", ".join(f"{one[key]:.3f}" for one in both if key in one) or "–"
                for key in ("kl", "stories_kl")
            )
            cells = [removed, f"{row['perplexity']:.1f}", kl, stories, minutes]
        lines.append([method, flags, *cells])
    heads = ["", "", "removed", "perplexity", "KL", "KL on stories", "minutes"]
    return record.table(heads, lines)


def by_size(rows: Rows) -> str:
    """Return the KL on both texts of every method, by the share of parameters removed."""
    sizes = {s: rows["none", s]["removed"] for s in (0.1, 0.2, 0.3, 0.5) if ("none", s) in rows}
    lines = []
    for method, name in ((method, name) for method, _, name in README if name in USUAL):
        cells = []
        for sparsity, removed in sizes.items():
            row = rows.get((name, sparsity), {})
            same = abs(row.get("removed", 0.0) - removed) < 1e-3
            cells.append(f"{row['kl']:.3f} / {row['stories_kl']:.3f}" if same else "–")
        lines.append([method, *cells])
    return record.table(["", *(f"{100 * removed:.1f} %" for removed in sizes.values())], lines)


def main_table(rows: Rows) -> str:
    """Return the paper's main table: perplexity by selection, compensation and sparsity."""
    sparsities = (0.1, 0.2, 0.3)
    lines = [
        [label, *(_perplexity(rows.get((name, sparsity))) for sparsity in sparsities)]
        for label, name in MAIN
    ]
    return record.table(["", *(f"{100 * sparsity:.0f} %" for sparsity in sparsities)], lines)


def ablation(rows: Rows) -> str:
    """Return COEC built up from RCPU, at 30 %."""
    lines = []
    for name in ABLATION:
        row = rows.get((SAME.get(name, name), 0.3))
        lines.append([name, *(["–"] * 3 if row is None else (
            f"{row['perplexity']:.2f}", f"{row['kl']:.3f}", f"{row['cpu']:.0f}"
        ))])  # fmt: skip
    return record.table(["", "perplexity", "KL", "CPU s"], lines)


def by_text(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return what `fast` gives on both texts at 30 %, by the text that calibrated."""
    by_key = {row["key"]: row for row in measured}
    lines = []
    for text, settings in CALIBRATED.items():
        found = [by_key.get(key_of(name, 0.3, settings)) for name in ("fast", "fast, by block")]
        lines.append([text, *(
            "–" if row is None else f"{row[kl]:.3f}"
            for row in found for kl in ("kl", "stories_kl")
        )])  # fmt: skip
    header = ["calibrated on", "KL", "on stories", "by block: KL", "on stories"]
    return record.table(header, lines)


def by_units(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return what is lost if KV groups, heads or blocks are removed, and fewer channels."""
    by_key = {row["key"]: row for row in measured}
    lines = []
    for sparsity, budget in BUDGETS.items():
        for what, (name, settings) in UNITS.items():
            exact = {name: value for name, value in settings.items() if name != "multiple_of"}
            asked = exact | {"budget": budget} | (_EXACT if exact != settings else {})
            row = by_key.get(key_of(name, sparsity, asked if settings else {}))
            if row is not None:
                lines.append([
                    f"{100 * sparsity:.0f} %", what, f"{100 * row['removed']:.1f} %",
                    f"{row['perplexity']:.1f}", f"{row['kl']:.3f}", f"{row['stories_kl']:.3f}",
                ])  # fmt: skip
    head = ["", "removed", "parameters", "perplexity", "KL", "KL on stories"]
    return record.table(head, lines)


def recovered(rows: Rows) -> str:
    """Return what training gives every start at 30 %, by budget and way."""
    lines = []
    for name, (start, tokens, way) in TRAININGS.items():
        row = rows.get((name, 0.3))
        if row is None:
            continue
        before = rows[start, 0.3]
        pairs = [f"{before[text]:.3f} → {row[text]:.3f}" for text in ("kl", "stories_kl")]
        lines.append([
            start, tokens, way or "all weights, WikiText-2", *pairs, f"{row['perplexity']:.1f}",
            f"{row['cpu'] - row['training_cpu']:.0f} + {row['training_cpu']:.0f}",
            f"{row['tokens'] / row['training_cpu']:.0f}", f"{row['learning_rate']:.1e}",
            f"{row['planned_bytes'] / 1e9:.1f}, {row['bytes'] / 1e9:.1f}",
        ])  # fmt: skip
    header = ["from", "tokens", "what is trained, and on what", "KL", "KL on stories", "perplexity"]
    header += ["CPU s: pruning + training", "tokens a CPU s", "learning rate"]
    header += ["memory: planned, taken (GB)"]
    return record.table(header, lines)


def _perplexity(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['perplexity']:.2f}"


BARS = {
    DENSE: "dense", "none": "Wanda-sp, no compensation", "FLAP": "FLAP", "paper": "COEC",
    "balanced": "coec's default", "balanced, by block": "default, widths by block",
    "balanced, by block, recover 100k": "widths by block, 100,000 tokens of training",
}  # fmt: skip
"""Rows of the picture, and their names there."""


def draw(rows: Rows, path: Path) -> None:
    """Draw the perplexity of the dense model and of what several methods leave of it at 30 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = {n: rows.get((n, 0.0 if n == DENSE else 0.3)) for n in BARS}
    values = {BARS[name]: row["perplexity"] for name, row in found.items() if row is not None}
    colours = ["C7", "C0", "C0", *["C2"] * (len(values) - 3)]
    figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
    bars = ax.barh(list(values), list(values.values()), color=colours)
    ax.bar_label(bars, fmt="%.1f", padding=3)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xlabel="perplexity on WikiText-2 test (lower is better)", xlim=(0, 58))
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
