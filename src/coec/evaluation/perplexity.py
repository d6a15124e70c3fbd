"""Token perplexity, and the divergence from a baseline (METHODS §7)."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coec.calibration.tokens import (
    Extent,
    Stream,
    check_same_tokenizer,
    has_tokenizer,
    load_tokenizer,
    read_stream,
    source_of,
)
from coec.calibration.windows import Windows, all_windows, resolve_seq_len
from coec.devices import choose_device
from coec.errors import ModelError, NumericalError, OptionError
from coec.evaluation.pair import Loaded, load_network
from coec.evaluation.settings import TextEvaluation
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.checkpoint.report import calibration_digest
from coec.settings.typed import TextSettings
from coec.streams.head import Prediction
from coec.streams.self_text import sample_from_model, windows_that_fit

_Model: TypeAlias = str | Path | Dense | PreTrainedModel
EVALUATION_SEQ_LEN = 4096
"""Tokens of an evaluation window, if the model has so many positions."""
_MEASURED_WINDOWS, _MEASURED_LENGTH = 4, 512
"""Windows on which the need of a start is measured, and their tokens, at most."""
_NEEDED = 0.1
"""Nats per token by which text must be better predicted behind the tokenizer's start for `auto` to
put it before every window. Models that need it lose whole nats without, others hundredths."""
_LOGITS_PER_BATCH = 2**22
"""Upper bound of batch · length · vocabulary, the logits in memory at once."""


@dataclass(frozen=True)
class Perplexity:
    """The result of an evaluation; JSON-ready by `as_dict`.

    Attributes:
        perplexity: `exp(mean cross-entropy)` over predicted tokens.
        tokens: predicted tokens (length − 1 per window).
        bos: true if every window begins with the tokenizer's start.
        seconds: wall-clock time, of both models if there is a baseline.
        baseline_perplexity, ratio, kl, agreement: with a baseline: its perplexity, the perplexity
            over it, the mean of KL(baseline ‖ model) in nats per token, and the fraction of tokens
            for which both models find the same next token most probable.
        same_text_as_calibration: true if the model was pruned with this text, by digest; None if
            the folder holds no record of its pruning.
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
    bos: bool = False
    baseline_perplexity: float | None = None
    ratio: float | None = None
    kl: float | None = None
    agreement: float | None = None
    same_text_as_calibration: bool | None = None

    def as_dict(self) -> JsonDict:
        """List every field by name."""
        return asdict(self)


def perplexity(
    model: _Model,
    text: str | Path | Iterable[Any] | Windows = "wikitext2",
    *,
    baseline: str | Path | Dense | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[TextSettings],
) -> Perplexity:
    """Measure the token perplexity on non-overlapping windows of one text, without the tail.

    The text is tokenised once. The perplexity is `exp` of the mean cross-entropy over the
    `seq_len − 1` predicted tokens of every window. This is not the word perplexity of
    lm-evaluation-harness.

    Args:
        model: a model folder or hub name; or a model of transformers in memory, which is measured
            where and as it is, with the tokenizer of the folder that it is from, or the baseline's.
        text: `wikitext2`, `c4`, `hub:OWNER/NAME[:CONFIG]`, a file as in `coec prune`, a list of
            strings, a data set of `datasets`, a tensor or array of token ids, or `self`: text
            sampled from the baseline (`samples` windows under `seed`); or windows already cut.
        baseline: the dense model, for the ratio, the KL divergence and the agreement; `coec` reads
            it, whatever `via` says of the model.
        trust_remote_code: let the model's tokenizer run its own Python code.
        settings: fields of `TextEvaluation`; C4's validation split takes the place of test, and
            `via="transformers"` leaves a model in the dtype in which it is stored.

    Raises:
        CoecError: with one line that says what to change.
    """
    began = time.perf_counter()
    rules = TextEvaluation(**settings)
    chosen = model.device if isinstance(model, PreTrainedModel) else choose_device(rules.device)
    opened = _opened(model, rules, chosen, trust_remote_code)
    dense = None if baseline is None else Dense.open(baseline)
    calibrated = calibration_digest(opened.folder)
    if dense is not None:
        _check_baseline(opened, dense, trust_remote_code)
    from_model = isinstance(text, str) and text == "self"
    if from_model and dense is None:
        raise OptionError("text=self samples from the baseline: give baseline=DENSE")
    # Text → windows, before networks are built; what the baseline writes itself comes after
    windows = cut = None
    if isinstance(text, Windows):
        windows = text
    elif not from_model:
        # A model in memory may have no folder: the baseline's tokenizer stands in for its own.
        foreign = isinstance(opened, Loaded) and not has_tokenizer(opened.folder)
        reader = dense if foreign and dense is not None else opened
        cut = _Cut.of(reader, text, rules, trust_remote_code, progress)
        windows = cut(bos=rules.bos == "on")
    # Networks → start or none → sampled windows → sums over all tokens
    network = (
        opened.network if isinstance(opened, Loaded) else load_network(opened, chosen, rules.dtype)
    )
    base = None if dense is None else load_network(dense, chosen, rules.dtype)
    if cut is not None and rules.bos == "auto" and _needs_start(base or network, cut):
        windows = cut(bos=True)
    if windows is None:
        assert base is not None
        assert dense is not None
        rules = replace(rules, seq_len=_window_length(rules, opened))
        windows = sampled_windows(dense, base, rules, trust_remote_code, progress)
    prediction = _predict(network, base, windows.ids, progress)
    result = _result(prediction, windows, network.num_parameters(), calibrated, base is not None)
    return replace(result, seconds=time.perf_counter() - began)


def _opened(
    model: _Model, rules: TextEvaluation, device: torch.device, trust: bool
) -> Dense | Loaded:
    """Open the model that is measured, as `via` says; one that is loaded stays as it is."""
    if isinstance(model, PreTrainedModel):
        return Loaded(Path(model.name_or_path or type(model).__name__), model.eval())
    if rules.via == "coec":
        return Dense.open(model)
    folder = model.folder if isinstance(model, Dense) else model
    return Loaded.open(folder, device, rules.dtype, trust_remote_code=trust)


def _check_baseline(model: Dense | Loaded, dense: Dense, trust_remote_code: bool) -> None:
    if dense.vocabulary != model.vocabulary:
        raise ModelError(
            f"model and baseline have different vocabularies ({model.vocabulary} and "
            f"{dense.vocabulary}): the baseline must be the dense model it was pruned from"
        )
    check_same_tokenizer(model.folder, dense.folder, trust_remote_code=trust_remote_code)


def _result(
    prediction: Prediction,
    windows: Windows,
    parameters: int,
    calibrated: str | None,
    compared: bool,
) -> Perplexity:
    """Summarize the sums over all tokens; the seconds are still 0."""
    count, length = windows.ids.shape
    perplexity = _exp(prediction.cross_entropy, "model")
    baseline = _exp(prediction.baseline_cross_entropy, "baseline") if compared else None
    return Perplexity(
        perplexity=perplexity,
        tokens=count * (length - 1),
        windows=count,
        seq_len=length,
        text=windows.source,
        text_sha256=windows.text_sha256,
        special_tokens=windows.special_tokens,
        parameters=parameters,
        seconds=0.0,
        bos=windows.bos,
        baseline_perplexity=baseline,
        ratio=None if baseline is None else perplexity / baseline,
        kl=prediction.kl if compared else None,
        agreement=prediction.agreement if compared else None,
        # Tensors of ids have no digest, and two empty ones are not the same text.
        same_text_as_calibration=(
            None
            if calibrated is None
            else windows.text_sha256 != "" and windows.text_sha256 in calibrated.split(",")
        ),
    )


@dataclass(frozen=True)
class _Cut:
    """The text of an evaluation, to be cut into windows with the tokenizer's start or without."""

    stream: Stream
    length: int
    limit: int | None

    @classmethod
    def of(
        cls,
        model: Dense | Loaded,
        text: str | Path | Iterable[Any],
        rules: TextEvaluation,
        trust_remote_code: bool,
        progress: Progress | None,
    ) -> "_Cut":
        """Read the text with the model's tokenizer."""
        length, limit = _window_length(rules, model), rules.max_windows
        stream = read_stream(
            source_of(text, rules.text_column),
            partial(load_tokenizer, model.folder, trust_remote_code=trust_remote_code),
            split=rules.split, text_column=rules.text_column,
            extent=Extent(None if limit is None else limit * length), progress=progress,
        )  # fmt: skip
        return cls(stream.within(model.vocabulary), length, limit)

    def __call__(self, *, bos: bool) -> Windows:
        if bos and not len(self.stream.start):
            raise OptionError(
                "bos=on has no effect here: token ids are taken as they are, and this tokenizer "
                "may put nothing before a text; leave bos out"
            )
        windows = all_windows(self.stream, seq_len=self.length, bos=bos)
        return replace(windows, ids=windows.ids[: self.limit])


def _window_length(rules: TextEvaluation, model: Dense | Loaded) -> int:
    return resolve_seq_len(rules.seq_len, model.positions, EVALUATION_SEQ_LEN)


def evaluation_windows(
    model: str | Path | Dense,
    text: str | Path | Iterable[Any],
    *,
    decides: Callable[[], PreTrainedModel] | None = None,
    trust_remote_code: bool = False,
    **settings: Unpack[TextSettings],
) -> Windows:
    """Cut the windows on which `perplexity` with these arguments is measured.

    They are those of `bos="auto"` where a model decides, and of `bos="off"` else.

    Args:
        decides: returns the model; called only where the tokenizer puts something before a text.
    """
    cut = _Cut.of(Dense.open(model), text, TextEvaluation(**settings), trust_remote_code, None)
    if decides is None or not len(cut.stream.start):
        return cut(bos=False)
    return cut(bos=_needs_start(decides(), cut))


@torch.no_grad()
def _needs_start(network: PreTrainedModel, cut: _Cut) -> bool:
    """Return whether a few windows are predicted better behind the tokenizer's start, by _NEEDED.

    Both cross-entropies are means over the same tokens.
    """
    start = len(cut.stream.start)
    length = min(cut.length, _MEASURED_LENGTH)
    if not start or length < start + 2:
        return False
    # log p of the same tokens, behind the start and without it → the mean gain
    behind = cut(bos=True).ids[:_MEASURED_WINDOWS, :length].to(network.device)
    text = behind[:, start:]
    with_start = _log_probabilities(network, behind)[:, start:]
    without = _log_probabilities(network, text)
    gain = (with_start - without).gather(-1, text[:, 1:, None]).mean()
    return float(gain) > _NEEDED


def sampled_windows(
    dense: Dense,
    network: PreTrainedModel,
    rules: TextEvaluation,
    trust_remote_code: bool,
    progress: Progress | None = None,
) -> Windows:
    """Sample the windows of `text = "self"` from the dense model."""
    length = _window_length(rules, dense)
    return sample_from_model(
        network, load_tokenizer(dense.folder, trust_remote_code=trust_remote_code),
        samples=rules.samples, seq_len=length, seed=rules.seed,
        at_once=windows_that_fit(dense, network, length), progress=progress,
    )  # fmt: skip


@torch.no_grad()
def _predict(
    model: PreTrainedModel,
    baseline: PreTrainedModel | None,
    windows: Int[Tensor, "n length"],
    progress: Progress | None,
) -> Prediction:
    length = windows.shape[1]
    batch = max(1, _LOGITS_PER_BATCH // (length * model.config.vocab_size))
    prediction = Prediction()
    for first in range(0, len(windows), batch):
        ids = windows[first : first + batch].to(model.device)
        log_q = None if baseline is None else _log_probabilities(baseline, ids)
        prediction.update(_log_probabilities(model, ids), ids[:, 1:], log_q)
        if progress:
            progress("evaluating", min(first + batch, len(windows)), len(windows))
    return prediction


def _log_probabilities(
    model: PreTrainedModel, ids: Int[Tensor, "n length"]
) -> Float[Tensor, "n length-1 vocabulary"]:
    outputs = model(input_ids=ids, use_cache=False)
    if not hasattr(outputs, "logits"):
        raise ModelError(
            f"a {type(model).__name__} predicts no tokens: give the whole causal language model"
        )
    logits = outputs.logits[:, :-1]
    # Logarithms of sums over the vocabulary need more digits than narrow logits have.
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return F.log_softmax(logits.to(wide), dim=-1)


def _exp(cross_entropy: float, model: str) -> float:
    """Perplexity of a cross-entropy; raises NumericalError if it is not finite."""
    if not cross_entropy < float("inf"):
        raise NumericalError(
            f"the {model}'s cross-entropy is not finite: its logits overflow; "
            "try dtype=float32, and check the checkpoint"
        )
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        raise NumericalError(
            f"the {model}'s perplexity is not finite: e^{cross_entropy:.4g}; check the checkpoint"
        ) from None
