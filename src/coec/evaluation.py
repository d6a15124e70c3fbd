"""Token perplexity, and the divergence from a baseline (METHODS §7)."""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from coec.checkpoint.report import calibration_digest
from coec.config import asks, is_own, listing, own_parts, without_effect
from coec.config.evaluation import TextEvaluation
from coec.devices import choose_device, choose_forward_dtype, tokens_per_pass
from coec.errors import ModelError, NumericalError, OptionError, first_line
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.folder import find_model
from coec.progress import showing
from coec.streams.answers import Prompts, Writer, unkept
from coec.streams.head import Prediction, log_probabilities
from coec.streams.self_text import continued
from coec.text.tokens import (
    Extent,
    Stream,
    check_same_tokenizer,
    has_tokenizer,
    load_tokenizer,
    read_stream,
    source_of,
)
from coec.text.windows import Windows, all_windows, resolve_seq_len

_Model: TypeAlias = str | Path | Dense | PreTrainedModel
EVALUATION_SEQ_LEN = 4096
"""Tokens of an evaluation window, if the model has so many positions."""
_UNLIMITED = 2**31
"""Positions of a model whose configuration does not name their number."""
_MEASURED_WINDOWS, _MEASURED_LENGTH = 4, 512
"""Largest number of windows on which the need of a start is measured, and of their tokens."""
_PROMPTS, _PROMPT, _CONTINUED, _GRAM = 4, 32, 64, 3
"""Greedy continuations: number of windows, tokens before and after, and tokens of a gram."""
_NEEDED = 0.1
"""Nats per token by which text must be better predicted after the tokenizer's start for `auto` to
put it before every window. Models that need it lose whole nats without, others hundredths."""
_LOGITS_PER_BATCH = 2**22
"""Upper bound of batch · length · vocabulary, the logits in memory at once."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A causal model in memory, also quantised or with an adapter.

    Attributes:
        folder: its folder, whose tokenizer it has.
        network: as `AutoModelForCausalLM` builds it.
    """

    folder: Path
    network: PreTrainedModel

    @property
    def positions(self) -> int:
        """Largest number of tokens that it takes."""
        config = self.network.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or _UNLIMITED

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it predicts."""
        return int(self.network.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Perplexity:
    """The result of an evaluation; JSON-ready by `as_dict`.

    Attributes:
        perplexity: `exp(mean cross-entropy)` over predicted tokens.
        tokens: predicted tokens (length − 1 per window).
        nats_per_character: the mean cross-entropy times the tokens for each character of the text,
            which models of different vocabularies can be compared by; None if there is no text.
        bos: true if every window begins with the tokenizer's start.
        seconds: wall-clock time, of both models if there is a baseline.
        baseline_perplexity, ratio, kl, agreement: with a baseline: its perplexity, the perplexity
            over it, the mean of KL(baseline ‖ model) in nats per token, and the fraction of tokens
            for which both models find the same next token most probable.
        distinct, baseline_distinct: fraction of different 3-grams of tokens in greedy continuations
            of a few windows, of both models; a model that repeats itself has few.
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
    nats_per_character: float | None = None
    bos: bool = False
    baseline_perplexity: float | None = None
    ratio: float | None = None
    kl: float | None = None
    agreement: float | None = None
    distinct: float | None = None
    baseline_distinct: float | None = None
    same_text_as_calibration: bool | None = None

    def as_dict(self) -> JsonDict:
        """List every field by name."""
        return asdict(self)


@listing(TextEvaluation)
def perplexity(
    model: _Model,
    text: str | Path | Iterable[Any] = "wikitext2",
    *,
    baseline: str | Path | Dense | None = None,
    trust_remote_code: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Perplexity:
    """Measure the token perplexity on non-overlapping windows of one text, without the tail.

    The text is tokenised once. The perplexity is `exp` of the mean cross-entropy over the
    `seq_len − 1` predicted tokens of every window. This is not the word perplexity of
    lm-evaluation-harness.

    Args:
        model: a model folder or hub name; or a model of transformers in memory, which is measured
            on its device and in its dtype, with the tokenizer of its folder, or the baseline's.
        text: `wikitext2`, `c4`, `hub:OWNER/NAME[:CONFIG]`, a file as in `coec prune`, a list of
            strings, a data set of `datasets`, a tensor or array of token ids, or `self`: text
            sampled from the baseline (`samples` windows under `seed`).
        baseline: the dense model, for the ratio, the KL divergence and the agreement; `coec` builds
            it, also if `via` is transformers.
        trust_remote_code: let the model's tokenizer run its own Python code.
        progress: as in `prune`.
        settings: fields of `TextEvaluation`; C4's validation split takes the place of test, and
            `via="transformers"` leaves a model in the dtype in which it is stored.

    Raises:
        CoecError: with one line that says what to change.
    """
    rules, began = TextEvaluation(**settings), time.perf_counter()
    training = isinstance(model, PreTrainedModel) and model.training
    try:
        with showing(progress) as shown:
            result = _perplexity(model, text, baseline, rules, trust_remote_code, shown)
    finally:
        if isinstance(model, PreTrainedModel):
            model.train(training)
    return replace(result, seconds=time.perf_counter() - began)


def _perplexity(
    model: _Model,
    text: Any,
    baseline: str | Path | Dense | None,
    rules: TextEvaluation,
    trust_remote_code: bool,
    progress: Progress | None,
) -> Perplexity:
    """Return the measurement; its seconds are still 0."""
    device = model.device if isinstance(model, PreTrainedModel) else choose_device(rules.device)
    measured = opened(model, rules, device, trust_remote_code=trust_remote_code)
    dense = None if baseline is None else Dense.open(baseline)
    if dense is not None:
        _check_baseline(measured, dense, trust_remote_code)
    length = resolve_seq_len(rules.seq_len, measured.positions, EVALUATION_SEQ_LEN)
    sampled = is_own(text)
    # Text → windows, before networks are built; the text that the baseline writes comes later
    if sampled and dense is None:
        raise OptionError(f"text={text} is written by the baseline: give baseline=DENSE")
    _check_effect(text, rules)
    writer: Writer | None = None
    prompts: Prompts | None = None
    if sampled and dense is not None:
        tokenizer = load_tokenizer(dense.folder, trust_remote_code=trust_remote_code)
        longest = rules.answer_tokens or length
        prompts = Prompts.read(text, rules.text_column, tokenizer, longest, dense.positions)
        writer = Writer(dense, tokenizer, unkept, progress, fewer=True)
    if not sampled:
        # A model in memory may have no folder: the baseline's tokenizer is used instead.
        foreign = isinstance(measured, Loaded) and not has_tokenizer(measured.folder)
        reader = dense if foreign and dense is not None else measured
        stream = _read(reader, text, rules, length, trust_remote_code, progress)
        windows = _cut(stream, rules, length, bos=rules.bos == "on")
    # Networks → sampled windows, or windows with the start if it is needed → sums over all tokens
    network = (
        measured.network if isinstance(measured, Loaded)
        else load_network(measured, device, rules.dtype)
    )  # fmt: skip
    base = None if dense is None else load_network(dense, device, rules.dtype)
    if writer is not None:
        writer.network = base
        windows = writer.windows(
            prompts, samples=rules.samples, seq_len=length, seed=rules.seed, name="answers"
        )
    elif rules.bos == "auto" and 0 < len(stream.start) <= length - 2:  # two tokens are compared
        begun = _cut(stream, rules, length, bos=True)
        if _needs_start(base or network, begun.ids, len(stream.start)):
            windows = begun
    prediction = _predict(network, base, windows.ids, progress)
    calibrated = calibration_digest(measured.folder)
    result = _result(prediction, windows, network.num_parameters(), calibrated, base is not None)
    count = min(_CONTINUED, measured.positions - min(length, _PROMPT))
    if count < _GRAM:
        return result
    distinct, other = (
        None if model is None else _distinct(model, windows.ids, count) for model in (network, base)
    )
    return replace(result, distinct=distinct, baseline_distinct=other)


def _distinct(model: PreTrainedModel, windows: Int[Tensor, "n length"], count: int) -> float:
    """Return the mean fraction of different 3-grams in greedy continuations of a few windows."""
    grams = continued(model, windows[:_PROMPTS, :_PROMPT], count).unfold(1, _GRAM, 1)
    return sum(len(row.unique(dim=0)) / len(row) for row in grams) / len(grams)


def _check_effect(text: Any, rules: TextEvaluation) -> None:
    """Raise OptionError for a setting that the text makes idle."""
    if rules.answer_tokens is not None and not asks(text):
        raise without_effect("answer_tokens", "without text = self:PROMPTS.jsonl")
    if is_own(text) and rules.bos == "on":
        raise without_effect("bos=on", f"with text={text}")
    for name in ("samples", "seed"):
        if name in rules.model_fields_set and not own_parts(text):
            raise without_effect(name, "without text = self")
    if is_own(text) and rules.max_windows is not None:
        raise without_effect("max_windows", f"with text={text}")


def _check_baseline(model: Dense | Loaded, dense: Dense, trust_remote_code: bool) -> None:
    if dense.vocabulary != model.vocabulary:
        raise ModelError(
            f"model and baseline have different vocabularies ({model.vocabulary} and "
            f"{dense.vocabulary}), and predict other tokens: give the dense model that it was "
            "pruned from, or leave out baseline and compare nats_per_character"
        )
    advice = "the baseline must be the dense model it was pruned from"
    check_same_tokenizer(model.folder, dense.folder, advice, trust_remote_code=trust_remote_code)


def _result(
    prediction: Prediction,
    windows: Windows,
    parameters: int,
    calibrated: str | None,
    compared: bool,
) -> Perplexity:
    """Return the sums over all tokens as a result; the seconds are still 0."""
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
        nats_per_character=(
            prediction.cross_entropy * windows.available / windows.characters
            if windows.characters
            else None
        ),
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


def _read(
    model: Dense | Loaded,
    text: Any,
    rules: TextEvaluation,
    length: int,
    trust_remote_code: bool,
    progress: Progress | None,
) -> Stream:
    """Read the text with the model's tokenizer, as far as it is needed."""
    limit = None if rules.max_windows is None else rules.max_windows * length
    stream = read_stream(
        source_of(text, rules.text_column),
        partial(load_tokenizer, model.folder, trust_remote_code=trust_remote_code),
        split=rules.split, text_column=rules.text_column, extent=Extent(limit), progress=progress,
    )  # fmt: skip
    return stream.within(model.vocabulary)


def _cut(stream: Stream, rules: TextEvaluation, length: int, *, bos: bool) -> Windows:
    """Cut the text into windows, with the tokenizer's start or without."""
    if bos and not len(stream.start):
        raise OptionError(
            "bos=on has no effect here: the text is token ids, or this tokenizer puts nothing "
            "before a text; leave bos out"
        )
    windows = all_windows(stream, seq_len=length, bos=bos)
    return replace(windows, ids=windows.ids[: rules.max_windows])


@torch.no_grad()
def _needs_start(network: PreTrainedModel, ids: Int[Tensor, "n length"], start: int) -> bool:
    """Return whether a few windows are predicted better after the tokenizer's start, by _NEEDED.

    Both cross-entropies are means over the same tokens.

    Args:
        network: the model that decides.
        ids: windows that begin with the start.
        start: number of its tokens.
    """
    # log p of the same tokens, after the start and without it → the mean gain
    begun = ids[:_MEASURED_WINDOWS, :_MEASURED_LENGTH].to(network.device)
    text = begun[:, start:]
    with_start = log_probabilities(_logits(network, begun))[:, start:]
    without = log_probabilities(_logits(network, text))
    gain = (with_start - without).gather(-1, text[:, 1:, None]).mean()
    return float(gain) > _NEEDED


@torch.no_grad()
def _predict(
    model: PreTrainedModel,
    baseline: PreTrainedModel | None,
    windows: Int[Tensor, "n length"],
    progress: Progress | None,
) -> Prediction:
    length, vocabulary = windows.shape[1], model.config.get_text_config().vocab_size
    batch = max(1, _LOGITS_PER_BATCH // (length * vocabulary))
    tokens = tokens_per_pass(vocabulary)
    networks = [network for network in (model, baseline) if network is not None]
    prediction = Prediction()
    for first in range(0, len(windows), batch):
        # Logits of a batch → probabilities of some tokens at a time, in little memory
        ids = windows[first : first + batch].to(model.device)
        logits = [_logits(network, ids).flatten(0, 1).split(tokens) for network in networks]
        next_tokens = ids[:, 1:].flatten().split(tokens)
        for following, ours, *theirs in zip(next_tokens, *logits, strict=True):
            prediction.update(ours, following, *theirs)
        if progress:
            progress("evaluating", min(first + batch, len(windows)), len(windows))
    return prediction


def _logits(
    model: PreTrainedModel, ids: Int[Tensor, "n length"]
) -> Float[Tensor, "n length-1 vocabulary"]:
    outputs = model(input_ids=ids, use_cache=False)
    if not hasattr(outputs, "logits"):
        raise ModelError(
            f"a {type(model).__name__} predicts no tokens: give the whole causal language model"
        )
    logits: Tensor = outputs.logits[:, :-1]
    return logits


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


def opened(
    model: str | Path | Dense | PreTrainedModel,
    rules: TextEvaluation,
    device: torch.device,
    *,
    trust_remote_code: bool,
) -> Dense | Loaded:
    """Open the model that is measured, as `via` says; a model in memory is not changed.

    Raises:
        ModelError: it is missing, or transformers does not load it.
    """
    if isinstance(model, PreTrainedModel):
        return Loaded(Path(model.name_or_path or type(model).__name__), model.eval())
    if rules.via == "coec":
        return Dense.open(model)
    folder = model.folder if isinstance(model, Dense) else find_model(model)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": "auto"}
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # models and quantisers may raise anything
        reason = first_line(error)
        if not trust_remote_code and "trust_remote_code" in str(error):
            reason = "Python code of its own builds it: trust_remote_code=True runs that"
        raise ModelError(f"transformers does not load '{folder}': {reason}") from error
    # Quantised weights stay in their dtypes, and on the device that their loader chose.
    if getattr(network, "hf_quantizer", None) is None:
        network = network.to(device, choose_forward_dtype(rules.dtype, network.dtype, device))
    return Loaded(folder, network.eval())


def load_network(model: Dense, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """Build the model for forward passes on a device."""
    return model.network(device, choose_forward_dtype(dtype, model.dtype, device))
