"""BPE over pieces of text with a token for every byte: SentencePiece's, of Llama 2 and Mistral.

A tokenizer.json merges pairs in a given order. llama.cpp, as SentencePiece, merges whichever two
neighbours make the token of the highest score. Both give the same ids where every pair that makes
a token is among the merges, and those of one token stand together.
"""

from typing import Any

from gguf import TokenType

from coec.exporting.vocabulary import UnknownTokenizerError, Vocabulary, pairs, sequential

SPACE = "▁"
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
ALWAYS = (
    "llama.cpp puts a space before a text that begins with one, the model's own tokenizer does not"
)
FIRST = f"{ALWAYS}, nor before what follows a special token"
PREFIXES = {"always": (True, (ALWAYS,)), "first": (True, (FIRST,)), "never": (False, ())}
"""Whether a space is put before a text, and what to know of it, by the scheme's name."""


def read(content: dict[str, Any]) -> Vocabulary | None:
    """BPE over pieces; None for another kind.

    Raises:
        UnknownTokenizerError: it is of this kind, and llama.cpp does not have it.
    """
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


def _prefix(content: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a space is put before a text, and what to know of it."""
    normalizers = sequential(content["normalizer"], "normalizers")
    steps = sequential(content["pre_tokenizer"], "pretokenizers")
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not steps and normalizers in ([prepend, replace], [replace]):
        return len(normalizers) == 2, ()
    if not normalizers and len(steps) == 1 and steps[0]["type"] == "Metaspace":
        step = steps[0]
        if step["replacement"] == SPACE and not step.get("split"):
            return PREFIXES[step["prepend_scheme"]]
    kinds = ", ".join(step["type"] for step in [*normalizers, *steps]) or "nothing"
    raise UnknownTokenizerError(
        f"it changes or cuts text in another way than SentencePiece ({kinds})"
    )


def _scores(tokens: set[str], merges: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """The place of every merged token among the merges, negated: earlier is higher.

    Raises:
        UnknownTokenizerError: merging by tokens is not merging by pairs.
    """
    places: dict[str, int] = {}
    last = None
    for left, right in merges:
        made = left + right
        if made != last and made in places:
            raise UnknownTokenizerError(
                f"it merges the pairs that make {made!r} at different times"
            )
        last = made
        places.setdefault(made, len(places))
    known = set(merges)
    for token in tokens:
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        able = [cut for cut in cuts if cut[0] in tokens and cut[1] in tokens]
        if len(token) > 1 and (token not in places or not known.issuperset(able)):
            raise UnknownTokenizerError(f"it does not merge every pair that makes {token!r}")
    return {token: -float(place) for token, place in places.items()}
