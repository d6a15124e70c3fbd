"""Plans for models of 70 to 405 billion parameters on a GPU: the table of docs/lab/SCALE.md; and
of trainings of an 8B on one GPU and on eight: the table of docs/RECOVER.md.

    python -m benchmarks.scale [--write docs/lab/SCALE.md]
    python -m benchmarks.scale --trainings [--write docs/RECOVER.md]

Nothing is measured: sizes are those of public configurations. `--write` replaces the table in the
document, between two comments.
"""

import argparse
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from coec.settings.recovery import Recovery

import coec
from benchmarks import record
from coec.models.description import Description
from coec.planning import ComputeConfig, Forecast, Plan
from coec.recovery.plan import footprints

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
    "balanced": {"preset": "balanced"},
}
PHASES = ("calibrating", "passes", "solving attention", "solving mlp", "training blocks")
COLUMNS = ["model", "recipe", *(f"{phase}, GB" for phase in PHASES), "host, GB", "operations",
           "disk, GB"]  # fmt: skip
FIRST, LAST = "<!-- python -m benchmarks.scale{} -->", "<!-- end of the plans -->"
"""The comments that a table stands between."""
LLAMA_8B = {
    **COMMON, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
PRUNED_CHANNELS = 10_048
"""Channels of an 8B of which 30 % went."""
TRAININGS: list[tuple[int, int, dict[str, Any]]] = [
    (24, 1, {"lora": 16, "teacher": "stored"}),
    (24, 8, {"teacher": "stored"}),
    (80, 1, {}),
    (80, 1, {"lora": 16}),
    (80, 1, {"optimizer": "adamw-8bit", "teacher": "stored"}),
    (80, 8, {}),
    (80, 8, {"teacher": "stored"}),
]
"""Gigabytes of a GPU, how many of them, and settings of a training."""
TRAINING_COLUMNS = ["GPUs", "settings", "each, GB", "fits", "hosts together, GB", "disk, GB",
                    "tokens a second of all"]  # fmt: skip
RATE = 4e14
"""Operations a second of a GPU in bfloat16, assumed: half of a large product's on an H200."""
TOKENS = 20_000_000


def trainings() -> list[list[str]]:
    """Cells of each training of an 8B on 20 million tokens."""
    dense = Description.of(LLAMA_8B)
    pruned = Description.of(LLAMA_8B | {"intermediate_size": PRUNED_CHANNELS})
    cells = []
    for gigabytes, count, settings in TRAININGS:
        launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": str(count)}
        with patch.dict(os.environ, launched if count > 1 else {}):
            recovery, free = Recovery(tokens=TOKENS, **settings), int(gigabytes * 1e9)
            way = footprints(dense, pruned, recovery, torch.device("cuda"), free)[0]
        needed, *rest = (f"{size / 1e9:.1f}" for size in (way.bytes, way.host, way.disk))
        sizes = [needed, "yes" if way.bytes <= free else "no", *rest]
        cells.append(
            [f"{count} of {gigabytes} GB", way.flags, *sizes,
             f"{count * RATE * TOKENS / way.operations:,.0f}"]
        )  # fmt: skip
    return cells


def row(name: str, model: Description, recipe: str) -> list[str]:
    """Cells of one plan; the host's memory is the largest of any phase, without the program."""
    plan = Plan.of(model, coec.Recipe(**RECIPES[recipe], solve_dtype="float64"))
    forecast = Forecast.of(plan, ComputeConfig.of(plan, torch.device("cuda")))
    held = {phase.name: sum(phase.device.values()) for phase in forecast.phases}
    host = max(
        sum(size for purpose, size in phase.host.items() if purpose != "program")
        for phase in forecast.phases
    )
    sizes = [f"{held[phase] / 1e9:.1f}" if phase in held else "" for phase in PHASES]
    operations, disk = f"{forecast.operations:.1e}", f"{forecast.output / 1e9:.0f}"
    return [name, recipe, *sizes, f"{host / 1e9:.1f}", operations, disk]


def rows(name: str) -> list[list[str]]:
    """Cells of one model, whose skeleton takes seconds, by every recipe."""
    model = Description.of(MODELS[name])
    return [row(name, model, recipe) for recipe in RECIPES]


def main() -> None:
    """Prints the table, or writes it into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trainings", action="store_true")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    chosen = parser.parse_args()
    document = chosen.write
    if chosen.trainings:
        table = record.table(TRAINING_COLUMNS, trainings())
    else:
        table = record.table(COLUMNS, [cells for name in MODELS for cells in rows(name)])
    if document is None:
        print(table)
        return
    first = FIRST.format(" --trainings" if chosen.trainings else "")
    before, rest = document.read_text(encoding="utf-8").split(first)
    after = rest.split(LAST)[1]
    document.write_text(f"{before}{first}\n{table}\n{LAST}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
