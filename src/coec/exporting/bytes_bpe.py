"""Byte-level BPE, as in GPT-2, Llama 3, Qwen, Granite and others.

They differ in where text is cut before it; llama.cpp has a name for each way.
"""

from coec.exporting.vocabulary import JsonObject, UnknownTokenizerError, Vocabulary, in_order, pairs

_WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d|" + _WORDS
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
"""llama.cpp's names, by the expressions that cut a text in turn, and True where a word that is a
token as a whole is taken without merging."""

CAPITALS = (
    "llama.cpp cuts words with capital letters beyond ASCII at other places than the model's own "
    "tokenizer: they may become other ids"
)
NORMAL_FORM = (
    "llama.cpp does not bring text into Unicode's normal form C, as the model's own tokenizer "
    "does: text in another form becomes other ids"
)


def read(content: JsonObject) -> Vocabulary | None:
    """Read byte-level BPE that llama.cpp has; None for another kind of tokenizer."""
    steps = in_order(content["pre_tokenizer"], "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        return None
    model = content["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback"):
        if model.get(key):
            raise UnknownTokenizerError(f"its {key} is {model[key]!r}")
    normalizers = in_order(content["normalizer"], "normalizers")
    if any(step["type"] != "NFC" for step in normalizers):
        names = ", ".join(step["type"] for step in normalizers)
        raise UnknownTokenizerError(f"it changes text before it is cut ({names})")
    if not model["merges"]:
        raise UnknownTokenizerError("it has no merges, without which llama.cpp reads no file")
    name = NAMES.get((_cuts(steps), bool(model.get("ignore_merges"))))
    if name is None:
        raise UnknownTokenizerError("it cuts text into words in a way that coec does not know")
    notes = [CAPITALS] * (name == "tekken") + [NORMAL_FORM] * bool(normalizers)
    return Vocabulary("gpt2", name, merges=pairs(model["merges"]), notes=tuple(notes))


def _cuts(steps: list[JsonObject]) -> tuple[str, ...]:
    """List the expressions whose matches are cut apart, in order."""
    cuts: list[str] = []
    for step in steps:
        name = step["type"]
        if name == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            written = step["pattern"].get("Regex", "")
            cuts.append(written.replace("\r", r"\r").replace("\n", r"\n"))
        elif name == "Digits" and step["individual_digits"]:
            cuts.append(DIGIT)
        elif name == "ByteLevel" and not step["add_prefix_space"]:
            cuts += [GPT_2] * step["use_regex"]
        else:
            raise UnknownTokenizerError(f"it cuts text by {name}")
    return tuple(cuts)
