"""Plans for models of 70 to 405 billion parameters, on one GPU and on many: docs/SCALE.md.

    python -m benchmarks.scale [--write docs/SCALE.md]

Nothing is measured: sizes are of public configurations, rates of data sheets. `--write` replaces
the tables in the document, each between two comments.
"""

import argparse
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import coec
from benchmarks import record
from coec.models.description import Description
from coec.planning import ComputeConfig, Forecast, Plan, machine_named
from coec.planning.memory import needed_beside
from coec.planning.phases import Phase
from coec.planning.run import OVER

COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-70B": {
        **COMMON, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "Qwen2.5-72B": {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152_064,
        "rope_theta": 1e6,
    },
    "Llama-3.1-405B": {
        **COMMON, "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
}  # fmt: skip
"""Public dimensions."""
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "fast --no-propagate": {"preset": "fast", "propagate": False},
}
PLACES = (("rtx4090", 1), ("h100", 8), ("h100", 64))
"""GPUs, and how many of them."""
NETWORK, DISK = 1e10, 2e9
"""Bytes per second between machines, and from the disk that the weights are on: assumed."""


@dataclass(frozen=True)
class Planned:
    """One model and recipe at one place.

    Attributes:
        forecast: of one GPU.
        gpus: how many.
        statistics: bytes of the Grams of all blocks.
        weights: bytes of the dense model.
        blocks: of the model, which solves are divided by.
        windows: of the text, which the dense pass is divided by.
    """

    forecast: Forecast
    gpus: int
    statistics: float
    weights: float
    blocks: int
    windows: int

    def fits(self, phase: Phase, *, certainly: bool = False) -> bool:
        """True where the estimate is not refused on the GPU, or certainly fits."""
        assert self.forecast.machine is not None
        room = self.forecast.machine.device_bytes
        return room is None or needed_beside(phase.device) <= room * (1 if certainly else OVER)

    def time(self, phase: Phase) -> str:
        """Show the time of a phase, or that it does not fit."""
        if not self.fits(phase):
            return "does not fit"
        sure = self.fits(phase, certainly=True)
        return record.readable(self.seconds(phase)) + ("" if sure else " (close)")

    def seconds(self, phase: Phase) -> float:
        """Divide a phase's tasks among the GPUs; the one with the most of them counts."""
        whole = self.forecast.seconds[phase.name].typical
        tasks = self.windows if phase.name == "calibrating" else 1
        tasks = self.blocks if phase.name.startswith("solving") else tasks
        return whole * math.ceil(tasks / self.gpus) / tasks

    @property
    def adding(self) -> float:
        """Seconds by which the dense pass is longer than a share of it, as sums are passed on.

        Every worker adds to a block's sums what it has, and hands them to the next: of a row of
        workers the last is that many blocks behind the first.
        """
        if self.gpus == 1:
            return 0.0
        [dense] = [one for one in self.forecast.phases if one.name == "calibrating"]
        stream = self.seconds(dense) / self.blocks
        hop = 2 * self.statistics / self.blocks / NETWORK
        return (self.blocks + self.gpus - 1) * (stream + hop) - self.blocks * stream

    @property
    def reading(self) -> float:
        """Seconds of reading every weight."""
        return self.weights / DISK

    @property
    def total(self) -> float | None:
        """Seconds of the whole run; None where a phase does not fit."""
        phases = self.forecast.phases
        if not all(map(self.fits, phases)):
            return None
        return sum(map(self.seconds, phases)) + self.adding + self.reading


@functools.cache
def described(model: str) -> Description:
    """Built once: its skeleton takes seconds."""
    return Description.of(MODELS[model])


@functools.cache
def plan_of(model: str, recipe: str) -> Plan:
    """The plan of one model."""
    return Plan.of(described(model), coec.Recipe(**RECIPES[recipe]))


def planned(model: str, recipe: str, machine: str, gpus: int) -> Planned:
    """What a plan takes at one place."""
    plan = plan_of(model, recipe)
    gpu = machine_named(machine)
    compute = ComputeConfig.of(plan, torch.device("cuda"), machine=gpu)
    statistics = 8.0 * sum(site.columns**2 for site in plan.model.layout.sites)
    weights = float(plan.parameters_before * compute.stored.itemsize)
    forecast, windows = Forecast.of(plan, compute, gpu), plan.recipe.calibration.windows
    return Planned(forecast, gpus, statistics, weights, plan.dense.layers, windows)


def table(model: str, recipe: str) -> str:
    """Markdown: memory and operations of every phase, and its time at every place."""
    places = [planned(model, recipe, *place) for place in PLACES]
    first = places[0].forecast
    rows = []
    for phase in first.phases:
        host = sum(size for name, size in phase.host.items() if name != "program")
        sizes = [_size(sum(phase.device.values())), _size(host)]
        times = [place.time(phase) for place in places]
        rows.append([phase.name, *sizes, f"{phase.operations:.1e}" if phase.operations else "",
                     *times])  # fmt: skip
    rows.append(
        ["reading the disk", "", "", "", *(record.readable(place.reading) for place in places)]
    )
    rows.append([
        "passing sums on", "", "", "",
        *(record.readable(place.adding) if place.adding else "" for place in places),
    ])  # fmt: skip
    totals = ["–" if place.total is None else record.readable(place.total) for place in places]
    everything = sum(phase.operations for phase in first.phases)
    rows.append(["all", "", "", f"{everything:.1e}", *totals])
    columns = [f"{count} × {_called(name)}" for name, count in PLACES]
    disk = f"Disk: {first.output / 1e9:.0f} GB, and {first.partial / 1e9:.0f} GB meanwhile."
    heading = ["phase", "device, GB", "host, GB", "operations", *columns]
    return f"{record.table(heading, rows)}\n\n{disk}"


def _called(machine: str) -> str:
    return {"rtx4090": "24 GB", "h100": "80 GB"}[machine]


def _size(size: int) -> str:
    return f"{size / 1e9:.1f}" if size else ""


def tables() -> dict[str, str]:
    """Every table, by model and recipe."""
    return {f"{model}, {recipe}": table(model, recipe) for model in MODELS for recipe in RECIPES}


def between(name: str) -> tuple[str, str]:
    """The comments that a table stands between in the document."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def written(text: str) -> str:
    """The document with its tables made again."""
    for name, made in tables().items():
        first, last = between(name)
        before, rest = text.split(first)
        text = f"{before}{first}\n{made}\n{last}{rest.split(last)[1]}"
    return text


def main() -> None:
    """Prints the tables, or writes them into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    chosen = parser.parse_args()
    if chosen.write is not None:
        text = chosen.write.read_text(encoding="utf-8")
        chosen.write.write_text(written(text), encoding="utf-8")
        return
    for name, made in tables().items():
        print(f"### {name}\n\n{made}\n")


if __name__ == "__main__":
    main()
