"""Hidden states copied between the host and a GPU while it computes."""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from coec.sizes import AHEAD


class Copies:
    """Copies on two streams of a GPU, one for each direction, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._work = deque[torch.cuda.Event]()

    def to_device(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield tensors on the device; the copy of each begins before the one ahead is computed."""
        ahead: tuple[Tensor, torch.cuda.Event] | None = None
        for state in states:
            while len(self._work) > AHEAD:
                self._work.popleft().synchronize()
            with torch.cuda.stream(self._up):
                begun = state.to(self._device, non_blocking=True)
            following = begun, self._up.record_event()
            if ahead is not None:
                yield self._arrived(*ahead)
                self._note_work()
            ahead = following
        if ahead is not None:
            yield self._arrived(*ahead)
            self._note_work()

    def _arrived(self, state: Tensor, copied: torch.cuda.Event) -> Tensor:
        """Let the work that follows wait for a copy, whose memory is kept until that work ends."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        state.record_stream(computing)
        return state

    def _note_work(self) -> None:
        """Note the end of the work so far, and of the copies of what came of it."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        self._work.append(self._down.record_event())

    def to_host(self, state: Tensor) -> Tensor:
        """Return a tensor that is on the host by the `end`, in pages that a GPU copies directly."""
        there = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            there.copy_(state, non_blocking=True)
        state.record_stream(self._down)
        return there

    def end(self) -> None:
        """Wait for all copies to the host."""
        self._down.synchronize()
