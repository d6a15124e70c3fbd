"""Chats as tokens: the tokenizer's template renders them, and the assistants' words are marked."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.errors import CalibrationError, ModelError, first_line
from coec.events import record
from coec.text.packing import Chat
from coec.text.sources import check_unicode

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold its reasoning apart from its content."""
_FEW_ANSWERS = 0.9
"""Share of the assistants' text; a chat template that keeps less is recorded."""
_MARK = "coec{}turn"
"""Text in the place of an assistant's words, which tells where a template puts them."""

Turns = list[dict[str, Any]]
Piece = tuple[str, bool]
"""Some text of a chat, and whether an assistant wrote it."""


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True
) -> Int[Tensor, " n"]:
    """Tokenise a text, by default with special tokens; raises ModelError if that fails."""
    return _encoded(tokenizer, text, add_special_tokens=special)[0]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, **options: bool
) -> tuple[Int[Tensor, " n"], list[tuple[int, int]]]:
    """Return the tokens of a text, and their places in it if the options ask for these."""
    try:
        # verbose=False: the warning about texts longer than the model is meant for other uses.
        made = tokenizer(text, verbose=False, **options)
        ids = torch.tensor(made["input_ids"], dtype=torch.int64)
        return ids, made.get("offset_mapping", [])
    except Exception as error:  # a damaged tokenizer_config.json may only fail here
        raise ModelError(
            f"the tokenizer of '{tokenizer.name_or_path}' fails on a text ({first_line(error)}): "
            "mend its files"
        ) from error


class ChatTemplate:
    """Renders chats by the tokenizer's own template; counts them, and what it keeps of answers.

    Args:
        load: loads the tokenizer, where there is text.
    """

    def __init__(self, load: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._load, self.count, self.answers, self.answers_kept = load, 0, 0, 0

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self._load()

    def __call__(self, document: str | list[Any]) -> str | Chat:
        """Return a text as it is, and a chat as tokens.

        What the template drops of the assistants' words, as many do with reasoning, is put back:
        their turns are then written as in generation, the prompt of each with its raw words.

        Raises:
            CalibrationError: there is no template, or it cannot render the chat.
        """
        if isinstance(document, str):
            return document
        turns = self._turns(document)
        pieces = self._pieces(turns)
        text = "".join(words for words, _ in pieces)
        lines = [line for turn in turns for _, words in _answers(turn) for line in _lines(words)]
        self.count += 1
        self.answers += sum(map(len, lines))
        self.answers_kept += sum(len(line) for line in lines if line in text)
        ids, answered = self._tokens(text, pieces)
        return Chat(ids, answered, len(text))

    def prompt(self, document: str | list[Any]) -> Int[Tensor, " n"]:
        """Return the tokens of a user's question, or of turns that end with it, and of the
        beginning of the assistant's turn.

        Raises:
            CalibrationError: the last turn is not the user's, or as for a chat.
        """
        asked = [{"role": "user", "content": document}] if isinstance(document, str) else document
        turns = self._turns(asked)
        if not turns or turns[-1].get("role") != "user":
            raise CalibrationError("a prompt ends with the user's turn: leave its answer out")
        return encode(self.tokenizer, self._until_answer(turns), special=False)

    def check_answers(self, source: str) -> None:
        """Record that chats have no answers, or that the template dropped much of them."""
        if not self.count:
            return
        if not self.answers:
            record(f"no chat of '{source}' has an assistant's turn: its text is prompts alone")
        elif self.answers_kept < _FEW_ANSWERS * self.answers:
            record(
                f"the chat template dropped {1 - self.answers_kept / self.answers:.0%} of the "
                f"assistants' text of '{source}', reasoning that stands apart from the content: to "
                "keep it, write it into the content, or mend chat_template.jinja"
            )

    def _tokens(self, text: str, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Tokenise a chat at once, and tell which tokens begin in an assistant's words."""
        if not self.tokenizer.is_fast:  # which alone tell where their tokens are
            ids = encode(self.tokenizer, text, special=False)
            return ids, torch.ones(ids.shape, dtype=torch.bool)
        ids, places = _encoded(
            self.tokenizer, text, add_special_tokens=False, return_offsets_mapping=True
        )
        ends = list(accumulate(len(words) for words, _ in pieces))
        answered = [pieces[bisect_right(ends, min(start, ends[-1] - 1))][1] for start, _ in places]
        return ids, torch.tensor(answered, dtype=torch.bool)

    def _turns(self, messages: list[Any]) -> Turns:
        if not self.tokenizer.chat_template:
            raise CalibrationError(
                "the text is chats, and the model's tokenizer has no chat template to write them "
                "with: give text, or add the template of its instruct model (chat_template.jinja)"
            )
        turns = [_turn(message) for message in messages]
        if any(isinstance(turn.get("content"), list) for turn in turns) and not self._takes_parts:
            return [{**turn, "content": _without_parts(turn.get("content"))} for turn in turns]
        return turns

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template writes the text of a content that is a list of parts."""
        part = {"type": "text", "text": _MARK.format("")}
        try:
            text = self._rendered([{"role": "user", "content": [part]}])
        except CalibrationError:
            return False
        return part["text"] in text and str(part) not in text  # a filter may write the list itself

    def _rendered(self, turns: Turns, *, answering: bool = False) -> str:
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=answering
                )
            )
        except Exception as error:  # a template is a program
            raise CalibrationError(
                f"the chat cannot be rendered by the tokenizer's chat template "
                f"({first_line(error)}): give text, or messages with role and content"
            ) from error
        check_unicode(text)
        return text

    def _pieces(self, turns: Turns) -> list[Piece]:
        """Return the text of a chat, its assistants' turns apart."""
        own = self._rendered(turns)
        marked, words = _marked(turns)
        if not words:
            return [(own, True)]
        # Marks in the places of the assistants' words → whole words, or the trimmed ones
        with_marks = self._rendered(marked)
        shown = {mark: text for mark, text in words.items() if mark in with_marks}
        for change in (str, str.strip):
            pieces = _filled(with_marks, {mark: change(text) for mark, text in shown.items()})
            if pieces and "".join(text for text, _ in pieces) == own:
                return pieces
        try:
            return self._from_prompts(marked, words) or [(own, True)]
        except CalibrationError:  # the template refuses a beginning of the chat, such as a greeting
            return [(own, True)]

    def _from_prompts(self, marked: Turns, words: Mapping[str, str]) -> list[Piece]:
        """Return a chat whose every answer follows its prompt; empty if the marks are not found."""
        pieces: list[Piece] = []
        last = ""
        for number, turn in enumerate(marked):
            answers = _answers(turn)
            if not answers:
                continue
            if len(answers) > 1:  # reasoning apart from the content: its format is not known
                return []
            # What comes after the last answer, up to this one → its words
            before = self._until_answer(marked[:number])
            if last not in before:
                return []
            prompt = before.rpartition(last)[2] if last else before
            _, last = answers[0]
            pieces += [(prompt, False), (_without_overlap(prompt, words[last]), True)]
        text = self._rendered(marked)
        return [*pieces, (text.rpartition(last)[2], False)] if last in text else []

    def _until_answer(self, turns: Turns) -> str:
        """Return the text before an assistant's words."""
        text, plain = self._rendered(turns, answering=True), self._rendered(turns)
        if text != plain:
            return text
        # A template without a prompt for generation: what it writes before an assistant's words
        mark = _MARK.format("")
        before, found, _ = self._rendered(
            [*turns, {"role": "assistant", "content": mark}]
        ).rpartition(mark)
        return before if found else text


def chat_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer's chat template writes before a user's first words.

    Empty where there is no template, or one that a lone user's turn does not fit.
    """
    if not tokenizer.chat_template:
        return []
    words = "coec"  # any that a template does not change
    try:
        turns = [{"role": "user", "content": words}]
        start, found, _ = str(tokenizer.apply_chat_template(turns, tokenize=False)).partition(words)
    except Exception as error:  # a template is a program
        record(f"the chat template was not used to sample text: {first_line(error)}")
        return []
    return encode(tokenizer, start, special=False).tolist() if found else []


def _turn(message: Any) -> dict[str, Any]:
    """Return a message as templates take it, one of the ShareGPT format translated."""
    turn = dict(message) if isinstance(message, Mapping) else {}
    if (speaker := turn.get("from")) is not None:
        roles = {"human": "user", "gpt": "assistant"}
        turn = {"role": roles.get(speaker, speaker), "content": turn.get("value")}
    # Keys of other rows, which a table fills with None
    turn = {key: value for key, value in turn.items() if value is not None or key == "content"}
    if isinstance(content := turn.get("content"), list):
        turn["content"] = [
            {key: value for key, value in part.items() if value is not None}
            if isinstance(part, Mapping) else part
            for part in content
        ]  # fmt: skip
    without_content = any(turn.get(key) for key in ("tool_calls", *_REASONING))
    if not isinstance(turn.get("role"), str) or not (
        isinstance(content, str | list) or without_content
    ):
        raise CalibrationError(
            f"a chat is a list of messages with role and content, got {message!r:.40}"
        )
    return turn


def _answers(turn: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys of an assistant's turn that hold its words, and these."""
    if turn.get("role") != "assistant":
        return []
    named = {**turn, "content": _text_of(turn.get("content"))}
    texts = [(key, named.get(key)) for key in (*_REASONING, "content")]
    return [(key, text) for key, text in texts if isinstance(text, str) and text.strip()]


def _text_of(content: Any) -> Any:
    """Return the text of a content, which may be a list of parts."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "\n".join(part for part in parts if isinstance(part, str))


def _without_parts(content: Any) -> Any:
    """Return a content without parts; raises CalibrationError for a part that is no text."""
    for part in content if isinstance(content, list) else []:
        if isinstance(part, Mapping) and not isinstance(part.get("text"), str):
            raise CalibrationError(
                "the chat template takes text alone, and a content has a part of type "
                f"{part.get('type')!r:.40}: leave it out"
            )
    return _text_of(content)


def _lines(words: str) -> Iterator[str]:
    yield from (line.strip() for line in words.splitlines() if line.strip())


def _marked(turns: Sequence[Mapping[str, Any]]) -> tuple[Turns, dict[str, str]]:
    """Return the turns with marks in the place of the assistants' words, and the words by mark."""
    words: dict[str, str] = {}
    marked: Turns = []
    for turn in turns:
        changed = dict(turn)
        for key, text in _answers(turn):
            mark = _MARK.format(len(words))
            words[mark] = text
            in_parts = isinstance(turn[key], list)
            changed[key] = [{"type": "text", "text": mark}] if in_parts else mark
        marked.append(changed)
    return marked, words


def _filled(text: str, words: Mapping[str, str]) -> list[Piece]:
    """Put words in the places of their marks; empty if these are not there once, in order."""
    pieces: list[Piece] = []
    for mark, answer in words.items():
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return []
        pieces += [(before, False), (answer, True)]
    return [*pieces, (text, False)]


def _without_overlap(prompt: str, answer: str) -> str:
    """Return an answer without a tag that the prompt has written already, as `<think>`."""
    answer = answer.lstrip()
    tag = re.search(r"[<\[][^<\[]*$", prompt.rstrip())
    if tag is None or not answer.startswith(tag[0]):
        return answer
    return answer.removeprefix(tag[0]).lstrip()
