"""Calibration text to windows: what was asked for is checked first, and made when it is needed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.calibration.ids import token_ids
from coec.calibration.self_text import sample_from_model, windows_that_fit
from coec.calibration.sources import is_named
from coec.calibration.tokens import (
    CHOICE,
    Stream,
    Windows,
    digest,
    held_out,
    is_token_file,
    load_tokenizer,
    read_stream,
    sample_windows,
)
from coec.compensation.shrinkage import few
from coec.errors import CalibrationError, OptionError
from coec.events import Progress
from coec.models.carried import tokenizer_files
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


Maker = Callable[[torch.device, torch.dtype, Progress | None], Windows]


def window_maker(
    dense: Dense, calibration: Calibration, runtime: Runtime, progress: Progress | None
) -> Maker:
    """Checks the calibration text now, and returns a function that makes the windows."""
    seq_len = window_length(calibration, dense)
    samples, added, seed = calibration.samples, calibration.added, calibration.seed
    held_out(samples, calibration.held_out)
    text = None
    if not calibration.own:
        needed = CHOICE * samples * seq_len
        stream = _stream(dense, calibration, runtime, needed, progress)
        text = sample_windows(
            stream, samples=samples, seq_len=seq_len, seed=seed, vocabulary=dense.vocabulary
        )
    if text is not None and not calibration.written:
        return lambda device, dtype, progress: text
    tokenizer = _own_tokenizer(dense, calibration, runtime)

    def make(device: torch.device, dtype: torch.dtype, progress: Progress | None) -> Windows:
        with _room_for_all(device, added=bool(added)):
            network = dense.network(device, dtype, noted=True)
            drawn = sample_from_model(
                network, tokenizer, samples=calibration.written, seq_len=seq_len, seed=seed,
                at_once=windows_that_fit(dense, network, seq_len), progress=progress,
            )  # fmt: skip
        return replace(drawn, sampled=added) if text is None else text.and_sampled(drawn.ids)

    return make


def _own_tokenizer(
    dense: Dense, calibration: Calibration, runtime: Runtime
) -> PreTrainedTokenizerBase | None:
    """What begins a text that the model writes; None beside token ids, where there is none."""
    ids = isinstance(calibration.source, Tensor) or is_token_file(str(calibration.source))
    if ids and not tokenizer_files(dense.folder):
        return None
    return load_tokenizer(dense.folder, trust_remote_code=runtime.trust_remote_code)


@contextmanager
def _room_for_all(device: torch.device, *, added: bool) -> Iterator[None]:
    """Says in one line that the whole network does not fit in the device's memory.

    Args:
        device: that has to hold it.
        added: whether its text is added to another.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        less = "set sampled=0" if added else "calibrate on a text, not on self"
        elsewhere = "" if device.type == "cpu" else ", or device=cpu"
        raise CalibrationError(
            f"text cannot be sampled from the model: {device} has no room for all of it: "
            f"{less}{elsewhere}"
        ) from None


def check_calibrations(dense: Dense, parts: Sequence[Calibration], runtime: Runtime) -> None:
    """Checks one calibration text for all calibrations that name it; it is tokenised once.

    Raises:
        CoecError: it cannot be read, or is too short for one of them.
    """
    wanted = {(part.samples, window_length(part, dense), part.held_out): part for part in parts}
    for samples, _, holdout in wanted:
        held_out(samples, holdout)
    if parts[0].own:
        window_maker(dense, parts[0], runtime, None)
        return
    if any(part.added for part in parts):
        _own_tokenizer(dense, parts[0], runtime)
    most = max(samples * seq_len for samples, seq_len, _ in wanted)
    stream = _stream(dense, parts[0], runtime, CHOICE * most, None)
    for (samples, seq_len, _), part in wanted.items():
        sample_windows(
            stream, samples=samples, seq_len=seq_len, seed=part.seed, vocabulary=dense.vocabulary
        )


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


def _stream(
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
