"""Means over predicted tokens, from known probabilities."""

import math

import pytest
import torch

from coec.streaming.head import Prediction

P = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.2, 0.6]]).log()
Q = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
WANTED = torch.tensor([0, 1, 0])


@pytest.mark.parametrize("cuts", [[3], [1, 2], [1, 1, 1]])
def test_means_are_over_tokens_however_they_come(cuts):
    sums = Prediction()
    for p, wanted, q in zip(P.split(cuts), WANTED.split(cuts), Q.split(cuts), strict=True):
        sums.update(p, wanted, q)
    assert sums.cross_entropy == pytest.approx(-math.log(0.5 * 0.75 * 0.2) / 3)
    assert sums.baseline_cross_entropy == pytest.approx(-math.log(0.5 * 0.25 * 0.1) / 3)
    assert sums.agreement == pytest.approx(2 / 3)
    middle = 0.5 * math.log(4) + 0.25 * math.log(1 / 3) + 0.25 * math.log(2)
    last = 0.2 * math.log(0.5) + 0.8 * math.log(4 / 3)
    assert sums.kl == pytest.approx((middle + last) / 3)


def test_without_a_baseline_there_is_no_distance():
    sums = Prediction()
    sums.update(P[None], WANTED[None])
    assert sums.cross_entropy == pytest.approx(-math.log(0.5 * 0.75 * 0.2) / 3)
    assert sums.kl == sums.agreement == 0


def test_sums_of_parts_are_those_of_all():
    whole, total = Prediction(), Prediction()
    for p, wanted, q in zip(P.split(1), WANTED.split(1), Q.split(1), strict=True):
        part = Prediction()
        part.update(p, wanted, q)
        whole.update(p, wanted, q)
        total.add(part)
    assert vars(total) == vars(whole)
