"""Tokens of a calibration or evaluation text: tokenizers of model folders, and token files."""

import filecmp
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from coec.errors import CalibrationError, ModelError, first_line
from coec.events import Progress
from coec.models.files import JsonDict, check_fetched
from coec.models.folder import (
    CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    read_config,
    tokenizer_classes,
)
from coec.models.layout import BLOCK_WIDTHS
from coec.text.chats import ChatTemplate, encode
from coec.text.packing import Chat
from coec.text.sources import Documents, Split, mixture, read_parts

TOKEN_SUFFIXES = (".npy", ".safetensors")
LONG_TEXT = 12_000_000
"""Texts of up to so many characters are tokenised at once, as the train split of WikiText-2 is."""
PIECE = 1_000_000
"""Approximate number of characters of a longer text that are tokenised at once, in 0.2 GB."""
_CUTS = ("\n\n", "\n", " ")
_PROBE = "The cat sat on 3 mats.\n\nIt isn't far: naïve «数» x == y  # end"
"""Tokenizers with one vocabulary that encode this text alike count as the same."""
_PROBED = 100
"""Characters at the beginning of a text that tell which special tokens stand around it."""
_ANCHOR = "\n"
"""Text before a later piece while it is tokenised."""


@dataclass(frozen=True, eq=False)
class Stream:
    """A long run of token ids, or rows that are windows already, and their origin.

    Attributes:
        source: the source, as the user gave it.
        text_sha256: digest of the source text, or of the beginning that is tokenised at
            once; of the token ids if there is no text.
        special_tokens: number of special tokens that the tokenizer added to the text.
        characters: number of characters that were tokenised, which for a large data set or file are
            its beginning; 0 if there is no text.
        in_pieces: true if the source was longer than one tokenised piece, and therefore
            tokenised in pieces, and no further than the windows need.
        start: the special tokens that the tokenizer put before the text, the first of `ids`; none
            if there is no text.
        chats: number of chats that the tokenizer's template rendered.
        answers: characters of the assistants' turns in these chats.
        answers_kept: number of these characters that are in the tokens.
        whole: the chats, of which windows are packed; none if the text is no chats.
    """

    ids: Int[Tensor, " n"] | Int[Tensor, "rows length"]
    source: str
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0
    in_pieces: bool = False
    chats: int = 0
    answers: int = 0
    answers_kept: int = 0
    start: Int[Tensor, " k"] = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    whole: tuple[Chat, ...] = ()

    def within(self, vocabulary: int) -> "Stream":
        """Return the stream; raises CalibrationError for ids that the model does not have."""
        if self.ids.numel() and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocabulary:
            raise CalibrationError(
                f"'{self.source}' has token ids {int(self.ids.min())}..{int(self.ids.max())}, the "
                f"model's vocabulary has {vocabulary}: it was made with another tokenizer"
            )
        return self


@dataclass(frozen=True)
class Extent:
    """The part of a text that is read.

    Attributes:
        tokens: number after which a long text is read no further; None reads all of it.
        characters: as in `read_parts`.
        at_once: characters up to which a text is tokenised at once; None for `LONG_TEXT`.
    """

    tokens: int | None = None
    characters: int | None = None
    at_once: int | None = None


def source_of(text: Any, column: str) -> str | Path | Tensor | Documents:
    """Return the text that a caller gave, in the form that is read: arrays as tensors of token ids.

    Raises:
        CalibrationError: it is no text of any kind.
    """
    if isinstance(text, str | Path | Documents):
        return text
    if isinstance(text, Tensor | np.ndarray):
        return token_ids(text)
    return Documents(text, column)


def holds_tokens(source: str | Path | Tensor | Documents) -> bool:
    """True if the source is token ids or a file of them, so that no tokenizer is needed."""
    return isinstance(source, Tensor) or str(source).lower().endswith(TOKEN_SUFFIXES)


def read_stream(
    source: str | Path | Tensor | Documents,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    split: Split,
    text_column: str = "text",
    extent: Extent = Extent(),
    progress: Progress | None = None,
) -> Stream:
    """Read the tokens of a tensor or a token file, or of any text that `read_parts` accepts.

    A text is tokenised at once, with special tokens, or if it is long in pieces of about a million
    characters until there are tokens enough, so that memory does not grow with the text.

    Args:
        tokenizer: called only when there is text.
        progress: called with ("tokenising", done, total) for texts that take time.
    """
    if isinstance(source, Tensor):
        return Stream(source, "tensor", "")
    name = str(source)
    source = source if isinstance(source, Documents) else name
    if len(mixture(source)) > 1:
        raise CalibrationError(
            f"'{name}' is a mixture of texts, which only calibration and training take: give one"
        )
    if holds_tokens(source):
        ids = _read_token_file(Path(name))
        return Stream(ids, name, digest(ids))
    template = ChatTemplate(tokenizer)
    texts: Iterator[Any] = read_parts(
        source, split=split, text_column=text_column, characters=extent.characters,
        rendered=template,
    )  # fmt: skip
    texts = itertools.chain([first := next(texts)], texts)
    if isinstance(first, Chat):
        return _chats(texts, name, template, extent.tokens)
    at_once = extent.at_once or LONG_TEXT
    # Beginning of the text → digest, special tokens around it → ids, at once or in pieces
    pieces, characters = [], 0
    for text in texts:
        _check_kind(text, str, name)
        pieces.append(text)
        characters += len(text)
        if characters > at_once:
            break
    beginning = "".join(pieces)
    loaded = template.tokenizer
    sha256 = hashlib.sha256(beginning[:at_once].encode()).hexdigest()
    ends = _special_ends(loaded, beginning[:_PROBED].strip() or _PROBE)
    special = loaded.num_special_tokens_to_add()
    in_pieces = characters > at_once
    if in_pieces:
        texts = itertools.chain([beginning], texts)
        ids, special, characters = _encode_pieces(loaded, ends, texts, extent.tokens, progress)
    else:
        tell = progress if progress and characters > PIECE else (lambda *step: None)
        tell("tokenising", 0, characters)
        ids = encode(loaded, beginning)
        tell("tokenising", characters, characters)
    return Stream(ids, name, sha256, special, characters, in_pieces, start=ends[0])


def _chats(chats: Iterable[Any], name: str, template: ChatTemplate, needed: int | None) -> Stream:
    """Return the tokens of chats, which are read until there are enough."""
    whole, tokens, in_pieces = list[Chat](), 0, False
    for chat in chats:
        # Packing leaves less than a window of tokens out for every window.
        if in_pieces := needed is not None and tokens >= 2 * needed:
            break
        _check_kind(chat, Chat, name)
        whole.append(chat)
        tokens += len(chat.ids)
    template.check_answers(name)
    ids = torch.cat([chat.ids for chat in whole])
    return Stream(
        ids, name, digest(ids), 0, sum(chat.characters for chat in whole), in_pieces,
        template.count, template.answers, template.answers_kept, whole=tuple(whole),
    )  # fmt: skip


def _check_kind(document: Any, kind: type, name: str) -> None:
    if not isinstance(document, kind):
        raise CalibrationError(
            f"'{name}' has rows of text and rows that are chats: give them as two texts, "
            "a.jsonl,b.jsonl"
        )


def _encode_pieces(
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[Tensor, Tensor],
    text: Iterable[str],
    needed: int | None,
    progress: Progress | None,
) -> tuple[Tensor, int, int]:
    """Tokenise a long text in pieces; returns ids, and numbers of special tokens and characters.

    `ends` are the special tokens before the text and after it.
    """
    start, end = ends
    special = tokenizer.num_special_tokens_to_add()
    pieces, characters, tokens = [start], 0, len(start)
    # Start → plain tokens of every piece → end, unless the text continues after the needed part
    for piece in _pieces(text):
        later = characters > 0
        pieces.append(
            _encode_later_piece(tokenizer, piece)
            if later
            else encode(tokenizer, piece, special=False)
        )
        characters, tokens = characters + len(piece), tokens + len(pieces[-1])
        if progress:
            progress("tokenising", min(tokens, needed or tokens), needed or tokens)
        if needed is not None and tokens >= needed:
            return torch.cat(pieces), len(start), characters  # the text goes on
    return torch.cat([*pieces, end]), special, characters


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Cut a text anew, at the last blank line, line end or space before `PIECE` characters."""
    pending = ""
    for chunk in texts:
        pending += chunk
        first = 0
        while len(pending) - first > PIECE:
            ends = (pending.rfind(mark, first, first + PIECE) + len(mark) for mark in _CUTS)
            end = next((end for end in ends if end > first + PIECE // 2), first + PIECE)
            yield pending[first:end]
            first = end
        pending = pending[first:]
    if pending:
        yield pending


def _read_token_file(path: Path) -> Tensor:
    if not isfile(path):
        raise CalibrationError(f"no token file at '{path}'")
    try:
        if path.suffix.lower() == ".npy":
            return token_ids(np.load(path, allow_pickle=False))
        return token_ids(load_file(path)["input_ids"])
    except Exception as error:  # numpy and safetensors raise anything for a damaged file
        missing = isinstance(error, KeyError)
        reason = "it has no 'input_ids'" if missing else first_line(error)
        raise CalibrationError(
            f"'{path}' holds no token ids (an integer .npy array, or a safetensors file with "
            f"'input_ids'): {reason}"
        ) from error


def digest(ids: Tensor) -> str:
    """SHA-256 of token ids as int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()


def token_ids(ids: Tensor | np.ndarray) -> Tensor:
    """Convert whole numbers to int64 on the CPU: one row of ids, or several of one length."""
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            raise CalibrationError(f"token ids are whole numbers, got {ids.dtype}")
        ids = torch.from_numpy(ids.astype(np.int64, casting="same_kind"))
    elif ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise CalibrationError(f"token ids are whole numbers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise CalibrationError(
            f"token ids are integer values of shape (n,) or (rows, length), got {tuple(ids.shape)}"
        )
    return ids.long().cpu()


def has_tokenizer(folder: Path) -> bool:
    """True where a folder has a tokenizer's files under their usual names."""
    return any(isfile(folder / name) for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Python code that it may bring runs only with `trust_remote_code`; nobody is asked. Raises
    ModelError if the folder has none, it cannot be read, or it needs its own code.
    """
    # Only own code reads files of other names.
    if not has_tokenizer(folder) and not tokenizer_classes(folder):
        raise ModelError(
            f"'{folder}' has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the tokenizer "
            "files there, or give token ids (.npy, .safetensors) instead of text"
        )
    for name in (TOKENIZER_CONFIG, *TOKENIZER_FILES):
        check_fetched(folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, **_non_uniform_config(folder)
        )
    except Exception as error:  # tokenizers may raise anything
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ModelError(
                f"the tokenizer in '{folder}' runs Python code of its own, with all that it "
                "imports and with code of other repositories that its files name: read it, and "
                "pass trust_remote_code=True if you trust it"
            ) from error
        raise ModelError(
            f"the tokenizer in '{folder}' cannot be loaded: {first_line(error)}"
        ) from error
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ModelError(
            f"model_max_length in '{folder / TOKENIZER_CONFIG}' must be a number, got "
            f"{longest!r:.80}: mend it"
        )
    return tokenizer


def _non_uniform_config(folder: Path) -> JsonDict:
    """Configuration of a model whose widths differ by block; empty for any other model.

    If transformers read it from the folder, it would ask for the code next to the weights.
    """
    if not isfile(folder / CONFIG) or BLOCK_WIDTHS not in (config := read_config(folder)):
        return {}
    return {"config": AutoConfig.for_model(**{k: v for k, v in config.items() if k != "auto_map"})}


def check_same_tokenizer(
    folder: Path, other: Path, advice: str, *, trust_remote_code: bool = False
) -> None:
    """Raise ModelError if two models tokenise one text differently: no divergence has meaning then.

    A folder without a tokenizer, which only takes token ids, passes. The error ends in the advice.
    """
    folders = (folder, other)
    before, after = (
        [path / name for name in TOKENIZER_FILES if isfile(path / name)] for path in folders
    )
    if not before or not after:
        return
    if [p.name for p in before] == [p.name for p in after] and all(
        filecmp.cmp(*pair, shallow=False) for pair in zip(before, after, strict=True)
    ):
        return
    # Other files may still hold the same tokenizer: vocabulary and one odd text decide.
    tokenizers = [load_tokenizer(path, trust_remote_code=trust_remote_code) for path in folders]
    if (
        tokenizers[0].get_vocab() != tokenizers[1].get_vocab()
        or encode(tokenizers[0], _PROBE).tolist() != encode(tokenizers[1], _PROBE).tolist()
    ):
        raise ModelError(f"'{folder}' and '{other}' have different tokenizers: {advice}")


def _encode_later_piece(tokenizer: PreTrainedTokenizerBase, piece: str) -> Int[Tensor, " n"]:
    """Tokenise a piece from the middle of a text.

    Some tokenizers put a space before any text. Here a line end comes first, and its tokens are
    removed again.
    """
    anchor, ids = (encode(tokenizer, text, special=False) for text in (_ANCHOR, _ANCHOR + piece))
    if torch.equal(ids[: len(anchor)], anchor):
        return ids[len(anchor) :]
    return encode(tokenizer, piece, special=False)


def _special_ends(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[Tensor, Tensor]:
    """The special tokens before a text, and those after it."""
    # Find the plain tokens among those with special ones: what stands around is special.
    marked, plain = (encode(tokenizer, text, special=special) for special in (True, False))
    for start in range(len(marked) - len(plain) + 1):
        if torch.equal(marked[start : start + len(plain)], plain):
            return marked[:start], marked[start + len(plain) :]
    return marked[:0], marked[:0]
