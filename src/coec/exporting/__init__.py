"""Checkpoints in the formats of other programs: GGUF, which llama.cpp reads."""
