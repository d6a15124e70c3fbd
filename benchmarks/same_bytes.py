"""With fewer bytes: quantise further, prune and quantise, or prune, train and quantise.

    python -m benchmarks.same_bytes [--models wt2-llama] [--draw]

Small trained models, whole or pruned by 10 to 30 %: uniform widths by the default preset, and
widths by block followed by a minute of `coec recover`. Every matrix, embeddings and head too, is
rounded to the nearest of 2^bits values in groups of 32 along its rows, with a scale and a minimum
of 16 bits each; a real quantiser does better at few bits, for whole and pruned models alike. The
rest has 16 bits. Perplexity and KL to the dense model are of the first 200 test windows of 256
tokens.

Writes benchmarks/results/same_bytes.json after every model, keeping those that are there already,
and same_bytes.png, and prints the table; `--draw` only draws and prints.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, TEXTS
from benchmarks.instances import SHARED
from benchmarks.recover import FRESH, SPEED

BITS = 16, 8, 6, 5, 4, 3
GROUP = 32
SHARES = 0.1, 0.2, 0.3
WINDOWS = 200
KINDS = ("quantised", "pruned, quantised", "pruned by block, trained a minute, quantised")


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--draw", action="store_true")
    chosen = parser.parse_args(arguments)
    path = record.RESULTS / "same_bytes.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    cases = [(KINDS[0], 0.0), *itertools.product(KINDS[1:], SHARES)]
    for model, (kind, share) in itertools.product([] if chosen.draw else chosen.models, cases):
        if not any((row["model"], row["kind"], row["removed"]) == (model, kind, share)
                   for row in rows):  # fmt: skip
            rows += measure(model, kind, share, chosen.shared)
            record.save("same_bytes", arguments, {"rows": rows})
    print(table(rows))
    draw(rows)


def measure(model: str, kind: str, share: float, shared: Path) -> list[dict[str, Any]]:
    """Prune, train where the kind says so, and measure at every number of bits."""
    folder, dense = shared / "data" / TEXTS[model], shared / "models" / model
    calibration, test = (folder / name for name in FILES[TEXTS[model]])
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        made = _made(dense, kind, share, calibration, folder / FRESH[TEXTS[model]], Path(scratch))
        for bits in BITS:
            network: Any = AutoModelForCausalLM.from_pretrained(
                made, dtype=torch.float32, trust_remote_code=True
            )
            size = quantise(network, bits)
            result = coec.perplexity(
                network, str(test), baseline=dense, seq_len=SEQ_LEN, max_windows=WINDOWS,
                device="cpu",
            )  # fmt: skip
            rows.append(
                {
                    "model": model,
                    "kind": kind,
                    "removed": share,
                    "bits": bits,
                    "bytes": size,
                    "perplexity": result.perplexity,
                    "kl": result.kl,
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


def _made(
    dense: Path, kind: str, share: float, calibration: Path, text: Path, scratch: Path
) -> Path:
    if kind == KINDS[0]:
        return dense
    common: dict[str, Any] = {"seq_len": SEQ_LEN, "device": "cpu"}
    coec.prune(
        dense, scratch / "pruned", sparsity=share, samples=SAMPLES, calibration=str(calibration),
        non_uniform=kind == KINDS[2], **common,
    )  # fmt: skip
    if kind == KINDS[1]:
        return scratch / "pruned"
    coec.recover(
        dense, scratch / "pruned", scratch / "trained", text=str(text),
        tokens=60 * SPEED[dense.name], **common,
    )  # fmt: skip
    return scratch / "trained"


def quantise(network: PreTrainedModel, bits: int) -> float:
    """Round every matrix of a network; return its bytes."""
    size = 0.0
    for parameter in network.parameters():  # tied ones once
        if parameter.ndim < 2 or bits == 16:
            parameter.data = parameter.data.half().float()
            size += 2 * parameter.numel()
            continue
        parameter.data = rounded(parameter.data, bits)
        groups = parameter.shape[0] * -(-parameter.shape[1] // GROUP)
        size += parameter.numel() * bits / 8 + 4 * groups
    return size


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The nearest of 2^bits equidistant values between the least and the largest of each group."""
    columns = weight.shape[1]
    short = -columns % GROUP
    padded = torch.cat([weight, weight[:, -1:].expand(-1, short)], 1) if short else weight
    groups = padded.reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    low = low.half().float()
    step = ((high - low) / (2**bits - 1)).half().float().clamp(min=2**-24)
    codes = ((groups - low) / step).round().clamp(0, 2**bits - 1)
    return (low + codes * step).reshape(len(weight), -1)[:, :columns]


def _line(row: dict[str, Any]) -> str:
    size, perplexity, kl = row["bytes"] / 1e6, row["perplexity"], row["kl"]
    cells = [row["model"], row["kind"], f"{row['removed']:.0%}", str(row["bits"]),
             f"{size:.3f}", f"{perplexity:.3f}", f"{kl:.4f}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, as Markdown."""
    heads = ("model", "what", "removed", "bits", "MB", "perplexity", "KL")
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *map(_line, rows)])


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw KL against bytes: a line for each model that is quantised."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    names = [name for name in TEXTS if any(row["model"] == name for row in rows)]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.4 * len(names), 4.2), layout="constrained", squeeze=False
    )
    styles = {KINDS[0]: ("k", "o-"), KINDS[1]: ("C0", "s--"), KINDS[2]: ("C1", "^-")}
    for ax, name in zip(axes[0], names, strict=True):
        whole = next(r["bytes"] for r in rows if r["model"] == name and r["bits"] == 16)
        for kind, (color, style) in styles.items():
            shares = sorted({r["removed"] for r in rows if (r["model"], r["kind"]) == (name, kind)})
            for number, share in enumerate(shares):
                line = [r for r in rows
                        if (r["model"], r["kind"], r["removed"]) == (name, kind, share)
                        and r["kl"] > 1e-5]  # fmt: skip
                ax.plot(
                    [r["bytes"] / whole for r in line], [r["kl"] for r in line], style,
                    color=color, markersize=3.5, linewidth=1,
                    alpha=1 - 0.25 * (len(shares) - 1 - number),
                    label=kind if number == len(shares) - 1 else None,
                )  # fmt: skip
        ax.set(xscale="log", yscale="log", title=name, xlabel="bytes, of 16-bit dense")
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5), numticks=9))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes[0][0].set_ylabel("KL to the dense model, nats per token")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(record.RESULTS / "same_bytes.png", dpi=120)


if __name__ == "__main__":
    main()
