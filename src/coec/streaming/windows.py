"""Calibration windows of a text, and those that the dense model itself writes.

A text is checked before any work; what the model writes is made when it is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.calibration.sources import mixture
from coec.calibration.tokens import Stream, is_token_file, load_tokenizer
from coec.calibration.windows import (
    CHOICE,
    Windows,
    held_out,
    mixed,
    parts_of,
    sample_windows,
    text_stream,
    window_length,
)
from coec.errors import CalibrationError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.folder import tokenizer_files
from coec.settings import Calibration, Runtime
from coec.streaming.self_text import sample_from_model, windows_that_fit

Maker = Callable[[torch.device, torch.dtype, Progress | None], Windows]


def window_maker(
    dense: Dense, calibration: Calibration, runtime: Runtime, progress: Progress | None
) -> Maker:
    """Check the calibration text now, and return a function that makes the windows."""
    seq_len = window_length(calibration, dense)
    added, seed = calibration.added, calibration.seed
    held_out(calibration.samples, calibration.held_out)
    text = None
    if not calibration.own:
        text = _drawn(_streams(dense, [calibration], runtime, progress), dense, calibration)
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


def _streams(
    dense: Dense,
    calibrations: Sequence[Calibration],
    runtime: Runtime,
    progress: Progress | None,
) -> list[Stream]:
    """Read every source of one text or mixture once, as far as all the calibrations need."""
    streams = []
    for alike in zip(*map(parts_of, calibrations), strict=True):
        most_tokens = max(part.samples * window_length(part, dense) for part in alike)
        streams.append(text_stream(dense, alike[0], runtime, CHOICE * most_tokens, progress))
    return streams


def _drawn(streams: Sequence[Stream], dense: Dense, calibration: Calibration) -> Windows:
    """Draw the windows of a calibration, each source's from its stream."""
    drawn = [
        sample_windows(
            stream, samples=part.samples, seq_len=window_length(part, dense), seed=part.seed,
            vocabulary=dense.vocabulary, in_mixture=len(streams) > 1,
        )
        for stream, part in zip(streams, parts_of(calibration), strict=True)
    ]  # fmt: skip
    return mixed(drawn, str(calibration.source))


def _own_tokenizer(
    dense: Dense, calibration: Calibration, runtime: Runtime
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that begins a text; None beside token ids, where there may be none."""
    ids = isinstance(calibration.source, Tensor) or all(
        is_token_file(str(name)) for name, _ in mixture(calibration.source)
    )
    if ids and not tokenizer_files(dense.folder):
        return None
    return load_tokenizer(dense.folder, trust_remote_code=runtime.trust_remote_code)


@contextmanager
def _room_for_all(device: torch.device, *, added: bool) -> Iterator[None]:
    """Say in one line that the whole network does not fit in the device's memory.

    `added` tells whether its text is added to another.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        less = "set self_samples=0" if added else "calibrate on a text, not on self"
        elsewhere = "" if device.type == "cpu" else ", or device=cpu"
        raise CalibrationError(
            f"text cannot be sampled from the model: {device} has no room for all of it: "
            f"{less}{elsewhere}"
        ) from None


def check_calibrations(dense: Dense, calibrations: Sequence[Calibration], runtime: Runtime) -> None:
    """Check one calibration text for all calibrations that name it; it is tokenised once.

    Raises:
        CoecError: it cannot be read, or is too short for one of them.
    """
    by_size = {
        (calibration.samples, window_length(calibration, dense), calibration.held_out): calibration
        for calibration in calibrations
    }
    for samples, _, holdout in by_size:
        held_out(samples, holdout)
    if calibrations[0].own:
        window_maker(dense, calibrations[0], runtime, None)
        return
    if any(calibration.added for calibration in calibrations):
        _own_tokenizer(dense, calibrations[0], runtime)
    streams = _streams(dense, list(by_size.values()), runtime, None)
    for calibration in by_size.values():
        _drawn(streams, dense, calibration)
