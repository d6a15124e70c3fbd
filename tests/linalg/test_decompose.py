import time

import numpy as np
import pytest
import torch

import problems
from coec.errors import NumericalError
from coec.events import recording
from coec.linalg import decompose
from coec.linalg.decompose import eigh, svd
from outcomes import raising


def test_they_are_torchs_when_nothing_fails():
    A, G = problems.weight(5, 8), problems.gram("white", 6).xx
    with recording() as events:
        for got, expected in zip(svd(A), torch.linalg.svd(A, full_matrices=False)):
            assert torch.equal(got, expected)
        for got, expected in zip(eigh(G), torch.linalg.eigh(G)):
            assert torch.equal(got, expected)
    assert events == []


fail = raising(RuntimeError("the algorithm failed to converge\nmore"))


def test_when_torch_fails_numpy_answers_and_an_event_says_so(monkeypatch):
    A, G = problems.weight(5, 8), problems.gram("white", 6).xx
    monkeypatch.setattr(torch.linalg, "svd", fail)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with recording() as events:
        U, s, Vt = svd(A)
        mu, Q = eigh(G)
    torch.testing.assert_close((U * s) @ Vt, A)
    torch.testing.assert_close((Q * mu) @ Q.T, G)
    assert [event.rpartition("; ")[2] for event in events] == [
        "used numpy svd of the transpose instead",
        "used numpy eigh instead",
    ]


def hang(A):
    time.sleep(30)


@pytest.mark.parametrize(
    ("routine", "limit", "why"),
    [(hang, 0.05, "no answer in 0.05 s"), (fail, 5.0, "the algorithm failed to converge")],
)
def test_under_a_time_limit_a_routine_that_hangs_or_fails_is_left_behind(routine, limit, why):
    began = time.perf_counter()
    routines = [("bad", routine), ("good", lambda A: (A + 1,))]
    with recording() as events:
        (out,) = decompose._first_success(routines, torch.zeros(2), limit)
    assert time.perf_counter() - began < 10
    assert torch.equal(out, torch.ones(2))
    assert events == [f"bad failed ({why}); used good instead"]


def test_when_every_routine_fails_the_error_lists_them(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    monkeypatch.setattr(np.linalg, "eigh", fail)
    with pytest.raises(NumericalError, match=r"no decomposition of a \(4, 4\) matrix: eigh failed"):
        eigh(problems.gram("white", 4).xx)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(NumericalError, match="to decompose holds NaN or Inf"):
        svd(problems.weight(3, 4).index_fill(1, torch.tensor([2]), value))
