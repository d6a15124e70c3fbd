"""COEC as the source writes it gives what the factored form gives."""

from dataclasses import replace

import pytest
import torch

import coec
from benchmarks.instances import synthetic
from literal import literal


@pytest.mark.parametrize(("m", "d"), [(8, 20), (12, 12)])
def test_the_literal_form_agrees_with_the_factored_one(m, d):
    instance = synthetic(m, d)
    gram = replace(instance.gram, tokens=10_000)  # with few of them it would be drawn back
    parts = (instance.weight, gram, instance.kept)
    weight, errors = literal(*parts)
    ours = coec.compensate(*parts, solver="gradient")
    assert len(errors) > 2
    assert ours.diagnostics["errors_per_round"][-1] == pytest.approx(errors[-1], rel=1e-8)
    torch.testing.assert_close(weight, ours.weight, rtol=1e-6, atol=1e-8)
