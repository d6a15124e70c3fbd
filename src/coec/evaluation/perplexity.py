"""Token perplexity, and the divergence from a baseline (METHODS §7)."""

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coec.calibration.ids import token_ids
from coec.calibration.sources import Split
from coec.calibration.tokenizer import check_same_tokenizer, load_tokenizer
from coec.calibration.tokens import Stream, Windows, all_windows, read_stream
from coec.calibration.windows import resolve_seq_len
from coec.devices import choose_device
from coec.errors import ModelError, NumericalError, OptionError
from coec.evaluation.network import check_dtype, load_network
from coec.events import Progress
from coec.models.dense import Dense
from coec.pipeline.report import calibration_digest
from coec.settings import check_seed, check_whole
from coec.streaming.prediction import Prediction
from coec.streaming.self_text import sample_from_model, windows_that_fit

DEFAULT_SEQ_LEN = 4096
LOGITS_PER_BATCH = 2**22
"""Logits held at once: windows are batched so that batch · length · vocabulary stays below."""


@dataclass(frozen=True)
class Perplexity:
    """The result of an evaluation; JSON-ready by `as_dict`.

    Attributes:
        perplexity: `exp(mean cross-entropy)` over predicted tokens.
        tokens: predicted tokens (length − 1 per window).
        windows, seq_len: how the text was cut.
        text, text_sha256: which text, and its digest.
        special_tokens: how many the tokenizer added.
        parameters: of the model.
        seconds: wall-clock, both models where there is a baseline.
        baseline_perplexity, ratio, kl, agreement: with a baseline: its perplexity, perplexity over
            it, the mean of KL(baseline ‖ model) in nats per token, and the share of tokens for
            which both find the same next token the most probable.
        same_text_as_calibration: whether the model was pruned with this very text, by digest; None
            where the folder holds no record of its pruning.
    """

    perplexity: float
    tokens: int
    windows: int
    seq_len: int
    text: str
    text_sha256: str
    special_tokens: int
    parameters: int
    seconds: float
    baseline_perplexity: float | None = None
    ratio: float | None = None
    kl: float | None = None
    agreement: float | None = None
    same_text_as_calibration: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


def perplexity(
    model: str | Path | Dense,
    text: str | Path | Tensor | np.ndarray | Windows = "wikitext2",
    *,
    seq_len: SupportsIndex | None = None,
    max_windows: SupportsIndex | None = None,
    baseline: str | Path | Dense | None = None,
    split: Split = "test",
    text_column: str = "text",
    samples: SupportsIndex = 64,
    seed: SupportsIndex = 1,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Perplexity:
    """Token perplexity on non-overlapping windows of one text, the tail dropped.

    The text is tokenised once; `exp` of the mean cross-entropy over the `seq_len − 1` predicted
    tokens of every window. This is not the word perplexity of lm-evaluation-harness.

    Args:
        model: a model folder or hub name, or a model opened before.
        text: `wikitext2`, `c4`, `hub:OWNER/NAME[:CONFIG]`, a file as in `coec prune`, a tensor or
            array of token ids, or `self`: text sampled from the baseline (`samples` windows under
            `seed`); or windows already cut.
        seq_len: None for 4096, or the model's maximum if that is less.
        max_windows: evaluate the first so many windows; None for all.
        baseline: the dense model, for the ratio, the KL divergence and the agreement.
        split: of a data set; C4's validation split stands in for test.
        text_column: of a jsonl or parquet file, or of a data set named by `hub:`.
        dtype: of the forward pass; None as in `Calibration.forward_dtype`.
        trust_remote_code: lets the model's tokenizer run its own Python code.

    Raises:
        CoecError: with one line that says what to change.
    """
    began = time.perf_counter()
    samples, seed = check_whole("samples", samples), check_seed(seed)
    seq_len = None if seq_len is None else check_whole("seq_len", seq_len, least=2)
    chosen = choose_device(device)
    check_dtype(dtype)
    model = Dense.open(model)
    base_model = None if baseline is None else Dense.open(baseline)
    seen = calibration_digest(model.folder)
    if base_model is not None and base_model.vocabulary != model.vocabulary:
        raise ModelError(
            f"model and baseline have different vocabularies ({model.vocabulary} and "
            f"{base_model.vocabulary}): the baseline must be the dense model it was pruned from"
        )
    if base_model is not None:
        check_same_tokenizer(model.folder, base_model.folder, trust_remote_code=trust_remote_code)
    if isinstance(text, str) and text == "self":
        if base_model is None:
            raise OptionError("text=self samples from the baseline: give baseline=DENSE")
        tokenizer = load_tokenizer(base_model.folder, trust_remote_code=trust_remote_code)
        windows = None
    elif isinstance(text, Windows):
        windows = text
    else:
        windows = evaluation_windows(
            model, text, seq_len=seq_len, max_windows=max_windows, split=split,
            text_column=text_column, trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
    network = load_network(model, chosen, dtype)
    base = None if base_model is None else load_network(base_model, chosen, dtype)
    if windows is None:
        assert base is not None
        assert base_model is not None
        length = resolve_seq_len(seq_len, model.positions, DEFAULT_SEQ_LEN)
        windows = sample_from_model(
            base, tokenizer, samples=samples, seq_len=length, seed=seed,
            at_once=windows_that_fit(base_model, base, length), progress=progress,
        )  # fmt: skip
    sums = _measure(network, base, windows.ids, progress)
    length = windows.ids.shape[1]
    ppl = _exp(sums.cross_entropy, "model")
    base_ppl = None if base is None else _exp(sums.baseline_cross_entropy, "baseline")
    return Perplexity(
        perplexity=ppl,
        tokens=windows.ids.shape[0] * (length - 1),
        windows=windows.ids.shape[0],
        seq_len=length,
        text=windows.source,
        text_sha256=windows.text_sha256,
        special_tokens=windows.special_tokens,
        parameters=network.num_parameters(),
        seconds=time.perf_counter() - began,
        baseline_perplexity=base_ppl,
        ratio=None if base_ppl is None else ppl / base_ppl,
        kl=None if base is None else sums.kl,
        agreement=None if base is None else sums.agreement,
        # Two tensors of ids have no digest, which makes them no same text.
        same_text_as_calibration=None if seen is None else seen == windows.text_sha256 != "",
    )


def evaluation_windows(
    model: str | Path | Dense,
    text: str | Path | Tensor | np.ndarray,
    *,
    seq_len: SupportsIndex | None = None,
    max_windows: SupportsIndex | None = None,
    split: Split = "test",
    text_column: str = "text",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Windows:
    """The windows that `perplexity` of these arguments is measured on.

    Raises:
        CoecError: with one line that says what to change.
    """
    seq_len = None if seq_len is None else check_whole("seq_len", seq_len, least=2)
    max_windows = None if max_windows is None else check_whole("max_windows", max_windows)
    model = Dense.open(model)
    folder = model.folder
    length = resolve_seq_len(seq_len, model.positions, DEFAULT_SEQ_LEN)
    if isinstance(text, Tensor | np.ndarray):
        stream = Stream(token_ids(text), "tensor", "")
    else:
        stream = read_stream(
            str(text), lambda: load_tokenizer(folder, trust_remote_code=trust_remote_code),
            split=split, text_column=text_column,
            needed=None if max_windows is None else max_windows * length, progress=progress,
        )  # fmt: skip
    windows = all_windows(stream, seq_len=length, vocabulary=model.vocabulary)
    return replace(windows, ids=windows.ids[:max_windows])


@torch.no_grad()
def _measure(
    model: PreTrainedModel,
    baseline: PreTrainedModel | None,
    windows: Int[Tensor, "n length"],
    progress: Progress | None,
) -> Prediction:
    """Sums over the predicted tokens of all windows."""
    length = windows.shape[1]
    batch = max(1, LOGITS_PER_BATCH // (length * model.config.vocab_size))
    sums = Prediction()
    for first in range(0, len(windows), batch):
        ids = windows[first : first + batch].to(model.device)
        log_q = None if baseline is None else _log_probabilities(baseline, ids)
        sums.update(_log_probabilities(model, ids), ids[:, 1:], log_q)
        if progress:
            progress("evaluating", min(first + batch, len(windows)), len(windows))
    return sums


def _log_probabilities(
    model: PreTrainedModel, ids: Int[Tensor, "n length"]
) -> Float[Tensor, "n length-1 vocabulary"]:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return F.log_softmax(logits.to(wide), dim=-1)


def _exp(ce: float, whose: str) -> float:
    """Perplexity of a cross-entropy; raises NumericalError where it is no finite number."""
    if not ce < float("inf"):
        raise NumericalError(
            f"the {whose}'s cross-entropy is not finite: its logits overflow; "
            "try dtype=float32, and check the checkpoint"
        )
    try:
        return math.exp(ce)
    except OverflowError:
        raise NumericalError(
            f"the {whose}'s perplexity is not finite: e^{ce:.4g}; check the checkpoint"
        ) from None
