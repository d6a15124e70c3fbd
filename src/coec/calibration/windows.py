"""Lengths, digests and token streams of a calibration text."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.calibration.ids import token_ids
from coec.calibration.sources import is_named
from coec.calibration.tokens import (
    Stream,
    digest,
    is_token_file,
    load_tokenizer,
    read_stream,
)
from coec.compensation.shrinkage import few
from coec.errors import CalibrationError, OptionError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import sha256
from coec.settings import Calibration, Runtime

DEFAULT_SEQ_LEN = 2048
"""Tokens of a calibration window where the model takes so many."""
JUDGING = 0.25
"""The fraction of the windows that judge repairs where tokens are few."""


def resolve_seq_len(asked: int | None, positions: int, default: int) -> int:
    """The window length: as asked, or the default capped at the model's positions.

    Raises:
        OptionError: more was asked than the model has positions, or too little to predict.
    """
    if positions < 2:
        raise OptionError(
            f"the model has {positions} positions (max_position_embeddings): a window needs two"
        )
    if asked is None:
        return min(default, positions)
    if asked < 2:
        raise OptionError(f"seq_len must be at least 2, got {asked}")
    if asked > positions:
        raise OptionError(
            f"seq_len={asked} is beyond the model's {positions} positions; use {positions} or less"
        )
    return asked


def source_digest(source: str | Path | Tensor | np.ndarray) -> str:
    """What tells one calibration text from another: the SHA-256 of a file's or a tensor's content.

    A data set of the hub, and text sampled from the model, are known by their names.
    """
    if not isinstance(source, str | Path):
        return digest(token_ids(source))
    name = str(source)
    if source == "self" or (is_named(name) and not is_token_file(name)):
        return name  # also where a file of that name lies here: it is not what is read
    path = Path(source)
    try:
        return sha256(path)
    except FileNotFoundError:
        return str(source)
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror}") from error


def with_judges(calibration: Calibration, model: Description) -> Calibration:
    """Return the calibration with windows that judge repairs, where tokens are few.

    A quarter of the windows, where none are held out, there are few tokens for the columns of the
    widest consumer, and there is a second window.
    """
    if not calibration.guard or calibration.held_out or calibration.samples < 2:
        return calibration
    tokens = calibration.windows * window_length(calibration, model)
    widest = max((site.columns for site in model.layout.sites), default=0)
    return replace(calibration, judging=JUDGING if few(tokens, widest) else 0.0)


def window_length(calibration: Calibration, model: Description) -> int:
    """Tokens of a window; raises OptionError where the model does not take so many."""
    return resolve_seq_len(calibration.seq_len, model.positions, DEFAULT_SEQ_LEN)


def text_stream(
    dense: Dense,
    calibration: Calibration,
    runtime: Runtime,
    needed: int,
    progress: Progress | None,
) -> Stream:
    """Tokens of the calibration text, `needed` of a long one."""
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
