"""Windows packed from whole chats."""

import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples

from coec.text.packing import Chat, packed


def chats_of(*lengths):
    """Chats of a prompt and an answer, whose tokens name the chat."""
    return [
        Chat(torch.full((asked + answered,), number), torch.arange(asked + answered) >= asked)
        for number, (asked, answered) in enumerate(lengths)
    ]


def test_windows_hold_whole_chats_and_end_in_an_answer():
    chats = chats_of((2, 3), (2, 2), (1, 9), (3, 5), (2, 6))
    windows, cut = packed(chats, 8)
    assert windows.tolist() == [[0] * 5 + [1] * 3, [3] * 8, [4] * 8, [2] * 8]
    assert cut == 0


def test_a_chat_longer_than_a_window_goes_on_in_the_next():
    windows, cut = packed(chats_of((2, 18), (1, 3)), 8)
    assert (windows.tolist(), cut) == ([[0] * 8, [0] * 8, [0] * 4 + [1] * 4], 0)


def test_chats_that_fill_no_window_are_cut_and_counted():
    windows, cut = packed(chats_of((4, 1), (4, 1), (4, 1), (4, 1)), 8)
    assert (windows.tolist(), cut) == ([[0] * 5 + [1] * 3, [2] * 5 + [3] * 3], 2)


@settings(max_examples=50, deadline=None)
@given(lists(tuples(integers(1, 12), integers(1, 30)), max_size=30), integers(1, 20))
def test_packing_keeps_order_and_loses_no_beginning(lengths, seq_len):
    """Every window is runs of chats from their beginning, or begins with the rest of a long one."""
    chats = chats_of(*lengths)
    windows, cut = packed(chats, seq_len)
    assert windows.shape[1] == seq_len
    seen = dict.fromkeys(range(len(chats)), 0)
    for window in windows.tolist():
        for number in dict.fromkeys(window):
            taken = window.count(number)
            whole = seen[number] + taken == len(chats[number].ids)
            assert seen[number] == 0 or window[0] == number
            seen[number] += taken
            assert whole or window[-1] == number
            if not whole and not chats[number].answered[seen[number] - 1]:
                cut -= 1
    assert cut == 0
