"""Which of the random models a GGUF file can hold."""

import tiny_models as tm
from coec.exporting.targets import TARGETS

HELD = [name for name, v in tm.VARIANTS.items() if v["model_type"] in TARGETS]
