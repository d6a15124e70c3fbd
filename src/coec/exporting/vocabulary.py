"""Ways in which text becomes ids, in the terms of a GGUF file.

Byte-level BPE, as in GPT-2, Llama 3, Qwen, Granite and others: they differ in where text is cut
before it, and llama.cpp has a name for each way.

BPE over pieces of text with a token for every byte, as in SentencePiece, Llama 2 and Mistral: a
tokenizer.json merges pairs in a given order, llama.cpp, as SentencePiece, whichever two neighbours
make the token of the highest score. Both give the same ids if every pair that makes a token is
among the merges, and the merges of one token are consecutive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gguf import TokenType

from coec.models.files import JsonDict
from coec.models.renumbering import BYTES, in_order, pairs


@dataclass(frozen=True)
class Vocabulary:
    """Way to tokenise that llama.cpp has.

    Attributes:
        model, pre: llama.cpp's names for it, and for the way in which text is cut before.
        merges: pairs in the order in which they are merged, where those decide.
        scores: of tokens, where those decide.
        types: of tokens that are not normal ones.
        space_prefix: True where a space is put before a text; None where the kind has no choice.
        notes: differences from the model's own tokenizer, one sentence each.
    """

    model: str
    pre: str
    merges: tuple[tuple[str, str], ...] | None = None
    scores: Mapping[str, float] | None = None
    types: Mapping[str, int] = field(default_factory=dict)
    space_prefix: bool | None = None
    notes: tuple[str, ...] = ()


class UnknownTokenizerError(Exception):
    """Raised with the reason why no tokenizer of llama.cpp gives the same ids."""


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


def read_bytes(content: JsonDict) -> Vocabulary | None:
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
    # Two facts name the kind: how text is cut, and whether whole words are looked up first.
    name = NAMES.get((_cuts(steps), bool(model.get("ignore_merges"))))
    if name is None:
        raise UnknownTokenizerError("it cuts text into words in a way that coec does not know")
    notes = [CAPITALS] * (name == "tekken") + [NORMAL_FORM] * bool(normalizers)
    return Vocabulary("gpt2", name, merges=pairs(model["merges"]), notes=tuple(notes))


def _cuts(steps: list[JsonDict]) -> tuple[str, ...]:
    """List the expressions whose matches are cut apart, in order."""
    cuts: list[str] = []
    for step in steps:
        name = step["type"]
        if name == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            # Files write a line end as a character or as an escape: the same expression either way.
            written = step["pattern"].get("Regex", "")
            cuts.append(written.replace("\r", r"\r").replace("\n", r"\n"))
        elif name == "Digits" and step["individual_digits"]:
            cuts.append(DIGIT)
        elif name == "ByteLevel" and not step["add_prefix_space"]:
            cuts += [GPT_2] * step["use_regex"]
        else:
            raise UnknownTokenizerError(f"it cuts text by {name}")
    return tuple(cuts)


SPACE = "▁"
_ALWAYS = (
    "llama.cpp puts a space before a text that begins with one, the model's own tokenizer does not"
)
_FIRST = f"{_ALWAYS}, nor before what follows a special token"
_PREFIXES = {"always": (True, (_ALWAYS,)), "first": (True, (_FIRST,)), "never": (False, ())}
"""By the name of a scheme: True where a space is put before a text, and notes on it."""


def read_pieces(content: JsonDict) -> Vocabulary | None:
    """Read BPE over pieces that llama.cpp has; None for another kind of tokenizer."""
    model = content["model"]
    if not model["vocab"].keys() >= BYTES or not model.get("byte_fallback"):
        return None
    if model.get("dropout") or model.get("ignore_merges"):
        raise UnknownTokenizerError("it drops or ignores merges")
    # How a space is put before a text → types of tokens → scores that stand for the merges
    prefix, notes = _prefix(content)
    types: dict[str, int] = dict.fromkeys(BYTES, TokenType.BYTE)
    types |= {model["unk_token"]: TokenType.UNKNOWN} if model.get("unk_token") else {}
    added = {token["content"] for token in content["added_tokens"]}
    scores = _scores(model["vocab"].keys() - added - BYTES, pairs(model["merges"]))
    return Vocabulary(
        "llama", "default", scores=scores, types=types, space_prefix=prefix, notes=notes
    )


def _prefix(content: JsonDict) -> tuple[bool, tuple[str, ...]]:
    """Tell if a space is put before a text, with notes on it."""
    normalizers = in_order(content["normalizer"], "normalizers")
    steps = in_order(content["pre_tokenizer"], "pretokenizers")
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not steps and normalizers in ([prepend, replace], [replace]):
        return len(normalizers) == 2, ()
    if not normalizers and len(steps) == 1 and steps[0]["type"] == "Metaspace":
        step = steps[0]
        if step["replacement"] == SPACE and not step.get("split"):
            return _PREFIXES[step["prepend_scheme"]]
    names = ", ".join(step["type"] for step in [*normalizers, *steps]) or "nothing"
    raise UnknownTokenizerError(
        f"it changes or cuts text in another way than SentencePiece ({names})"
    )


def _scores(tokens: set[str], merges: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """Score every merged token by its place among the merges, negated: earlier is higher."""
    # Merges in order → a place for every token they make. Scores can stand for them only if all
    # pairs of a token are merged, and one after the other.
    places: dict[str, int] = {}
    last = None
    for pair in merges:
        token = "".join(pair)
        if token != last and token in places:
            raise UnknownTokenizerError(
                f"it merges the pairs that make {token!r} at different times"
            )
        last = token
        places.setdefault(token, len(places))
    merged = set(merges)
    for token in tokens:
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        # By scores, llama.cpp merges any neighbours that make a token; by merges only listed ones.
        able = [cut for cut in cuts if cut[0] in tokens and cut[1] in tokens]
        if len(token) > 1 and (token not in places or not merged.issuperset(able)):
            raise UnknownTokenizerError(f"it does not merge every pair that makes {token!r}")
    return {token: -float(place) for token, place in places.items()}
