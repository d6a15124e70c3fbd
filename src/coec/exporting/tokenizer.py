"""A model's tokenizer in the terms of llama.cpp, or the reason why llama.cpp has none like it.

llama.cpp has separate code for each kind of tokenizer, and a file only names the kind. A
tokenizer.json that no kind computes is refused, since the same text would become other ids.
"""

import json
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from coec.errors import ModelError
from coec.exporting.vocabulary import UnknownTokenizerError, Vocabulary, read_bytes, read_pieces
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.models.folder import tokenizer_classes
from coec.text.tokens import has_tokenizer, load_tokenizer

_INSTEAD = "pass no_tokenizer=True for a file that takes and gives token ids alone"
_UNUSED = "[PAD{}]"
"""Token of an id that only the model has, as llama.cpp's converter names it."""


@dataclass(frozen=True)
class GgufTokenizer:
    """Tokenizer, ready to be written.

    Attributes:
        tokens, types: of every id of the model.
        special: ids by their role: bos, eos, unk, pad.
        added: True, twice, where bos and eos are added to a text.
        chat_template: one, several by name, or none.
    """

    vocabulary: Vocabulary
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    special: dict[str, int]
    added: tuple[bool, bool]
    chat_template: str | dict[str, str] | None

    def add_to(self, writer: GGUFWriter) -> None:
        """Write it into the file's metadata."""
        writer.add_tokenizer_model(self.vocabulary.model)
        writer.add_tokenizer_pre(self.vocabulary.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.vocabulary.scores is not None:
            scores = self.vocabulary.scores
            writer.add_token_scores([scores.get(token, 0.0) for token in self.tokens])
        if self.vocabulary.merges is not None:
            writer.add_token_merges([" ".join(pair) for pair in self.vocabulary.merges])
        if self.vocabulary.space_prefix is not None:
            writer.add_add_space_prefix(self.vocabulary.space_prefix)
        for role, number in self.special.items():
            getattr(writer, f"add_{role}_token_id")(number)
        writer.add_add_bos_token(self.added[0])
        writer.add_add_eos_token(self.added[1])
        template = self.chat_template
        if isinstance(template, dict):
            writer.add_chat_template([{"name": n, "template": t} for n, t in template.items()])
        elif template:
            writer.add_chat_template(template)


def tokenizer_of(model: Dense) -> GgufTokenizer:
    """Read the tokenizer in a model's folder; raises ModelError if llama.cpp has none like it."""
    if tokenizer_classes(model.folder):
        raise _refused(model, "it brings Python code of its own")
    if not has_tokenizer(model.folder):
        raise ModelError(f"'{model.folder}' has no tokenizer: copy its files there, or {_INSTEAD}")
    try:
        tokenizer: Any = load_tokenizer(model.folder)
    except ModelError as error:
        raise ModelError(f"{error}; mend it, or {_INSTEAD}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(model, f"transformers reads it as {type(tokenizer).__name__}, in Python")
    # tokenizer.json, as the library holds it → llama.cpp's kind, or the reason why there is none
    content = json.loads(backend.to_str())
    try:
        vocabulary = _vocabulary(content)
        tokens, types = _tokens(content, vocabulary, model.vocabulary)
        added = _added(tokenizer)
        special = _special(tokenizer, model.config)
    except UnknownTokenizerError as error:
        raise _refused(model, str(error)) from None
    return GgufTokenizer(vocabulary, tokens, types, special, added, tokenizer.chat_template)


def _refused(model: Dense, why: str) -> ModelError:
    return ModelError(
        f"the tokenizer in '{model.folder}' is none that llama.cpp has: {why}; {_INSTEAD}"
    )


def _vocabulary(content: JsonDict) -> Vocabulary:
    if content["model"]["type"] != "BPE":
        raise UnknownTokenizerError(f"its model is {content['model']['type']}")
    for token in content["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise UnknownTokenizerError(f"the token {token['content']!r} takes the text beside it")
    vocabulary = read_pieces(content) or read_bytes(content)
    if vocabulary is None:
        raise UnknownTokenizerError(
            "it is neither byte-level BPE nor BPE over pieces with a token for every byte"
        )
    return vocabulary


def _tokens(
    content: JsonDict, vocabulary: Vocabulary, size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    # Every id of the model needs a token: the vocabulary's, then the added ones, which overrule it.
    tokens = [_UNUSED.format(number) for number in range(size)]
    types: list[int] = [TokenType.UNUSED] * size
    entries: dict[int, tuple[str, int]] = {
        number: (token, vocabulary.types.get(token, TokenType.NORMAL))
        for token, number in content["model"]["vocab"].items()
    }
    for token in content["added_tokens"]:
        usual = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        entries[token["id"]] = token["content"], vocabulary.types.get(token["content"], usual)
    if max(entries) >= size:
        raise UnknownTokenizerError(f"it has the id {max(entries)}, the model has {size} of them")
    for number, entry in entries.items():
        tokens[number], types[number] = entry
    return tuple(tokens), tuple(map(int, types))


def _added(tokenizer: Any) -> tuple[bool, bool]:
    """Tell if a text gets the start, and if it gets the end."""
    # The ids of an empty text are added to any text.
    ids = list(tokenizer("", add_special_tokens=True)["input_ids"])
    starts = ids[:1] == [tokenizer.bos_token_id]
    ends = ids[starts:][-1:] == [tokenizer.eos_token_id]
    if len(ids) == starts + ends:
        return starts, ends
    raise UnknownTokenizerError(f"it adds the ids {ids} to a text")


def _special(tokenizer: Any, config: JsonDict) -> dict[str, int]:
    """Find ids by their role, in the tokenizer or else in the configuration."""
    ids: dict[str, int] = {}
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{role}_token_id")
        if number is None and role in ("bos", "eos"):
            number = config.get(f"{role}_token_id")
        if isinstance(number, list):
            number = number[0] if number else None
        if number is not None:
            ids[role] = int(number)
    if "eos" not in ids:  # llama.cpp would take another one for that
        raise UnknownTokenizerError(
            "neither it nor config.json has an eos_token, which ends a text"
        )
    return ids
