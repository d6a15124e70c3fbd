"""Window lengths, digests and token streams of a calibration text."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.calibration.ids import token_ids
from coec.calibration.sources import is_named
from coec.calibration.tokenizer import load_tokenizer
from coec.calibration.tokens import Stream, digest, is_token_file, read_stream
from coec.compensation.shrinkage import few
from coec.errors import CalibrationError, OptionError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import sha256
from coec.settings import Calibration, Runtime

DEFAULT_SEQ_LEN = 2048
"""Tokens of a calibration window, if the model has so many positions."""
_JUDGING = 0.25
"""Fraction of the windows that judge compensations where tokens are few."""


def resolve_seq_len(seq_len: int | None, positions: int, default: int) -> int:
    """Resolve the window length: the default is capped at the model's positions.

    Raises:
        OptionError: it is beyond the model's positions, or too short to predict anything.
    """
    if positions < 2:
        raise OptionError(
            f"the model has {positions} positions (max_position_embeddings): a window needs two"
        )
    if seq_len is None:
        return min(default, positions)
    if seq_len < 2:
        raise OptionError(f"seq_len must be at least 2, got {seq_len}")
    if seq_len > positions:
        raise OptionError(
            f"seq_len={seq_len} is beyond the model's {positions} positions; "
            f"use {positions} or less"
        )
    return seq_len


def source_digest(source: str | Path | Tensor | np.ndarray) -> str:
    """Identify a calibration text by the SHA-256 of the file's or tensor's content.

    A data set of the hub, and text sampled from the model, are identified by name.
    """
    if not isinstance(source, str | Path):
        return digest(token_ids(source))
    name = str(source)
    if source == "self" or (is_named(name) and not is_token_file(name)):
        return name  # a file of that name in the working folder is not read
    path = Path(source)
    try:
        return sha256(path)
    except FileNotFoundError:
        return str(source)
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror}") from error


def with_judges(calibration: Calibration, model: Description) -> Calibration:
    """Set aside windows that judge compensations, where tokens are few.

    They are a quarter of the windows. None are set aside if others are held out, tokens suffice for
    the columns of the widest consumer, or there is only one window.
    """
    if not calibration.guard or calibration.held_out or calibration.samples < 2:
        return calibration
    tokens = calibration.windows * window_length(calibration, model)
    widest = max((site.columns for site in model.layout.sites), default=0)
    return replace(calibration, judging=_JUDGING if few(tokens, widest) else 0.0)


def window_length(calibration: Calibration, model: Description) -> int:
    """Tokens of a window; raises OptionError if the model has fewer positions."""
    return resolve_seq_len(calibration.seq_len, model.positions, DEFAULT_SEQ_LEN)


def text_stream(
    dense: Dense,
    calibration: Calibration,
    runtime: Runtime,
    needed: int,
    progress: Progress | None,
) -> Stream:
    """Read the tokens of the calibration text, or `needed` tokens of a long one."""
    if isinstance(calibration.source, Tensor):
        return Stream(calibration.source, "tensor", "")

    def tokenizer() -> PreTrainedTokenizerBase:
        return load_tokenizer(dense.folder, trust_remote_code=runtime.trust_remote_code)

    source = str(calibration.source)
    if not is_token_file(source):
        tokenizer()
    return read_stream(
        source,
        tokenizer,
        split="train",
        text_column=calibration.text_column,
        needed=needed,
        progress=progress,
    )
