"""What `coec prune` makes of the random model."""

import pytest

import coec


@pytest.fixture(scope="session")
def pruned_folder(dense, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "pruned"
    coec.prune(dense, folder, calibration=tokens, samples=24, seq_len=32, r_p=4,
               preset="paper")  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def trained_folder(dense, tokens, tmp_path_factory):
    """Pruned, and every block trained as a whole."""
    folder = tmp_path_factory.mktemp("pair") / "trained"
    coec.prune(dense, folder, calibration=tokens, samples=8, seq_len=32, reconstruct=1,
               guard=False, compensation="ridge-to-slice", preset="paper")  # fmt: skip
    return folder
