"""The demo's picture."""

from collections.abc import Mapping
from pathlib import Path

from coec.evaluation.perplexity import Perplexity
from coec.report import Report

COLOURS = {
    "none": "#9aa0a6",
    "bias": "#c58b4b",
    "least-squares": "#7aa37a",
    "rcpu": "#5b8db8",
    "coec": "#b8323f",
}


def draw(reports: Mapping[str, Report], scores: Mapping[str, Perplexity], path: Path) -> Path:
    """Perplexity of every repair, and the output error left in every block; a PNG at `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    dense = next(iter(scores.values())).baseline_perplexity
    if dense is not None:
        left.bar_label(left.bar("dense", dense, color="#3c4043", width=0.7), fmt="%.1f", padding=2)
    for method, score in scores.items():
        bar = left.bar(method, score.perplexity, color=COLOURS[method], width=0.7)
        left.bar_label(bar, fmt="%.1f", padding=2)
    left.set(title="Perplexity on text sampled from the dense model", ylabel="lower is better")
    left.tick_params(axis="x", labelsize=9)
    left.margins(y=0.12)
    for method, report in reports.items():
        if method == "bias":  # close to `none`; its line would hide it
            continue
        errors = [row["error_after"] for row in report.sites if row["site"] == "mlp"]
        right.plot(range(len(errors)), errors, marker="o", label=method, color=COLOURS[method])
    right.set(
        title="What is left to repair, MLP",
        xlabel="block",
        ylabel="relative output error",
        ylim=(0, None),
    )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
