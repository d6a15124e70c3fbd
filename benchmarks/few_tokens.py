"""Repairs of few calibration tokens: perplexity beside that of pruning alone.

    python -m benchmarks.few_tokens [--models stories260K] [--tokens 128 1024] [--unguarded]

30 % of small trained models, windows of 64 tokens. The columns `none` choose units by the same
selection on the same statistics and repair nothing; every other column is over one of these. With
`--unguarded` repairs are left as they are fitted, but for those of `auto` and `best`, which hold
out windows in any case.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, TEXTS
from benchmarks.instances import SHARED

SEQ_LEN, EVALUATED, WINDOWS = 64, 256, 100
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WORSE = 1.02
"""How much above no repair a repair may come out."""
NONE, OBS = "none", "obs, none"
PROPAGATED = "propagate, none"
"""Where errors propagate, units are chosen on the inputs that the pruned model has."""
WAYS: dict[str, dict[str, Any]] = {
    NONE: {"compensation": "none"},
    OBS: {"compensation": "none", "selection": "obs"},
    PROPAGATED: {
        "preset": "fast",
        "compensation": "none",
        "propagate": True,
        "token_weights": "equal",
    },
    **{name: {"compensation": name} for name in ("coec", "rcpu", "bias", "least-squares")},
    "ridge-to-slice": {"compensation": "ridge-to-slice"},
    "fast": {"preset": "fast", "propagate": False},
    "fast, propagate": {"preset": "fast", "propagate": True, "token_weights": "equal"},
    "best": {"preset": "best"},
}
REFERENCES = (NONE, OBS, PROPAGATED)
OWN = ("best", *REFERENCES)
"""Those whose windows are held out as they say, or that need none."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a line per model and number of tokens, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--unguarded", action="store_true")
    chosen = parser.parse_args(arguments)
    ways = list(dict.fromkeys([*REFERENCES, *chosen.ways]))
    print(f"Few tokens. {record.header()}\n")
    print(f"{'model':<14}{'tokens':>7}" + "".join(f"{way:>17}" for way in ways), flush=True)
    rows = []
    for model in chosen.models:
        for tokens in chosen.tokens:
            row = {way: measure(model, tokens, way, chosen) for way in ways}
            rows.append({"model": model, "tokens": tokens, **row})
            print(f"{model:<14}{tokens:>7}" + "".join(_shown(row, way) for way in ways), flush=True)
            record.save("few-tokens", arguments, {"rows": rows})
    above = [
        (row["model"], row["tokens"], way)
        for row in rows
        for way in ways
        if (row[way] or 0) > WORSE * row[_beside(way)]
    ]
    print(f"\n{len(above)} above {WORSE} of no repair: {above}")


def measure(model: str, tokens: int, way: str, chosen: argparse.Namespace) -> float | None:
    """Perplexity of one pruning; None where it is refused."""
    calibration, test = (
        chosen.shared / "data" / TEXTS[model] / name for name in FILES[TEXTS[model]]
    )
    settings = {"preset": "paper", **WAYS[way]}
    if way not in OWN and chosen.unguarded:
        settings["guard"] = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            coec.prune(
                chosen.shared / "models" / model, Path(folder) / "out", sparsity=0.3,
                calibration=str(calibration), samples=max(1, tokens // SEQ_LEN), seq_len=SEQ_LEN,
                **settings,
            )  # fmt: skip
        except coec.CoecError:
            return None
        result = coec.perplexity(
            Path(folder) / "out", str(test), seq_len=EVALUATED, max_windows=WINDOWS
        )
        return float(result.perplexity)


def _beside(way: str) -> str:
    """Return the way that chooses units likewise and repairs nothing."""
    if way in REFERENCES:
        return way
    if way == "best" or WAYS[way].get("propagate"):
        return PROPAGATED
    return OBS if "preset" in WAYS[way] else NONE


def _shown(row: dict[str, float | None], way: str) -> str:
    value, base = row[way], row[_beside(way)]
    if value is None or not base:
        return f"{'refused':>17}"
    return f"{value:>9.2f} ({value / base:.3f})"


if __name__ == "__main__":
    main()
