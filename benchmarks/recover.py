"""What a little training gives a pruned model, against its CPU seconds.

    python -m benchmarks.recover [--models wt2-llama] [--cases minute budgets text] [--table]

Small trained models at 30 %, 64 windows of 256 tokens for pruning, one thread; every pruning and
every training is a `coec` process of its own. Texts: `fresh` is TinyStories' train text, of which
the calibration windows are a part, or for wt2-llama WikiText-2's `<unk>`-tokenised train text;
`same` is the 64 windows of the pruning; `self` is written by the dense model, whose seconds count.
CPU time, without what Python and its imports take to start. Perplexity and KL are of the first 400
test windows. Budgets are tokens, chosen so that training takes about the seconds that name them.

Writes benchmarks/results/recover.json after every run, and keeps runs that are there already;
`--table` prints them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coec
from benchmarks import record
from benchmarks.instances import SHARED

STORIES, WIKI = "tinystories", "wikitext-2"
TEXTS = {"stories260K": STORIES, "babyllama-1M": STORIES, "wt2-llama": WIKI}
FILES = {STORIES: ("train.txt", "test.txt"), WIKI: ("valid.raw.txt", "test.raw.txt")}
"""Text of calibration and of evaluation."""
SAMPLES, SEQ_LEN, SPARSITY, WINDOWS = 64, 256, 0.3, 400
FRESH = {STORIES: "train.txt", WIKI: "train.tokens.txt"}
SPEED = {"stories260K": 6000, "babyllama-1M": 3600, "wt2-llama": 1800}
"""Tokens per CPU second, about, on the machine of docs/lab/SMALL_MODELS.md."""
STARTS = ("none", "paper", "fast", "balanced", "fast, by block", "balanced, by block")
PRESETS = {
    "none": ("fast", "--no-propagate", "--compensation", "none"),
    "fast": ("fast", "--no-propagate"),
}
BUDGETS = {15: STARTS[2:], 300: STARTS, 1800: STARTS[5:], 3600: STARTS[5:]}
"""Starts of shorter and longer budgets. Half an hour takes more text than TinyStories has here, so
that wt2-llama alone has that and an hour."""
CASES = ("minute", "budgets", "text", "stored", "lora", "few")


class Case(NamedTuple):
    """A training.

    Attributes:
        start: what is trained.
        seconds: of the budget, about.
        text: fresh, same or self.
        lora: rank of the additions; 0 for all weights.
        stored: the dense model's predictions are written first, the 64 most probable of each token.
    """

    model: str
    start: str
    seconds: int
    text: str
    lora: int = 0
    seed: int = 0
    stored: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--starts", type=Path, default=Path("results-recover"))
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args(arguments)
    if not chosen.table:
        measure_all(chosen, arguments)
    rows = json.loads((record.RESULTS / "recover.json").read_text())["rows"]
    print(table(rows))


def cases(models: list[str], names: list[str]) -> Iterator[Case]:
    """Yield the trainings, those of a minute first."""
    for name in names:
        for model in models:
            if name == "minute":
                yield from (Case(model, start, 60, "fresh") for start in STARTS)
            elif name == "budgets":
                for time, starts in BUDGETS.items():
                    if time <= 300 or model == "wt2-llama":
                        yield from (Case(model, start, time, "fresh") for start in starts)
            elif name == "text":
                yield Case(model, "fast, by block", 60, "self")
            elif name == "stored":
                yield Case(model, "fast, by block", 60, "fresh", stored=True)
            elif name == "lora":
                yield from (Case(model, start, 60, "fresh", 8) for start in ("fast", "balanced"))
            else:
                for seed in range(10):
                    starts = STARTS[2:] if seed < 1 else (STARTS[2 + seed % 4],)
                    yield from (Case(model, start, 600, "same", seed=seed) for start in starts)


def measure_all(chosen: argparse.Namespace, arguments: list[str] | None) -> None:
    """Measure every case that is not in the file, and save after each."""
    path = record.RESULTS / "recover.json"
    content = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    rows = content["rows"]
    start = spent([sys.executable, "-c", "import coec.recovery.session"])["cpu"]
    for case in cases(chosen.models, chosen.cases):
        if any(Case(**row["case"]) == case for row in rows):
            continue
        rows.append({"case": case._asdict(), **measure(case, chosen.shared, chosen.starts, start)})
        record.save("recover", arguments, {"start": start, "rows": rows})
        print(_line(rows[-1]), flush=True)


def measure(case: Case, shared: Path, starts: Path, python: float) -> dict[str, Any]:
    """Prune, unless that was done before, train, and measure both."""
    folder = shared / "data" / TEXTS[case.model]
    calibration, test = (folder / name for name in FILES[TEXTS[case.model]])
    dense = shared / "models" / case.model
    pruned = starts / f"{case.model}-{case.start.replace(', ', '-')}-{case.seed}".replace(" ", "-")
    common = ["--seq-len", str(SEQ_LEN), "--device", "cpu", "--seed", str(case.seed), "--quiet"]
    seconds = pruned.with_suffix(".json")
    if not seconds.is_file():
        preset, *more = PRESETS.get(name := case.start.split(",")[0], (name,))
        more += ["--by-block"] * case.start.endswith("block")
        command = ["prune", str(dense), str(pruned), "--preset", preset, "--sparsity",
                   str(SPARSITY), "--samples", str(SAMPLES), "--calibration", str(calibration),
                   "--force", *more, *common]  # fmt: skip
        cost = spent([sys.executable, "-m", "coec", *command])["cpu"]
        seconds.write_text(json.dumps({"cpu": cost, **_quality(pruned, dense, test)}))
    before = json.loads(seconds.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        text = {"fresh": str(folder / FRESH[TEXTS[case.model]]), "self": "self"}.get(case.text)
        if text is None:
            text = same_windows(
                dense, calibration, Path(scratch), samples=SAMPLES, seq_len=SEQ_LEN, seed=case.seed
            )
        out, tokens = f"{scratch}/out", SPEED[case.model] * case.seconds
        common += ["--lora", str(case.lora)] if case.lora else []
        common += ["--predictions", "stored"] if case.stored else []
        command = ["recover", str(dense), str(pruned), out, "--text", text, "--tokens", str(tokens)]
        command += common
        numbers = spent([sys.executable, "-m", "coec", *command])
        training = json.loads(Path(out, "coec.json").read_text())["recoveries"][-1]
        after = _quality(out, dense, test)
    return {
        "pruning_cpu": before.pop("cpu") - python, "before": before, "after": after,
        "cpu": numbers["cpu"] - python, "bytes": numbers["bytes"],
        **{name: training[name] for name in ("tokens", "passes", "held_out", "improved", "curve",
                                             "learning_rate")},
    }  # fmt: skip


def same_windows(
    dense: Path, calibration: Path, folder: Path, *, samples: int, seq_len: int, seed: int
) -> str:
    """Write the windows that a pruning is calibrated on, as token ids; return the file."""
    import numpy as np

    from coec.models.dense import Dense
    from coec.text.tokens import Extent
    from coec.text.windows import sample_windows, text_stream

    extent = Extent(9 * samples * seq_len)
    stream = text_stream(
        Dense.open(dense), str(calibration), "text", extent, trust_remote_code=False, progress=None
    )
    windows = sample_windows(stream, samples=samples, seq_len=seq_len, seed=seed)
    np.save(folder / "windows.npy", windows.ids.numpy())
    return str(folder / "windows.npy")


def spent(command: list[str]) -> dict[str, float]:
    """Run a process on one thread; return its CPU seconds and its peak memory in bytes."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            code = process.returncode
            raise SystemExit(f"{' '.join(command)} ended with {code}: {errors.read()[-2000:]}")
    return {"cpu": usage.ru_utime + usage.ru_stime, "bytes": 1024 * usage.ru_maxrss}


def _quality(model: Path | str, dense: Path, test: Path) -> dict[str, float | None]:
    result = coec.perplexity(
        model, text=str(test), baseline=str(dense), seq_len=SEQ_LEN, max_windows=WINDOWS,
        device="cpu",
    )  # fmt: skip
    return {"perplexity": result.perplexity, "kl": result.kl}


def _line(row: dict[str, Any]) -> str:
    case = Case(**row["case"])
    weights = f"rank {case.lora}" if case.lora else "all"
    weights += ", stored teacher" if case.stored else ""
    cells = [
        case.model, case.start, case.text, weights, f"{row['tokens'] / 1000:,.0f}k",
        f"{row['cpu']:.0f}", f"{row['pruning_cpu']:.0f}",
        *(f"{row[at]['perplexity']:.2f} / {_short(row[at]['kl'])}" for at in ("before", "after")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _short(kl: float) -> str:
    return f"{kl:.3f}" if kl >= 0.05 else f"{kl:.4f}"


def table(rows: list[dict[str, Any]]) -> str:
    """All trainings but those of many seeds, as Markdown."""
    heads = (
        "model",
        "start",
        "text",
        "weights",
        "tokens",
        "CPU s",
        "of pruning",
        "before",
        "after",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [_line(row) for row in rows if row["case"]["text"] != "same"]
    many = [row for row in rows if row["case"]["text"] == "same"]
    better = [row["after"]["kl"] <= row["before"]["kl"] for row in many]
    gains = [1 - row["after"]["kl"] / row["before"]["kl"] for row in many]
    if many:
        lines.append(
            f"\n64 windows and a budget of 600 s: {sum(better)} of {len(many)} are no worse on the "
            f"test text, least gain {min(gains):.1%}, mean {sum(gains) / len(gains):.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
