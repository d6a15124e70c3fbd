"""A random model, and what `coec prune` makes of it."""

import pytest
import torch

import coec
import tiny_models as tm


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    return tm.token_file(tmp_path_factory.mktemp("tokens") / "tokens.npy")


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama", torch.float32), tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="session")
def pruned(dense, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned") / "pruned"
    coec.prune(
        dense,
        folder,
        calibration=tokens,
        samples=24,
        seq_len=32,
        preset="fast",
        propagate=False,
        attention_sparsity=0.3,
    )
    return folder
