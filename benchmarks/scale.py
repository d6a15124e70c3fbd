"""Plans for models of 70 to 405 billion parameters on a GPU: the table of docs/lab/SCALE.md.

    python -m benchmarks.scale [--write docs/lab/SCALE.md]

Nothing is measured: sizes are those of public configurations. `--write` replaces the table in the
document, between two comments.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import coec
from benchmarks import record
from coec.models.description import Description
from coec.planning.memory import disk, memory, operations
from coec.planning.plan import Plan

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
PHASES = ("passes", "solving", "training")
COLUMNS = ["model", "recipe", *(f"{phase}, GB" for phase in PHASES), "host, GB", "operations",
           "disk, GB"]  # fmt: skip
FIRST, LAST = "<!-- python -m benchmarks.scale -->", "<!-- end of the plans -->"
"""The comments that a table stands between."""


def row(name: str, model: Description, recipe: str) -> list[str]:
    """Cells of one plan; the host's memory is the largest of any phase, without the program."""
    plan = Plan.of(model, coec.Recipe(**RECIPES[recipe]))
    plan = replace(plan, device=torch.device("cuda"), forward=plan.stored, home=torch.device("cpu"))
    moments = {moment.moment: moment for moment in memory(plan)}
    held = {name: moment.needed[0] for name, moment in moments.items()}
    host = max(moment.needed[1] for moment in moments.values())
    sizes = [f"{held[phase] / 1e9:.1f}" if phase in held else "" for phase in PHASES]
    return [name, recipe, *sizes, f"{host / 1e9:.1f}", f"{operations(plan):.1e}",
            f"{disk(plan)[0] / 1e9:.0f}"]  # fmt: skip


def rows(name: str) -> list[list[str]]:
    """Cells of one model, whose skeleton takes seconds, by every recipe."""
    model = Description.of(MODELS[name])
    return [row(name, model, recipe) for recipe in RECIPES]


def main() -> None:
    """Prints the table, or writes it into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    chosen = parser.parse_args()
    document = chosen.write
    table = record.table(COLUMNS, [cells for name in MODELS for cells in rows(name)])
    if document is None:
        print(table)
        return
    before, rest = document.read_text(encoding="utf-8").split(FIRST)
    after = rest.split(LAST)[1]
    document.write_text(f"{before}{FIRST}\n{table}\n{LAST}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
