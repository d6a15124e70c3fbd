"""A model's tokenizer as llama.cpp knows tokenizers, or the reason why it knows none like it.

llama.cpp brings its own code for each kind, and a file only names the kind: what a tokenizer.json
says that no kind does is refused, since the same text would become other ids.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from coec.calibration.tokenizer import load_tokenizer
from coec.errors import ModelError
from coec.exporting import bytes_bpe, pieces
from coec.exporting.vocabulary import UnknownTokenizerError, Vocabulary
from coec.models.companion_files import TOKENIZER_FILES, tokenizer_classes
from coec.models.dense import Dense

INSTEAD = "pass no_tokenizer=True for a file that takes and gives token ids alone"
UNUSED = "[PAD{}]"
"""What stands for an id that the model has and the tokenizer does not, as llama.cpp's converter
writes it."""


@dataclass(frozen=True)
class Written:
    """A tokenizer, ready to be written.

    Attributes:
        vocabulary: how text becomes ids.
        tokens, types: of every id of the model.
        special: ids by their role: bos, eos, unk, pad.
        added: whether bos, and eos, are added to a text.
        chat_template: one, several by name, or none.
    """

    vocabulary: Vocabulary
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    special: dict[str, int]
    added: tuple[bool, bool]
    chat_template: str | dict[str, str] | None

    def add_to(self, writer: GGUFWriter) -> None:
        """Writes it into the file's metadata."""
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


def tokenizer_of(model: Dense) -> Written:
    """The tokenizer in a model's folder.

    Raises:
        ModelError: there is none, or llama.cpp has none that gives the same ids.
    """
    if tokenizer_classes(model.folder):
        raise _refused(model, "it brings Python code of its own")
    if not any((model.folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"'{model.folder}' has no tokenizer: copy its files there, or {INSTEAD}")
    try:
        tokenizer: Any = load_tokenizer(model.folder)
    except ModelError as error:
        raise ModelError(f"{error}; mend it, or {INSTEAD}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(model, f"transformers reads it as {type(tokenizer).__name__}, in Python")
    content = json.loads(backend.to_str())
    try:
        vocabulary = _vocabulary(content)
        tokens, types = _tokens(content, vocabulary, model.vocabulary)
        added = _added(tokenizer)
        special = _special(tokenizer, model.config)
    except UnknownTokenizerError as error:
        raise _refused(model, str(error)) from None
    return Written(vocabulary, tokens, types, special, added, tokenizer.chat_template)


def _refused(model: Dense, why: str) -> ModelError:
    return ModelError(
        f"the tokenizer in '{model.folder}' is none that llama.cpp has: {why}; {INSTEAD}"
    )


KINDS: tuple[Callable[[dict[str, Any]], Vocabulary | None], ...] = (pieces.read, bytes_bpe.read)


def _vocabulary(content: dict[str, Any]) -> Vocabulary:
    if content["model"]["type"] != "BPE":
        raise UnknownTokenizerError(f"its model is {content['model']['type']}")
    for token in content["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise UnknownTokenizerError(
                f"the token {token['content']!r} takes what stands beside it"
            )
    for kind in KINDS:
        vocabulary = kind(content)
        if vocabulary is not None:
            return vocabulary
    raise UnknownTokenizerError(
        "it is neither byte-level BPE nor BPE over pieces with a token for every byte"
    )


def _tokens(
    content: dict[str, Any], vocabulary: Vocabulary, size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Token and type of every id that the model has."""
    tokens = [UNUSED.format(number) for number in range(size)]
    types: list[int] = [TokenType.UNUSED] * size
    known: dict[int, tuple[str, int]] = {
        number: (token, vocabulary.types.get(token, TokenType.NORMAL))
        for token, number in content["model"]["vocab"].items()
    }
    for token in content["added_tokens"]:
        own = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        known[token["id"]] = token["content"], vocabulary.types.get(token["content"], own)
    if max(known) >= size:
        raise UnknownTokenizerError(f"it has the id {max(known)}, the model has {size} of them")
    for number, (token, its_type) in known.items():
        tokens[number], types[number] = token, its_type
    return tuple(tokens), tuple(int(one) for one in types)


def _added(tokenizer: Any) -> tuple[bool, bool]:
    """Whether a text gets the start and the end."""
    ids = list(tokenizer("", add_special_tokens=True)["input_ids"])
    start, end = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    choices = {(False, False): [], (True, False): start, (False, True): end,
               (True, True): start + end}  # fmt: skip
    for added, expected in choices.items():
        if ids == expected and None not in expected:
            return added
    raise UnknownTokenizerError(f"it adds the ids {ids} to a text")


def _special(tokenizer: Any, config: dict[str, Any]) -> dict[str, int]:
    """Ids by their role: the tokenizer's, or else the configuration's.

    Raises:
        UnknownTokenizerError: no token ends a text; llama.cpp would take another for it.
    """
    found: dict[str, int] = {}
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{role}_token_id")
        if number is None and role in ("bos", "eos"):
            number = config.get(f"{role}_token_id")
        if isinstance(number, list):
            number = number[0] if number else None
        if number is not None:
            found[role] = int(number)
    if "eos" not in found:
        raise UnknownTokenizerError(
            "neither it nor config.json has an eos_token, which ends a text"
        )
    return found
