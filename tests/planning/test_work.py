"""Formulas that plans are made of."""

import math

import pytest
import torch

from coec.planning import ComputeConfig, phases
from coec.settings import CoecOptions

MLP = phases.SiteSize(96, 288, 202)
ATTENTION = phases.SiteSize(128, 128, 96, attention=True)


def compute_on(device, solve=torch.float64):
    return ComputeConfig(device, torch.float32, torch.float32, torch.float32, solve)


def operations(steps):
    return math.fsum(step.operations for step in steps)


def compensated(method, site=MLP, device="cpu", solve=torch.float64, **own):
    options = {**CoecOptions().record(), **own}
    return phases.compensation(method, site, compute_on(device, solve), options)


def test_operations_of_products_and_eigenpairs():
    assert phases.product(2, 3, 4, 5.0).operations == 5 * 48
    assert phases.eigenpairs(3).operations == pytest.approx(126)


def test_a_closed_form_is_counted_by_hand():
    m, d, k = 96, 288, 202
    expected = 2 * m * d**2 + 6 * m * k**2 + k**3
    assert operations(compensated("ridge-to-slice")) == pytest.approx(expected)
    assert compensated("none") == []
    chosen = expected + 4 * m * k**2 + 4 * k**3 + phases.eigenpairs(k).operations
    assert operations(compensated("ridge-to-slice", ridge="auto")) == pytest.approx(chosen)


def test_work_is_of_its_dtypes_and_devices():
    steps = {device: compensated("coec", MLP, device, torch.float32) for device in ("cpu", "cuda")}
    assert {w.dtype for w in steps["cpu"]} == {"float32", "float64", ""}
    # On a GPU polar factors take the place of singular value decompositions.
    on_cpu, on_gpu = (
        sum(w.operations for w in found if w.resource == "eigen") for found in steps.values()
    )
    assert on_cpu > 2 * on_gpu


def test_fewer_iterations_and_rounds_are_less_work():
    def count(**own):
        return operations(compensated("coec", **own))

    assert count(rounds=0) < count(rounds=1) < count(rounds=50)
    assert count(iterations=1) < count(iterations=200)
    assert count(rotation="left") < count() < count(rotation="better")
    assert count(solver="joint") < count(solver="gradient")


def test_an_elimination_grows_with_what_goes():
    few, many = (phases.SiteSize(96, 288, kept) for kept in (250, 100))
    assert operations(phases.elimination(few, 288)) < operations(phases.elimination(many, 288))
    assert operations(phases.elimination(ATTENTION, 4)) > 2 * 128**3


def test_closed_forms_are_cheaper_than_descents():
    ridge, rcpu, coec = (
        operations(compensated(name)) for name in ("least-squares", "rcpu", "coec")
    )
    assert ridge < rcpu < coec
