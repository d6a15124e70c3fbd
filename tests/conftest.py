"""What every test shares. Shapes and dtypes in annotations are checked here, and only here."""

import os
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from jaxtyping import install_import_hook

install_import_hook("coec", "typechecker.check")

import pytest
import torch
from transformers.utils import logging as transformers_logging

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Third-party models, texts and reference vectors that may not be committed."""

transformers_logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _deterministic():
    """Every test starts from the same random state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data; a test that needs it is skipped where it is not there."""
    if not SHARED.is_dir():
        pytest.skip("needs the project's shared models and texts (../shared), which are not here")
    return SHARED
