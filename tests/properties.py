"""Properties of drawn cases: a few in every run, and many where they are asked for."""

import os

import pytest
from hypothesis import given, settings

FEW, EXAMPLES = 30, int(os.environ.get("COEC_EXAMPLES", "300"))
"""Cases in every run, and where many are asked for (`make slow`); more with COEC_EXAMPLES=5000
(docs/lab/LOG.md)."""


def holds(one_in, *strategies):
    """A property of drawn cases: of one in so many of FEW, and of EXAMPLES under the marker."""

    def decorate(check):
        @pytest.mark.parametrize("cases", [FEW, pytest.param(EXAMPLES, marks=pytest.mark.many)])
        def test(cases):
            drawn = settings(max_examples=cases // one_in, deadline=None, derandomize=True)
            drawn(given(*strategies)(check))()

        return test

    return decorate
