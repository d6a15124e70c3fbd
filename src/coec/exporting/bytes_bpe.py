"""Byte-level BPE: GPT-2's way, which Llama 3, Qwen, Granite and others took over.

What differs is where text is cut before it: llama.cpp has a name for each.
"""

from typing import Any

from coec.exporting.vocabulary import UnknownTokenizerError, Vocabulary, pairs, sequential

WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d|" + WORDS
DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
QWEN_2 = _CONTRACTIONS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ONE = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = (
    f"{_ONE}{_UPPER}*{_LOWER}+|{_ONE}{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_REST = r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
SEED = _CONTRACTIONS + r"\p{N}{1}" + _SEED_REST

NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    ((GPT_2,), False): "gpt-2",
    ((DIGIT, GPT_2), False): "refact",
    ((LLAMA_3,), True): "llama-bpe",
    ((LLAMA_3,), False): "smaug-bpe",
    ((QWEN_2,), False): "qwen2",
    ((TEKKEN,), True): "tekken",
    ((SEED,), False): "seed-coder",
}
"""The expressions that cut a text, one after the other, and whether a whole word that is a token is
taken without merging → llama.cpp's name."""

CAPITALS = (
    "llama.cpp cuts words with capital letters beyond ASCII at other places than the model's own "
    "tokenizer: they may become other ids"
)
NORMAL_FORM = (
    "llama.cpp does not bring text into Unicode's normal form C, as the model's own tokenizer "
    "does: text in another form becomes other ids"
)


def read(content: dict[str, Any]) -> Vocabulary | None:
    """Byte-level BPE; None for another kind.

    Raises:
        UnknownTokenizerError: it is of this kind, and llama.cpp does not have it.
    """
    steps = sequential(content["pre_tokenizer"], "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        return None
    model = content["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback"):
        if model.get(key):
            raise UnknownTokenizerError(f"its {key} is {model[key]!r}")
    normalizers = sequential(content["normalizer"], "normalizers")
    if any(step["type"] != "NFC" for step in normalizers):
        kinds = ", ".join(step["type"] for step in normalizers)
        raise UnknownTokenizerError(f"it changes text before it is cut ({kinds})")
    if not model["merges"]:
        raise UnknownTokenizerError("it has no merges, without which llama.cpp reads no file")
    whole = bool(model.get("ignore_merges"))
    name = NAMES.get((_cuts(steps), whole))
    if name is None:
        raise UnknownTokenizerError("it cuts text into words as none of those that coec knows")
    notes = [CAPITALS] * (name == "tekken") + [NORMAL_FORM] * bool(normalizers)
    return Vocabulary("gpt2", name, merges=pairs(model["merges"]), notes=tuple(notes))


def _cuts(steps: list[dict[str, Any]]) -> tuple[str, ...]:
    """The expressions whose matches are cut apart, in their order."""
    cuts: list[str] = []
    for step in steps:
        kind = step["type"]
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            written = step["pattern"].get("Regex", "")
            cuts.append(written.replace("\r", r"\r").replace("\n", r"\n"))
        elif kind == "Digits" and step["individual_digits"]:
            cuts.append(DIGIT)
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            cuts += [GPT_2] * step["use_regex"]
        else:
            raise UnknownTokenizerError(f"it cuts text by {kind}")
    return tuple(cuts)
