"""BPE over pieces of text with a token for every byte, as in SentencePiece, Llama 2 and Mistral.

A tokenizer.json merges pairs in a given order. llama.cpp, as SentencePiece, merges whichever two
neighbours make the token of the highest score. Both give the same ids where every pair that makes
a token is among the merges, and those of one token stand together.
"""

from gguf import TokenType

from coec.exporting.vocabulary import JsonObject, UnknownTokenizerError, Vocabulary, in_order, pairs

SPACE = "▁"
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_ALWAYS = (
    "llama.cpp puts a space before a text that begins with one, the model's own tokenizer does not"
)
_FIRST = f"{_ALWAYS}, nor before what follows a special token"
_PREFIXES = {"always": (True, (_ALWAYS,)), "first": (True, (_FIRST,)), "never": (False, ())}
"""By the name of a scheme: True where a space is put before a text, and notes on it."""


def read(content: JsonObject) -> Vocabulary | None:
    """Read BPE over pieces that llama.cpp has; None for another kind of tokenizer."""
    model = content["model"]
    if not model["vocab"].keys() >= BYTES or not model.get("byte_fallback"):
        return None
    if model.get("dropout") or model.get("ignore_merges"):
        raise UnknownTokenizerError("it drops or ignores merges")
    prefix, notes = _prefix(content)
    added = {token["content"] for token in content["added_tokens"]}
    special = added | BYTES
    types: dict[str, int] = dict.fromkeys(BYTES, TokenType.BYTE)
    types |= {model["unk_token"]: TokenType.UNKNOWN} if model.get("unk_token") else {}
    plain = model["vocab"].keys() - special
    scores = _scores(plain, pairs(model["merges"]))
    return Vocabulary(
        "llama", "default", scores=scores, types=types, space_prefix=prefix, notes=notes
    )


def _prefix(content: JsonObject) -> tuple[bool, tuple[str, ...]]:
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
    """Score every merged token by its place among the merges, negated: earlier is higher.

    Raises:
        UnknownTokenizerError: merging by tokens is not merging by pairs.
    """
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
        able = [cut for cut in cuts if cut[0] in tokens and cut[1] in tokens]
        if len(token) > 1 and (token not in places or not merged.issuperset(able)):
            raise UnknownTokenizerError(f"it does not merge every pair that makes {token!r}")
    return {token: -float(place) for token, place in places.items()}
