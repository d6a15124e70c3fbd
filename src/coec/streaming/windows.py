"""Calibration windows of a text, and those that the dense model itself writes.

A text is checked before any work. What the model writes is made when it is needed, and so is its
choice whether windows begin with the tokenizer's start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from coec.calibration.tokens import Extent, Stream, load_tokenizer
from coec.calibration.windows import (
    CHOICE,
    Windows,
    by_source,
    mixed,
    sample_windows,
    text_stream,
    validation_count,
    window_length,
)
from coec.devices import at_hand
from coec.errors import CalibrationError, NumericalError
from coec.events import Progress
from coec.models.dense import Dense, Prefetcher
from coec.settings import Calibration, Runtime
from coec.streaming.dense_stream import DenseStream, first_windows
from coec.streaming.head import Head
from coec.streaming.self_text import sample_from_model, windows_that_fit

Maker = Callable[[torch.device, torch.dtype, Progress | None], Windows]
MEASURED_TOKENS, _MEASURED_LENGTH = 2048, 512
"""Tokens behind a start on which it is measured, and of each window, at most; and as many without.
"""


def window_maker(
    dense: Dense, calibration: Calibration, runtime: Runtime, progress: Progress | None
) -> Maker:
    """Check the calibration text now, and return a function that makes the windows."""
    seq_len = window_length(calibration, dense)
    validation_count(calibration.samples, calibration.validation)
    if not calibration.own:
        return _text_maker(dense, calibration, runtime, progress)
    tokenizer = load_tokenizer(dense.folder, trust_remote_code=runtime.trust_remote_code)

    def make(device: torch.device, dtype: torch.dtype, progress: Progress | None) -> Windows:
        # Only sampling needs the whole network in memory; everywhere else a block will do.
        try:
            network = dense.network(device, dtype, noted=True)
            return sample_from_model(
                network, tokenizer, samples=calibration.samples, seq_len=seq_len,
                seed=calibration.seed, at_once=windows_that_fit(dense, network, seq_len),
                progress=progress,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            elsewhere = "" if device.type == "cpu" else ", or device=cpu"
            raise CalibrationError(
                f"text cannot be sampled from the model: {device} has no room for all of it: "
                f"calibrate on a text, not on self{elsewhere}"
            ) from None

    return make


def _text_maker(
    dense: Dense, calibration: Calibration, runtime: Runtime, progress: Progress | None
) -> Maker:
    """Draw the windows of a text, and return a function that chooses where there are two draws."""
    streams = _streams(dense, [calibration], runtime, progress)
    start, drawn = len(streams[0].start), _drawn(streams, dense, calibration)

    def make(device: torch.device, dtype: torch.dtype, progress: Progress | None) -> Windows:
        if len(drawn) == 1:
            return drawn[0]
        plain, begun = drawn
        on, off = start_entropies(dense, begun.ids, start, at_hand(device), dtype, progress)
        if not (math.isfinite(on) and math.isfinite(off)):
            raise NumericalError(
                "whether the dense model predicts better behind the tokenizer's start cannot be "
                "measured: its predictions are not finite; set bos=on or bos=off"
            )
        return replace(begun if on < off else plain, bos_cross_entropy={"on": on, "off": off})

    return make


@torch.no_grad()
def start_entropies(
    dense: Dense,
    windows: Int[Tensor, "n length"],
    start: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> tuple[float, float]:
    """Return the dense model's cross-entropy on a few windows' text, behind its start and without.

    Both are means over the same tokens, in nats. One block is in memory at a time.

    Args:
        dense: the model.
        windows: token ids.
        start: how many of them, in every window, are the tokenizer's start.
        device, dtype: of the forward pass.
        progress: called with ("measuring bos", done, blocks).
    """
    length = min(_MEASURED_LENGTH, windows.shape[1] - start)
    # Windows of the same text twice: behind the start, and without it.
    behind = first_windows(windows[:, :length], MEASURED_TOKENS)
    without = windows[: len(behind), start : start + length]
    stream = DenseStream(dense, torch.cat([behind, without]), device=device, dtype=dtype)
    stream.begin()
    blocks = dense.layout.blocks
    with Prefetcher(dense, last=len(blocks) - 1) as ahead:
        for block in blocks:
            stream.advance(block, ahead.tensors(block), None)
            if progress:
                progress("measuring bos", block.index + 1, len(blocks))
    states = torch.cat(list(stream.states.values()))
    head = Head(dense, device=device, dtype=dtype)
    # As model and baseline, both over the text that follows the start.
    prediction = head.predicted(
        states[: len(behind), start:], states[len(behind) :, : length - start], behind[:, start:]
    )
    return prediction.cross_entropy, prediction.baseline_cross_entropy


def _streams(
    dense: Dense,
    calibrations: Sequence[Calibration],
    runtime: Runtime,
    progress: Progress | None,
) -> list[Stream]:
    """Read every source of one text or mixture once, as far as all the calibrations need."""
    streams = []
    for alike in zip(*map(by_source, calibrations), strict=True):
        # One reading serves all calibrations of a sweep: as long as the longest needs.
        most_tokens = max(portion.samples * window_length(portion, dense) for portion in alike)
        extent = Extent(CHOICE * most_tokens)
        streams.append(
            text_stream(
                dense, alike[0].source, alike[0].text_column, extent,
                trust_remote_code=runtime.trust_remote_code, progress=progress,
            )
        )  # fmt: skip
    return streams


def _drawn(streams: Sequence[Stream], dense: Dense, calibration: Calibration) -> list[Windows]:
    """Draw the windows of a calibration, each source's from its stream.

    Where the dense model is to choose, they are drawn without the start, and with it.
    """
    # Ways of drawing: without the start, with it, or both for the dense model to choose from
    seq_len, source = window_length(calibration, dense), calibration.source
    start = min(len(stream.start) for stream in streams)
    if calibration.bos == "on" and not start:
        raise CalibrationError(
            f"bos=on has no effect on '{source}': token ids are taken as they are, and to other "
            "text this tokenizer may add no start; leave bos out"
        )
    ways = [calibration.bos == "on"]
    if calibration.bos == "auto" and 0 < start < seq_len // 2:  # two tokens can be compared
        ways = [False, True]

    def draw(bos: bool) -> Windows:
        pairs = zip(streams, by_source(calibration), strict=True)
        drawn = [
            sample_windows(
                stream, samples=portion.samples, seq_len=seq_len, seed=portion.seed,
                bos=bos, in_mixture=len(streams) > 1,
            )
            for stream, portion in pairs
        ]  # fmt: skip
        return mixed(drawn, str(source))

    return [draw(bos) for bos in ways]


def check_calibrations(dense: Dense, calibrations: Sequence[Calibration], runtime: Runtime) -> None:
    """Check one calibration text for all calibrations that name it; it is tokenised once.

    Raises:
        CoecError: it cannot be read, or is too short for one of them.
    """
    by_size = {(c.samples, window_length(c, dense), c.validation, c.bos): c for c in calibrations}
    for samples, _, holdout, _ in by_size:
        validation_count(samples, holdout)
    if calibrations[0].own:
        window_maker(dense, calibrations[0], runtime, None)
        return
    streams = _streams(dense, list(by_size.values()), runtime, None)
    for calibration in by_size.values():
        _drawn(streams, dense, calibration)
