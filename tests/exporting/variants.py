"""Which of the random models a GGUF file can hold."""

import tiny_models as tm
from coec.exporting.hyperparameters import TARGETS

HELD = [name for name, v in tm.VARIANTS.items() if v["model_type"] in TARGETS]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
UNIT = {"attention_multiplier": 0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "logits_scaling": 1.0}  # fmt: skip
"""Multipliers of a Granite that change nothing, of heads of four."""
