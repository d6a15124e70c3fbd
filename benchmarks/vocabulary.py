"""The vocabulary as a unit: what fewer tokens cost the real model, alone and with fewer channels.

    python -m benchmarks.vocabulary [--rows "32,768 tokens"] [--shared ../shared]

Tokens are counted in WikiText-2 valid and TinyStories train, 2 MB; 64 windows of 512 tokens of
WikiText-2 valid calibrate channels, with the preset `fast` unless the row names another. Nats per
character are measured in float32 on ten evenly spaced excerpts of WikiText-2 test and of
TinyStories test, 40,000 characters each, in windows of 512 tokens of each model's own. Rows are
kept in benchmarks/results/vocabulary.json.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from benchmarks.real_model import CACHE, folder

DENSE = "dense"
BY_BLOCK: dict[str, Any] = {"budget": 0.827, "by_block": True}
ROWS: dict[str, dict[str, Any]] = {
    DENSE: {},
    "32,768 tokens": {"sparsity": 0.0, "vocabulary": 32768},
    "24,576 tokens": {"sparsity": 0.0, "vocabulary": 24576},
    "16,384 tokens": {"sparsity": 0.0, "vocabulary": 16384},
    "32,768 tokens and channels, budget 0.889": {"budget": 0.889, "vocabulary": 32768},
    "24,576 tokens and channels, budget 0.827": {"budget": 0.827, "vocabulary": 24576},
    "channels, budget 0.889": {"budget": 0.889},
    "channels, budget 0.827": {"budget": 0.827},
    "24,576 tokens and channels by block, budget 0.827": BY_BLOCK | {"vocabulary": 24576},
    "channels by block, budget 0.827": BY_BLOCK,
    "24,576 tokens and channels by block, balanced, budget 0.827": BY_BLOCK
    | {"vocabulary": 24576, "preset": "balanced"},
}
JUDGES = {"WikiText-2": "wikitext-2/test.raw.txt", "stories": "tinystories/test.txt"}
COUNTED = "wikitext-2/valid.raw.txt", "tinystories/train.txt"
_EXCERPTS, _CHARACTERS = 10, 4000


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--shared", type=Path, default=SHARED)
    chosen = parser.parse_args(arguments)
    rows = record.load("vocabulary").get("rows", [])
    for name in chosen.rows:
        if name not in {row["row"] for row in rows}:
            rows.append({"row": name, **measured(ROWS[name], chosen.shared / "data")})
            record.save("vocabulary", arguments, {"rows": rows})
            print(rows[-1], flush=True)
    dense = next(row for row in rows if row["row"] == DENSE)
    lines = [
        [row["row"], f"{1 - row['parameters'] / dense['parameters']:.1%}"]
        + [f"{row[text]:.4f} ({row[text] / dense[text] - 1:+.1%})" for text in JUDGES]
        for row in rows
    ]
    print(record.table(["", "removed", *JUDGES], lines))


def measured(settings: dict[str, Any], data: Path) -> dict[str, Any]:
    """Prune the real model, and return its parameters and nats per character by text."""
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        model = folder()
        if settings:
            counted = ",".join(str(data / name) for name in COUNTED)
            cut = {"vocabulary_text": counted} if "vocabulary" in settings else {}
            coec.prune(
                model, out := Path(work) / "model", samples=64, seq_len=512,
                calibration=str(data / COUNTED[0]), forward_dtype="float32",
                **{"preset": "fast"} | settings | cut,
            )  # fmt: skip
            model = out
        numbers: dict[str, Any] = {}
        for text, path in JUDGES.items():
            result = coec.perplexity(model, excerpts(data / path), seq_len=512, dtype="float32")
            numbers |= {text: result.nats_per_character, "parameters": result.parameters}
    return numbers


def excerpts(path: Path) -> list[str]:
    """Read ten evenly spaced excerpts of a text, 4,000 characters each."""
    whole = path.read_text(encoding="utf-8")
    starts = range(0, len(whole) - _CHARACTERS, len(whole) // _EXCERPTS)
    return [whole[start : start + _CHARACTERS] for start in starts]


if __name__ == "__main__":
    main()
