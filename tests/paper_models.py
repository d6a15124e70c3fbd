"""Configurations of the models in the paper's table of deployment costs."""

import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_name("paper_models.toml").read_text(encoding="utf-8"))
QWEN_7B, LLAMA_8B, LLAMA_70B = (_TABLES[name] for name in ("QWEN_7B", "LLAMA_8B", "LLAMA_70B"))
