"""The paper's experiments, made with coec's public functions."""
