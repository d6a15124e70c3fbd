"""Draws what every preset gives for its time: KL to the dense model against CPU seconds.

    python -m benchmarks.frontier

30 %, seed 0. Times are those of `benchmarks.presets`, over `paper` and without the start; KL is
that of the published rows (`make results-beyond`). Writes benchmarks/results/frontier.png.
"""

import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.checkpoints import SPARSITY, TEXTS
from benchmarks.record import RESULTS
from coec.settings import PRESETS


def main() -> None:
    """Write the figure, and print its numbers."""
    times = json.loads((RESULTS / "presets.json").read_text())
    lines = (RESULTS / "beyond.jsonl").read_text().splitlines()
    kl = {key: row for row in map(json.loads, lines) if (key := _key(row))}
    figure, axes = plt.subplots(1, len(TEXTS), figsize=(4 * len(TEXTS), 3.6), layout="constrained")
    for ax, model in zip(axes, TEXTS, strict=True):
        rows = [row for row in times["rows"] if row["model"] == model]
        base = next(row["cpu"] for row in rows if row["preset"] == "paper") - times["start"]
        for by_block, marker in ((False, "o"), (True, "s")):
            points = []
            for row in rows:
                found = kl.get((model, row["preset"], by_block))
                if row["by_block"] == by_block and found:
                    ratio = (row["cpu"] - times["start"]) / base
                    points.append((ratio, found["perplexity"]["kl"], row["preset"]))
                    print(model, row["preset"], "by block" * by_block, *points[-1][:2])
            label = "widths by block" if by_block else "uniform widths"
            ax.plot(*list(zip(*points, strict=True))[:2], marker, label=label)
            for x, y, name in points:
                ax.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        ax.set(title=model, xlabel="CPU seconds / paper", xscale="log", yscale="log")
    axes[0].set_ylabel("KL to the dense model, nats per token")
    axes[0].legend(fontsize=8)
    figure.savefig(RESULTS / "frontier.png", dpi=120)


def _key(row: dict[str, Any]) -> tuple[str, str, bool] | None:
    """Model, preset and kind of widths of a row that is a preset as it comes."""
    settings = row["settings"]
    preset = PRESETS.get(settings.get("preset"))
    if preset is None or row["status"] != "done" or settings["sparsity"] != SPARSITY:
        return None
    wanted = {
        "samples": 64,
        "seed": 0,
        "selection": "rcpu",
        "compensation": "coec",
        **preset.settings,
    }
    wanted.pop("allocation", None)
    found = {**settings, **settings["options"]}
    by_block = settings["allocation"] == "error"
    alike = all(found.get(name) == value for name, value in wanted.items())
    alike = alike and settings["allocation"] in ("uniform", "error") and settings["kept"] is None
    if preset.settings.get("kv_groups", "uniform") != settings["kv_groups"]:
        alike = False
    return (row["model"], settings["preset"], by_block) if alike else None


if __name__ == "__main__":
    main()
