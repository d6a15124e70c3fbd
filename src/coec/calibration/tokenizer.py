"""Tokenizers of model folders: loaded, compared, and applied to texts."""

import filecmp
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from coec.calibration.sources import is_file, one_line
from coec.errors import ModelError
from coec.models.files import JsonDict, check_fetched
from coec.models.folder import (
    CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    read_config,
    tokenizer_classes,
)
from coec.models.layout import BLOCK_WIDTHS

_PROBE = "The cat sat on 3 mats.\n\nIt isn't far: naïve «数» x == y  # end"
"""Tokenizers with one vocabulary that encode this text alike count as the same."""
_ANCHOR = "\n"
"""Text before a later piece while it is tokenised."""


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Args:
        folder: the model's folder.
        trust_remote_code: run the Python code that a tokenizer may bring. Otherwise it is never
            run, and nobody is asked.

    Raises:
        ModelError: the folder has none, it cannot be read, or it needs its own code.
    """
    stock = any(is_file(folder / name) for name in TOKENIZER_FILES)
    if not stock and not tokenizer_classes(folder):  # only own code reads files of other names
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
            f"the tokenizer in '{folder}' cannot be loaded: {one_line(error)}"
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

    If transformers read it from the folder, it would ask for the code beside the weights.
    """
    if not is_file(folder / CONFIG) or BLOCK_WIDTHS not in (config := read_config(folder)):
        return {}
    return {"config": AutoConfig.for_model(**{k: v for k, v in config.items() if k != "auto_map"})}


def check_same_tokenizer(folder: Path, baseline: Path, *, trust_remote_code: bool = False) -> None:
    """Raise ModelError if two models tokenise one text differently.

    The divergence of such models would be a number without meaning, even if their vocabularies have
    one size. A folder without a tokenizer, which only takes token ids, passes.
    """
    folders = (folder, baseline)
    before, after = (
        [path / name for name in TOKENIZER_FILES if is_file(path / name)] for path in folders
    )
    if not before or not after:
        return
    if [p.name for p in before] == [p.name for p in after] and all(
        filecmp.cmp(*pair, shallow=False) for pair in zip(before, after, strict=True)
    ):
        return
    tokenizers = [load_tokenizer(path, trust_remote_code=trust_remote_code) for path in folders]
    if (
        tokenizers[0].get_vocab() != tokenizers[1].get_vocab()
        or encode(tokenizers[0], _PROBE).tolist() != encode(tokenizers[1], _PROBE).tolist()
    ):
        raise ModelError(
            f"'{folder}' and its baseline '{baseline}' have different tokenizers: the baseline "
            "must be the dense model it was pruned from"
        )


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True
) -> Int[Tensor, " n"]:
    """Tokenise a text, with special tokens unless told otherwise.

    Raises:
        ModelError: the tokenizer fails.
    """
    try:
        # verbose=False: the warning about texts longer than the model is meant for other uses.
        ids = tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)
    except Exception as error:  # a damaged tokenizer_config.json may only fail here
        raise ModelError(
            f"the tokenizer of '{tokenizer.name_or_path}' fails on a text ({one_line(error)}): "
            "mend its files"
        ) from error


def encode_later_piece(tokenizer: PreTrainedTokenizerBase, piece: str) -> Int[Tensor, " n"]:
    """Tokenise a piece from the middle of a text.

    Some tokenizers put a space before any text. Here a line end comes first, and its tokens are
    removed again.
    """
    anchor = encode(tokenizer, _ANCHOR, special=False)
    ids = encode(tokenizer, _ANCHOR + piece, special=False)
    if torch.equal(ids[: len(anchor)], anchor):
        return ids[len(anchor) :]
    return encode(tokenizer, piece, special=False)


def special_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """The special tokens before a text, and those after it."""
    marked, plain = (encode(tokenizer, _PROBE, special=special) for special in (True, False))
    for start in range(len(marked) - len(plain) + 1):
        if torch.equal(marked[start : start + len(plain)], plain):
            return marked[:start], marked[start + len(plain) :]
    return marked[:0], marked[:0]
