"""A random model and what `coec prune` makes of it."""

import pytest
import torch

import coec
import tiny_models as tm


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory):
    return tm.save(tm.tiny("llama", torch.float32), tmp_path_factory.mktemp("pair") / "dense")


@pytest.fixture(scope="session")
def pruned_folder(dense_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "pruned"
    tokens = tm.token_file(tmp_path_factory.mktemp("tokens") / "tokens.npy")
    coec.prune(dense_folder, folder, calibration=tokens, samples=24, seq_len=32, rounds=2, r_p=4,
               preset="paper")  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def trained_folder(dense_folder, tmp_path_factory):
    """Pruned, and every block trained as a whole."""
    folder = tmp_path_factory.mktemp("pair") / "trained"
    tokens = tm.token_file(tmp_path_factory.mktemp("tokens") / "tokens.npy")
    coec.prune(dense_folder, folder, calibration=tokens, samples=8, seq_len=32, reconstruct=1,
               guard=False, compensation="ridge-to-slice", preset="paper")  # fmt: skip
    return folder
