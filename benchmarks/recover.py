"""What a little training gives a pruned model, against its CPU seconds.

    python -m benchmarks.recover [--models wt2-llama] [--cases minute budgets text] [--draw]

Small trained models at 30 %, 64 windows of 256 tokens for pruning, one thread; every pruning and
every training is a `coec` process of its own. Texts: `fresh` is TinyStories' train text, of which
the calibration windows are a part, or for wt2-llama WikiText-2's `<unk>`-tokenised train text;
`same` is the 64 windows of the pruning; `self` is written by the dense model, whose seconds count.
CPU time, without what Python and its imports take to start. Perplexity and KL are of the first 400
test windows. Budgets are tokens, chosen so that training takes about the seconds that name them.

Writes benchmarks/results/recover.json after every run, keeping runs that are there already, and
from it recover.png and the table that it prints; `--draw` only does that.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, SPARSITY, TEXTS
from benchmarks.instances import SHARED
from benchmarks.presets import WINDOWS, spent

FRESH = {"tinystories": "train.txt", "wikitext-2": "train.tokens.txt"}
SPEED = {"stories260K": 6000, "babyllama-1M": 3600, "wt2-llama": 1800}
"""Tokens per CPU second, about, on the machine of docs/lab/SMALL_MODELS.md."""
STARTS = ("none", "paper", "fast", "best", "fast, by block", "best, by block")
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
    parser.add_argument("--draw", action="store_true")
    chosen = parser.parse_args(arguments)
    if not chosen.draw:
        measure_all(chosen, arguments)
    rows = json.loads((record.RESULTS / "recover.json").read_text())["rows"]
    print(table(rows))
    draw(rows)


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
                yield from (Case(model, start, 60, "fresh", 8) for start in ("fast", "best"))
            else:
                for seed in range(10):
                    starts = STARTS[2:] if seed < 1 else (STARTS[2 + seed % 4],)
                    yield from (Case(model, start, 600, "same", seed=seed) for start in starts)


def measure_all(chosen: argparse.Namespace, arguments: list[str] | None) -> None:
    """Measure every case that is not in the file, and save after each."""
    path = record.RESULTS / "recover.json"
    content = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    rows = content["rows"]
    start = spent([sys.executable, "-c", "import coec.recovery.recover"])["cpu"]
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
        more += ["--non-uniform"] * case.start.endswith("block")
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
        common += ["--teacher", "stored"] if case.stored else []
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

    from coec.text.tokens import Extent
    from coec.text.windows import sample_windows, text_stream
    from coec.models.dense import Dense
    from coec.settings import Calibration, Runtime

    model = Dense.open(dense)
    settings = Calibration(source=str(calibration), samples=samples, seq_len=seq_len, seed=seed)
    stream = text_stream(model, settings, Runtime(), Extent(9 * samples * seq_len), None)
    windows = sample_windows(stream, samples=samples, seq_len=seq_len, seed=seed)
    np.save(folder / "windows.npy", windows.ids.numpy())
    return str(folder / "windows.npy")


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


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw KL against CPU seconds, pruning included, a line for each start on fresh text."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(1, len(TEXTS), figsize=(4.2 * len(TEXTS), 4), layout="constrained")
    for ax, model in zip(axes, TEXTS, strict=True):
        here = [row for row in rows if row["case"]["model"] == model]
        for number, start in enumerate(STARTS):
            line = [
                row for row in here
                if Case(**row["case"]) == Case(model, start, row["case"]["seconds"], "fresh")
            ]  # fmt: skip
            if not line:
                continue
            first = line[0]
            points = [(first["pruning_cpu"], first["before"]["kl"])]
            points += sorted((row["pruning_cpu"] + row["cpu"], row["after"]["kl"]) for row in line)
            ax.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=start, markersize=4)
        ax.set(xscale="log", yscale="log", title=model, xlabel="CPU seconds, pruning included")
        for axis, steps in ((ax.xaxis, (1, 3)), (ax.yaxis, (1, 2, 5))):
            axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=8))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(ticker.NullFormatter())
    axes[0].set_ylabel("KL to the dense model, nats per token")
    axes[0].legend(fontsize=7)
    figure.savefig(record.RESULTS / "recover.png", dpi=120)


if __name__ == "__main__":
    main()
