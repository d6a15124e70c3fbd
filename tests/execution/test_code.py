"""Functions that do the same have one digest in every process; others, and unknown ones, do not."""

import functools
import os
import subprocess
import sys
import threading

import torch

from coec.execution.code import code_digest


def scores(weight, gram, *, power=2):
    return weight.abs().pow(power).sum(0) if str(power) in {"1", "2", "3"} else weight


def scaled(factor):
    def score(weight, gram):
        return factor * weight

    return score


class Scored:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, weight, gram):
        return self.factor * weight

    def score(self, weight, gram):
        return self.factor + weight


def listed():
    """Functions, no two of which do the same."""
    return [
        scores, scaled(1), scaled(2), scaled(torch.ones(3)), scaled(torch.zeros(3)), scaled(scores),
        functools.partial(scores, power=1), functools.partial(scores, power=3),
        Scored(1), Scored(2), Scored(1).score, Scored(2).score,
        lambda weight, gram: weight, lambda weight, gram: -weight, torch.abs,
    ]  # fmt: skip


def test_different_functions_have_different_digests():
    found = [code_digest(function) for function in listed()]
    assert len(set(found)) == len(found)


def test_the_same_functions_have_the_same_digests_in_every_process():
    program = "import test_code; print([test_code.code_digest(f) for f in test_code.listed()])"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    assert answer.stdout.strip() == str([code_digest(function) for function in listed()])


def test_what_cannot_be_known_is_equal_to_nothing():
    held = scaled(threading.Lock())
    assert code_digest(held) != code_digest(held)
