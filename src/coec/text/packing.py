"""Windows packed from whole chats.

A chat is cut where a window ends, and only in an assistant's turn.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_TRIED, _RETURNED = 256, 4
"""Chats that are tried as the last of a window, and whole chats that a window gives back."""


@dataclass(frozen=True, eq=False)
class Chat:
    """A chat as tokens, without the special tokens that the tokenizer puts around a text.

    Attributes:
        ids: the tokens.
        answered: True for tokens after which a window may end: those of the assistants' turns, or
            all tokens where nothing tells the turns apart.
        characters: number of characters of the text.
    """

    ids: Int[Tensor, " n"]
    answered: Bool[Tensor, " n"]
    characters: int = 0


class Packed(NamedTuple):
    """Windows of chats, and how many of them end in a turn that is not the assistant's."""

    windows: Int[Tensor, "n length"]
    cut: int


def packed(chats: Sequence[Chat], seq_len: int) -> Packed:
    """Pack chats into windows without padding.

    A window begins with a chat and takes the next ones that fit whole. Its last chat is the
    shortest of all that are left and fill the window, with the cut in an assistant's turn. If
    there is none, the window gives up to `_RETURNED` chats back and tries again, and else cuts the
    next chat. The rest of this chat is left out; if it is longer than a window, the next window
    begins with the rest.
    """
    pool, windows, cut = _Pool(chats), list[Tensor](), 0
    rest: Chat | None = None
    while pool.left or rest is not None:
        # The rest of a long chat → whole chats in their order → the chat that is cut
        taken, room = [] if rest is None else [rest], seq_len
        rest = None
        room -= sum(len(chat.ids) for chat in taken)
        while room > 0 and pool.left and len(pool.first.ids) <= room:
            taken.append(pool.take(pool.first))
            room -= len(taken[-1].ids)
        if room > 0:
            last, count = pool.shortest(room), 0
            while last is None and count < min(_RETURNED, len(taken) - 1):
                count += 1
                last = pool.shortest(room + sum(map(_length, taken[-count:])))
            if last is None and not pool.left:
                break
            for _ in range(0 if last is None else count):
                room += len(taken[-1].ids)
                pool.give_back(taken.pop())
            taken.append(pool.take(last or pool.first))
            room -= len(taken[-1].ids)
        if room < 0:
            length = len(taken[-1].ids) + room
            cut += not taken[-1].answered[length - 1]
            if len(taken[-1].ids) > seq_len:
                rest = _after(taken[-1], length)
        windows.append(torch.cat([chat.ids for chat in taken])[:seq_len])
    ids = torch.stack(windows) if windows else torch.empty(0, seq_len, dtype=torch.int64)
    return Packed(ids, cut)


class _Pool:
    """The chats that no window has yet, in their order and by their length."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self.left = dict.fromkeys(chats)
        self._by_length = sorted(chats, key=_length)

    @property
    def first(self) -> Chat:
        """The first chat."""
        return next(iter(self.left))

    def take(self, chat: Chat) -> Chat:
        """Return a chat, which is left no more."""
        del self.left[chat]
        place = bisect_left(self._by_length, _length(chat), key=_length)
        while self._by_length[place] is not chat:
            place += 1
        del self._by_length[place]
        return chat

    def give_back(self, chat: Chat) -> None:
        """Put a chat after all others."""
        self.left[chat] = None
        insort(self._by_length, chat, key=_length)

    def shortest(self, room: int) -> Chat | None:
        """Return the shortest chat that fills a room, with the cut in an assistant's turn."""
        first = bisect_left(self._by_length, room, key=_length)
        for chat in self._by_length[first : first + _TRIED]:
            if len(chat.ids) == room or chat.answered[room - 1]:
                return chat
        return None


def _length(chat: Chat) -> int:
    return len(chat.ids)


def _after(chat: Chat, length: int) -> Chat | None:
    """Return a chat after some tokens; None if it ends there."""
    return Chat(chat.ids[length:], chat.answered[length:]) if len(chat.ids) > length else None
