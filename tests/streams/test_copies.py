"""Hidden states copied beside the work of a GPU, which a CPU stands in for here.

What is put on a stream is done only when something waits for it, or on one stream at once: what is
read too early is not there yet, and what is freed too early is another's by then.
"""

from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from coec.devices import AHEAD
from coec.streams.layers import Copies, Layers

BATCHES = 12


class Stream:
    """A queue of work."""

    def __init__(self, device=None):
        self.work = deque()
        self.done, self.hasty = 0, False

    def put(self, task):
        self.work.append(task)
        if self.hasty:
            self.synchronize()

    def run(self, count):
        while self.done < count:
            task = self.work.popleft()
            self.done += 1
            task()

    def record_event(self):
        count = self.done + len(self.work)
        return SimpleNamespace(synchronize=lambda: self.run(count))

    def wait_event(self, event):
        self.put(event.synchronize)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.run(self.done + len(self.work))


class State:
    """A number on the host, or on the device when the work for it is done.

    When nobody holds it any more, its memory is given to the next tensor of its own stream, as soon
    as the streams that it is recorded on have done what they had to do by then.
    """

    shape, dtype, on_device, most = (1,), None, 0, 0
    freed: ClassVar[list] = []

    def __init__(self, gpu, number=None, *, there=True):
        self.gpu, self.memory = gpu, {"number": number}
        self.stream, self.recorded = gpu.current if there else None, []
        if there:
            self.take_again(self.stream)
            State.on_device += 1
            State.most = max(State.most, State.on_device)

    def __del__(self):
        if self.stream is not None:
            ends = [(stream, stream.done + len(stream.work)) for stream in self.recorded]
            State.freed.append((self.stream, ends, self.memory))

    @classmethod
    def take_again(cls, stream):
        kept, cls.freed = cls.freed, []
        for owner, ends, memory in kept:
            if owner is stream and all(other.done >= end for other, end in ends):
                cls.on_device -= 1
                stream.put(lambda memory=memory: memory.update(number="another's"))
            else:
                cls.freed.append((owner, ends, memory))

    @property
    def number(self):
        return self.memory["number"]

    def to(self, device, non_blocking):
        return self.gpu.made(self)

    def copy_(self, source, non_blocking):
        self.gpu.put(source, self)

    def record_stream(self, stream):
        self.recorded.append(stream)


@pytest.fixture
def gpu(monkeypatch):
    computing = Stream()
    gpu = SimpleNamespace(computing=computing, current=computing)

    def put(source, out, function=lambda number: number):
        read, written = source.memory, out.memory
        gpu.current.put(lambda: written.update(number=function(read["number"])))

    def made(source, function=lambda number: number):
        out = State(gpu)
        put(source, out, function)
        return out

    @contextmanager
    def on(stream):
        gpu.current, before = stream, gpu.current
        yield
        gpu.current = before

    gpu.put, gpu.made = put, made
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: State(gpu, there=False))
    State.on_device, State.most, State.freed = 0, 0, []
    return gpu


@pytest.fixture(params=["none", "computing", "up", "down"])
def layers(request, gpu, monkeypatch):
    layers = Layers.__new__(Layers)
    layers._device, layers._home = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(
        Layers, "call", lambda self, module, index, state, number: gpu.made(state, lambda n: 2 * n)
    )
    streams = {"computing": gpu.computing, "up": layers._copies._up, "down": layers._copies._down}
    if request.param in streams:
        streams[request.param].hasty = True
    return layers


def test_every_batch_comes_back_when_the_pass_has_ended(gpu, layers):
    states = {number: State(gpu, number, there=False) for number in range(BATCHES)}
    behind = layers.through(None, 0, states)
    assert {number: state.number for number, state in behind.items()} == {
        number: 2 * number for number in range(BATCHES)
    }
    assert not states


@pytest.mark.parametrize("part", [1, 4, 96])
@pytest.mark.parametrize("sources", [0, 1, 2])
def test_few_batches_are_on_the_device_at_once(sources, part, gpu, layers):
    """However far ahead of the device the host could run: in a pass, and where parts of the windows
    are measured, from one or two sets of states.
    """
    numbers = range(8 * BATCHES)
    for first in range(0, len(numbers), part):
        some = numbers[first : first + part]
        states = [{n: State(gpu, n, there=False) for n in some} for _ in range(max(sources, 1))]
        if not sources:
            layers.through(None, 0, *states)
            continue
        for batch in zip(*(layers.arriving(s.values()) for s in states), strict=True):
            for state in batch:
                gpu.made(state)
    # Whose work may be going on, the next, one that Python has not let go, and what came of each
    assert State.most <= 2 * (AHEAD + 3) - (sources < 2)


def test_states_that_nobody_waits_for_are_not_there_yet(gpu):
    """The stand-in is as late as may be."""
    copies = Copies(torch.device("cuda"))
    [state] = copies.to_device([State(gpu, 3, there=False)])
    there = copies.to_host(state)
    assert state.number is None
    assert there.number is None
    copies.end()
    assert there.number == 3
