"""How far presets overfit: perplexity over the dense model's, on windows fitted and others.

    python -m benchmarks.overfitting [--models wt2-llama stories260K]

Each model is pruned by 30 % on 64 windows of 256 tokens of its own kind of text, eight of them held
out, and once more on text of the other kind (WikiText-2 for the story models, TinyStories for
wt2-llama). Columns are perplexity over the dense model's on the same windows, so that windows that
are hard for both do not count: the 56 fitted windows of the text, eight for validation, the first
windows of the test text of the model's own kind, and the same after calibration on the other kind.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, SPARSITY, STORIES, TEXTS, WIKI
from benchmarks.instances import SHARED
from coec.text.windows import Windows, split_windows
from coec.evaluation.perplexity import evaluation_windows
from coec.models.dense import Dense
from coec.settings import Calibration, Runtime
from coec.streaming.passes import Backend

PRESETS = ("paper", "fast", "best")
HOLDOUT = 0.125
OTHER = {STORIES: WIKI, WIKI: STORIES}


def main(arguments: list[str] | None = None) -> None:
    """Prints a line per model and preset, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--windows", type=int, default=400, help="of the test texts")
    chosen = parser.parse_args(arguments)
    print(f"Overfitting. {record.header()}\n", flush=True)
    print(f"{'model':<14}{'preset':<8}{'fitted':>8}{'held out':>10}{'test':>8}{'other kind':>12}")
    rows = []
    for model in chosen.models:
        for preset in chosen.presets:
            row = measure(model, preset, chosen.shared, chosen.windows)
            rows.append(row)
            print(
                f"{model:<14}{preset:<8}{row['fitted']:>8.3f}{row['held out']:>10.3f}"
                f"{row['test']:>8.3f}{row['other kind']:>12.3f}",
                flush=True,
            )
            record.save("overfitting", arguments, {"rows": rows})


def measure(model: str, preset: Any, shared: Path, windows: int) -> dict[str, Any]:
    """Perplexity over the dense model's on every kind of windows."""
    dense = Dense.open(shared / "models" / model)
    own = TEXTS[model]
    calibration, test = (shared / "data" / own / name for name in FILES[own])
    other = shared / "data" / OTHER[own] / FILES[OTHER[own]][0]
    how = Calibration(source=calibration, samples=SAMPLES, seq_len=SEQ_LEN, holdout=HOLDOUT)
    drawn = Backend().dense_pass(dense, how, Runtime(device="cpu")).draw()
    fitted, held = split_windows(drawn, HOLDOUT, how.seed)
    assert held is not None
    texts = {
        "fitted": Windows(fitted, str(calibration), drawn.available, ""),
        "held out": Windows(held, str(calibration), drawn.available, ""),
        "test": evaluation_windows(dense, test, seq_len=SEQ_LEN, max_windows=windows),
    }
    found: dict[str, Any] = {"model": model, "preset": preset}
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in (("own", calibration), ("other", other)):
            coec.prune(
                dense, Path(scratch) / name, preset=preset, sparsity=SPARSITY, calibration=text,
                samples=SAMPLES, seq_len=SEQ_LEN, holdout=HOLDOUT,
            )  # fmt: skip
        for name, cut in texts.items():
            found[name] = coec.perplexity(Path(scratch) / "own", cut, baseline=dense).ratio
        found["other kind"] = coec.perplexity(
            Path(scratch) / "other", texts["test"], baseline=dense
        ).ratio
    return found


if __name__ == "__main__":
    main()
