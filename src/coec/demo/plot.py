"""Picture of the demo's results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coec.evaluation.perplexity import Perplexity
from coec.pipeline.report import Report

COLOURS = {
    "dense": "#3c4043", "none": "#737b86", "bias": "#c9761a", "least-squares": "#2f7d4f",
    "rcpu": "#1f74c4", "coec": "#b3243a", "best": "#6b3fa0",
}  # fmt: skip
SITE = "mlp"
BEST = "best"
"""The reconstructed model, which has a panel of its own."""
SIZE = (16.5, 5.2)
"""Width and height in inches of 150 dots."""


def draw(reports: Mapping[str, Report], scores: Mapping[str, Perplexity], path: Path) -> Path:
    """Draw perplexities of all models and the errors left in every block, as a PNG at `path`."""
    from matplotlib import rc_context

    with rc_context({"font.size": 11.5, "axes.titlesize": 13, "axes.titlelocation": "left"}):
        picture(reports, scores).savefig(path, dpi=150)
    return path


def picture(reports: Mapping[str, Report], scores: Mapping[str, Perplexity]) -> Any:
    """Make three panels; the first two are sorted from the highest perplexity down."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=SIZE, layout=ConstrainedLayoutEngine(wspace=0.08))
    first, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))
    ordered = sorted(scores, key=lambda method: -scores[method].perplexity)
    _draw_perplexities(first, {method: scores[method] for method in ordered})
    _draw_errors(middle, {method: reports[method] for method in ordered if method != BEST})
    _draw_reconstruction(right, reports[BEST])
    for axes in (first, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_perplexities(axes: Any, scores: Mapping[str, Perplexity]) -> None:
    """Draw a bar per compensation, the worst on top, and the dense model's at the bottom."""
    values = {method: score.perplexity for method, score in scores.items()}
    dense = next(iter(scores.values())).baseline_perplexity
    if dense is not None:
        values["dense"] = dense
    names = list(values)[::-1]
    bars = axes.barh(names, [values[n] for n in names], color=[COLOURS[n] for n in names])
    axes.bar_label(bars, fmt="%.2f", padding=5)
    axes.set(title="Perplexity on the dense model's own text", xlabel="lower is better")
    axes.margins(x=0.14)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for name in ("coec", BEST):
        axes.get_yticklabels()[names.index(name)].set_fontweight("bold")


def _draw_errors(axes: Any, reports: Mapping[str, Report]) -> None:
    """Draw a group of bars per block, so that compensations of equal quality stand side by side."""
    errors = {
        method: [row["error_after"] for row in report.sites if row["site"] == SITE]
        for method, report in reports.items()
    }
    # Bars of one block stand side by side around its tick, with a gap to the next block's.
    width = 0.84 / len(errors)
    for index, method in enumerate(errors):
        offset = (index - (len(errors) - 1) / 2) * width
        places = [block + offset for block in range(len(errors[method]))]
        axes.bar(places, errors[method], width * 0.92, label=method, color=COLOURS[method])
    blocks = len(next(iter(errors.values())))
    axes.set(title="Error that compensation leaves in the MLPs", ylabel="relative output error")
    axes.margins(x=0.02, y=0.05)
    _finish(axes, blocks, columns=len(errors))


def _finish(axes: Any, blocks: int, columns: int) -> None:
    """Put a tick at every block, a grid behind the bars, and a legend below them."""
    axes.set(xlabel="block", xticks=range(blocks))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.grid(True, color="#e4e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(
        ncols=columns, handlelength=1.0, columnspacing=1.2, frameon=False, loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
    )  # fmt: skip


def _draw_reconstruction(axes: Any, report: Report) -> None:
    """Draw two bars per block: the error behind it when compensated, and when trained too."""
    rows = [row["reconstruction"] for row in report.sites if "reconstruction" in row]
    compensated = [row["errors"][0] for row in rows]
    trained = [row["errors"][row["taken"]] for row in rows]
    for heights, label, colour, offset in (
        (compensated, "compensated", COLOURS["none"], -0.2),
        (trained, "and trained", COLOURS[BEST], 0.2),
    ):  # fmt: skip
        axes.bar([at + offset for at in range(len(rows))], heights, 0.36, label=label, color=colour)
    for at, (before, after) in enumerate(zip(compensated, trained, strict=True)):
        axes.annotate(f"−{1 - after / before:.0%}", (at, max(before, after)), ha="center",
                      xytext=(0, 4), textcoords="offset points", fontsize=10)  # fmt: skip
    axes.set(title="What the training of best wins in every block")
    axes.set(ylabel=f"error of the hidden states, {report.measured_on} windows")
    _finish(axes, len(rows), columns=2)
