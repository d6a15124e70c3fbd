"""Token windows for calibration and evaluation, from text (`sources`) or token files."""

import filecmp
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from coec.calibration.ids import token_ids
from coec.calibration.sources import Split, is_file, one_line, read_parts
from coec.errors import CalibrationError, ModelError
from coec.events import Progress
from coec.models.companion_files import TOKENIZER_CONFIG, TOKENIZER_FILES, tokenizer_classes
from coec.models.description import CONFIG, read_config
from coec.models.files import check_fetched
from coec.models.shape import BLOCK_WIDTHS

TOKEN_SUFFIXES = (".npy", ".safetensors")
WHOLE = 12_000_000
"""Texts of up to so many characters are tokenised whole: the train split of WikiText-2 is one."""
PIECE = 1_000_000
"""About how many characters of a longer text are tokenised at once: 0.2 GB of memory."""
PROBE = "The cat sat on 3 mats.\n\nIt isn't far: naïve «数» x == y  # end"
"""Tokenizers that read this alike, from one vocabulary, are taken for one."""
ANCHOR = "\n"
"""What stands before a later piece while it is tokenised."""
CUTS = ("\n\n", "\n", " ")
CHOICE = 9
"""A long text is read until it has so many times the tokens that the sampled windows take.

As with `sources.HUB_CHARACTERS`, which has nine times those of the default recipe.
"""


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, and where they come from.

    Attributes:
        ids: token ids, int64.
        source: what the user named.
        available: how many tokens the source has.
        text_sha256: of the source text, of its first `WHOLE` characters where it is longer (of the
            token ids where there is no text).
        special_tokens: how many the tokenizer added to the text.
        characters: how many of the source text were tokenised, which of a large data set or file
            is its beginning; 0 where there is no text.
        in_pieces: whether the source was longer than `WHOLE` characters, and so tokenised piece by
            piece, and no further than the windows need.
        sampled: how many of the windows, the last ones, were sampled from the model besides.
    """

    ids: Int[Tensor, "n length"]
    source: str
    available: int
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0
    in_pieces: bool = False
    sampled: int = 0

    @property
    def sha256(self) -> str:
        """Digest of the windows themselves."""
        return digest(self.ids)

    @classmethod
    def of_record(cls, ids: Int[Tensor, "n length"], record: dict[str, Any]) -> "Windows":
        """The windows that gave this record."""
        return cls(
            ids,
            source=record["source"],
            available=record["tokens_available"],
            text_sha256=record["text_sha256"],
            special_tokens=record["special_tokens"],
            characters=record["characters"],
            in_pieces=record["in_pieces"],
            sampled=record["sampled"],
        )

    def and_sampled(self, ids: Int[Tensor, "m length"]) -> "Windows":
        """The same, followed by windows that were sampled from the model."""
        return replace(self, ids=torch.cat([self.ids, ids]), sampled=self.sampled + len(ids))

    def record(self) -> dict[str, Any]:
        """What the report keeps."""
        return {
            "source": self.source,
            "windows": self.ids.shape[0],
            "seq_len": self.ids.shape[1],
            "tokens_available": self.available,
            "special_tokens": self.special_tokens,
            "characters": self.characters,
            "in_pieces": self.in_pieces,
            "sampled": self.sampled,
            "text_sha256": self.text_sha256,
            "windows_sha256": self.sha256,
        }


@dataclass(frozen=True, eq=False)
class Stream:
    """A long run of token ids, or rows already cut."""

    ids: Int[Tensor, " n"] | Int[Tensor, "rows length"]
    source: str
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0
    in_pieces: bool = False


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Args:
        folder: of the model.
        trust_remote_code: lets a tokenizer that brings its own Python code run it. Otherwise it is
            never run, and nobody is asked.

    Raises:
        ModelError: the folder has none, it cannot be read, or it needs its own code.
    """
    found = any(is_file(folder / name) for name in TOKENIZER_FILES)
    if not found and not tokenizer_classes(folder):  # only own code reads files of other names
        raise ModelError(
            f"'{folder}' has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the tokenizer "
            "files there, or give token ids (.npy, .safetensors) instead of text"
        )
    for name in (TOKENIZER_CONFIG, *TOKENIZER_FILES):
        check_fetched(folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, **_known_config(folder)
        )
    except Exception as error:  # tokenizers raise what they like
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ModelError(
                f"the tokenizer in '{folder}' runs Python code of its own, with all that it "
                "imports and with code of other repositories that its files name: read it, and "
                "pass trust_remote_code=True if you trust it"
            ) from error
        raise ModelError(
            f"the tokenizer in '{folder}' cannot be loaded: {one_line(error)}"
        ) from error
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ModelError(
            f"model_max_length in '{folder / TOKENIZER_CONFIG}' must be a number, got "
            f"{longest!r:.80}: mend it"
        )
    return tokenizer


def _known_config(folder: Path) -> dict[str, Any]:
    """The configuration of a model whose blocks have widths of their own.

    To read that of its folder transformers would ask for the code beside the weights.
    """
    if not is_file(folder / CONFIG) or BLOCK_WIDTHS not in (config := read_config(folder)):
        return {}
    return {"config": AutoConfig.for_model(**{k: v for k, v in config.items() if k != "auto_map"})}


def check_same_tokenizer(folder: Path, baseline: Path, *, trust_remote_code: bool = False) -> None:
    """Raises ModelError where two models read one text as different tokens.

    Two vocabularies of one size are not one vocabulary: the divergence of such models is a number
    without meaning. Nothing is known of a folder without a tokenizer, which only takes token ids.
    """
    files = [[one / name for name in TOKENIZER_FILES] for one in (folder, baseline)]
    mine, theirs = ([path for path in paths if is_file(path)] for paths in files)
    if not mine or not theirs:
        return
    if [p.name for p in mine] == [p.name for p in theirs] and all(
        filecmp.cmp(*pair, shallow=False) for pair in zip(mine, theirs, strict=True)
    ):
        return
    encode, other = (
        load_tokenizer(one, trust_remote_code=trust_remote_code) for one in (folder, baseline)
    )
    if (
        encode.get_vocab() != other.get_vocab()
        or encoded(encode, PROBE).tolist() != encoded(other, PROBE).tolist()
    ):
        raise ModelError(
            f"'{folder}' and its baseline '{baseline}' have different tokenizers: the baseline "
            "must be the dense model it was pruned from"
        )


def is_token_file(source: str) -> bool:
    """Whether the source holds token ids, so that no tokenizer is needed."""
    return source.endswith(TOKEN_SUFFIXES)


def read_stream(
    source: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    split: Split,
    text_column: str = "text",
    needed: int | None = None,
    progress: Progress | None = None,
) -> Stream:
    """Tokens of a source: a token file, or whatever text `read_parts` knows.

    A text of up to `WHOLE` characters is tokenised in one piece, special tokens added once. Of a
    longer one the beginning is, in pieces of about `PIECE` characters, until there are `needed`
    tokens; memory does not grow with the text.

    Args:
        source: a name or a path.
        tokenizer: called only when there is text.
        split: of a named data set.
        text_column: of jsonl and parquet files, and of data sets named by `hub:`.
        needed: tokens after which a long text is read no further; None reads all of it.
        progress: called with ("tokenising", done, total) for texts that take time.

    Raises:
        CalibrationError: the source is missing, empty or of the wrong form.
    """
    if is_token_file(source):
        ids = _read_token_file(Path(source))
        return Stream(ids, source, digest(ids))
    parts = read_parts(source, split=split, text_column=text_column)
    beginning = _beginning(parts)
    encode = tokenizer()
    special = encode.num_special_tokens_to_add()
    sha256 = hashlib.sha256(beginning[:WHOLE].encode()).hexdigest()
    advance = progress if progress and len(beginning) > PIECE else _unheard
    if len(beginning) <= WHOLE:
        advance("tokenising", 0, len(beginning))
        ids = encoded(encode, beginning)
        advance("tokenising", len(beginning), len(beginning))
        return Stream(ids, source, sha256, special, len(beginning))
    start, end = _ends(encode)
    pieces, ending = [start], [end]
    characters, tokens = 0, len(start)
    for piece in _pieces(itertools.chain([beginning], parts)):
        first = characters == 0
        pieces.append(encoded(encode, piece, special=False) if first else _later(encode, piece))
        characters, tokens = characters + len(piece), tokens + len(pieces[-1])
        advance("tokenising", min(tokens, needed or tokens), needed or tokens)
        if needed is not None and tokens >= needed:
            special, ending = len(start), []  # the text goes on
            break
    pieces += ending
    return Stream(torch.cat(pieces), source, sha256, special, characters, in_pieces=True)


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """The special tokens before a text, and those after it."""
    whole, plain = (encoded(tokenizer, PROBE, special=special) for special in (True, False))
    for start in range(len(whole) - len(plain) + 1):
        if torch.equal(whole[start : start + len(plain)], plain):
            return whole[:start], whole[start + len(plain) :]
    return whole[:0], whole[:0]


def _later(tokenizer: PreTrainedTokenizerBase, piece: str) -> Tensor:
    """The tokens of a piece in the middle of a text.

    Some tokenizers put a space before whatever they are given: it is put before a line end here,
    whose tokens are taken off again.
    """
    mark = encoded(tokenizer, ANCHOR, special=False)
    ids = encoded(tokenizer, ANCHOR + piece, special=False)
    if torch.equal(ids[: len(mark)], mark):
        return ids[len(mark) :]
    return encoded(tokenizer, piece, special=False)


def _beginning(parts: Iterator[str]) -> str:
    """The text, or the part of it that reaches beyond `WHOLE` characters."""
    taken: list[str] = []
    length = 0
    for part in parts:
        taken.append(part)
        length += len(part)
        if length > WHOLE:
            break
    return "".join(taken)


def _pieces(parts: Iterable[str]) -> Iterator[str]:
    """The same text cut anew, at the last blank line, line end or space before `PIECE`."""
    rest = ""
    for part in parts:
        rest += part
        first = 0
        while len(rest) - first > PIECE:
            ends = (rest.rfind(mark, first, first + PIECE) + len(mark) for mark in CUTS)
            end = next((end for end in ends if end > first + PIECE // 2), first + PIECE)
            yield rest[first:end]
            first = end
        rest = rest[first:]
    if rest:
        yield rest


def encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True
) -> Int[Tensor, " n"]:
    """The tokens of a text, special ones added unless told otherwise.

    Raises:
        ModelError: the tokenizer fails.
    """
    try:
        # verbose=False: the warning about texts longer than the model is meant for other uses.
        ids = tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)
    except Exception as error:  # what a damaged tokenizer_config.json leads to, shows only here
        raise ModelError(
            f"the tokenizer of '{tokenizer.name_or_path}' fails on a text ({one_line(error)}): "
            "mend its files"
        ) from error


def _unheard(phase: str, done: int, total: int) -> None:
    """Progress that nobody listens to."""


def sample_windows(
    stream: Stream, *, samples: int, seq_len: int, seed: int, vocabulary: int
) -> Windows:
    """`samples` distinct windows of `seq_len` tokens, drawn at random without overlap.

    Raises:
        CalibrationError: too few tokens, or ids outside the vocabulary.
    """
    rows = _cut(stream, seq_len, vocabulary)
    if len(rows) < samples:
        have = stream.ids.numel()
        lower = f"at most samples={len(rows)}" if len(rows) else "shorter windows"
        if not len(rows) and have > 1:
            lower = f"windows of at most seq_len={have}"
        raise CalibrationError(
            f"too little calibration text: '{stream.source}' has {have} tokens, {samples} windows "
            f"of {seq_len} need {samples * seq_len}; give more text, or {lower}"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    chosen = rows[order[:samples].sort().values]
    return _windows(stream, chosen)


def all_windows(stream: Stream, *, seq_len: int, vocabulary: int) -> Windows:
    """Every full window in order, the tail dropped: the evaluation protocol (METHODS §7).

    Raises:
        CalibrationError: less than one window, or ids outside the vocabulary.
    """
    rows = _cut(stream, seq_len, vocabulary)
    if len(rows) == 0:
        raise CalibrationError(
            f"'{stream.source}' has {stream.ids.numel()} tokens, less than one window of "
            f"{seq_len}; give more text, or shorter windows (seq_len=N)"
        )
    return _windows(stream, rows)


def hold_out(windows: Windows, fraction: float, seed: int) -> tuple[Tensor, Tensor | None]:
    """Windows to fit on, and those held out, as many as `held_out` says, drawn under the seed.

    Windows that were sampled from the model besides are fitted on: it is the text that judges.

    Raises:
        CalibrationError: no window is left on one of the two sides.
    """
    n = len(windows.ids) - windows.sampled
    held = held_out(n, fraction)
    if held == 0:
        return windows.ids, None
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    fit, judge = order[held:].sort().values, order[:held].sort().values
    return torch.cat([windows.ids[fit], windows.ids[n:]]), windows.ids[judge]


def held_out(n: int, fraction: float) -> int:
    """How many of `n` windows are held out: `round(fraction · n)`, at least one unless it is 0.

    Raises:
        CalibrationError: no window is left on one of the two sides.
    """
    if not fraction:
        return 0
    held = max(1, round(fraction * n))
    if held >= n:
        raise CalibrationError(
            f"holdout={fraction:g} of {n} windows leaves {held} held out and {n - held} to fit "
            "on: both need at least one; take more windows (samples=N)"
        )
    return held


def _windows(stream: Stream, rows: Int[Tensor, "n length"]) -> Windows:
    return Windows(
        rows,
        stream.source,
        stream.ids.numel(),
        stream.text_sha256,
        stream.special_tokens,
        stream.characters,
        stream.in_pieces,
    )


def _cut(stream: Stream, seq_len: int, vocabulary: int) -> Int[Tensor, "n length"]:
    ids = stream.ids
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise CalibrationError(
            f"'{stream.source}' has token ids {int(ids.min())}..{int(ids.max())}, the model's "
            f"vocabulary has {vocabulary}: it was made with another tokenizer"
        )
    if ids.ndim == 2:
        if ids.shape[1] != seq_len:
            raise CalibrationError(
                f"'{stream.source}' holds rows of {ids.shape[1]} tokens; "
                f"pass seq_len={ids.shape[1]}, or save one long row"
            )
        return ids
    count = len(ids) // seq_len
    return ids[: count * seq_len].reshape(count, seq_len)


def _read_token_file(path: Path) -> Tensor:
    if not is_file(path):
        raise CalibrationError(f"no token file at '{path}'")
    try:
        if path.suffix == ".npy":
            ids = token_ids(np.load(path, allow_pickle=False))
        else:
            ids = token_ids(load_file(path)["input_ids"])
    except Exception as error:  # of a damaged file numpy and safetensors raise many kinds
        missing = isinstance(error, KeyError)
        why = "it has no 'input_ids'" if missing else one_line(error)
        raise CalibrationError(
            f"'{path}' holds no token ids (an integer .npy array, or a safetensors file with "
            f"'input_ids'): {why}"
        ) from error
    return ids


def digest(ids: Tensor) -> str:
    """SHA-256 of token ids as int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()
