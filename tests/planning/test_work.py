"""Formulas that plans are made of."""

import math

import pytest
import torch

from coec.planning import work
from coec.planning.compute import ComputeConfig
from coec.settings import CoecOptions

MLP = work.SiteSize(96, 288, 202, 288)
ATTENTION = work.SiteSize(128, 128, 96, 4, attention=True)


def compute_on(device, solve=torch.float64):
    return ComputeConfig(device, torch.float32, torch.float32, torch.float32, solve)


def operations(steps):
    return math.fsum(step.operations for step in steps)


def test_counts_of_single_operators():
    assert work.product(2, 3, 4, 5.0).operations == 5 * 48
    assert work.eigenpairs(3).operations == pytest.approx(126)
    assert operations(work.svd(2, 3, "cpu", "float64")) == pytest.approx(72 + 160 / 3)
    polar = operations(work.polar(2, 2, "cuda", "float64"))
    assert polar == pytest.approx(6 * (6 * 8 + 8) + 2 * 8)
    on_gpu = operations(work.svd(2, 2, "cuda", "float64"))
    assert on_gpu == pytest.approx(polar + 14 / 3 * 8)


def test_statistics_are_products_with_themselves():
    assert operations(work.statistics(10, 640.0, 4.0, 3)) == pytest.approx(3 * 2 * 100 * 640)


def test_work_is_of_its_dtypes_and_devices():
    options = CoecOptions().record()
    steps = {
        device: work.coec(MLP, work.usual_descent(MLP), compute_on(device, torch.float32), options)
        for device in ("cpu", "cuda")
    }
    assert {w.dtype for w in steps["cpu"]} == {"float32", "float64", ""}
    # On a GPU polar factors take the place of singular value decompositions.
    on_cpu, on_gpu = (
        sum(w.operations for w in found if w.resource == "eigen") for found in steps.values()
    )
    assert on_cpu > 2 * on_gpu


def test_fewer_iterations_and_rounds_are_less_work():
    options = CoecOptions().record()

    def count(site=MLP, effort="typical", **own):
        descent = work.usual_descent(site, effort)
        return operations(work.coec(site, descent, compute_on("cpu"), {**options, **own}))

    assert count(rounds=0) < count(rounds=1) < count(rounds=50)
    assert count(iterations=1) < count(iterations=200)
    assert count(rotation="left") < count() < count(rotation="better")
    assert count(solver="joint") < count(solver="gradient")
    assert count(effort="least") < count() < count(effort="most")
    assert count(ATTENTION, effort="least") < count(ATTENTION)


def test_an_elimination_grows_with_what_goes():
    few, many = (work.SiteSize(96, 288, kept, 288) for kept in (250, 100))
    assert operations(work.elimination(few)) < operations(work.elimination(many))
    groups = work.SiteSize(128, 128, 96, 4)
    assert operations(work.elimination(groups)) > 2 * 128**3


def test_closed_forms_are_cheaper_than_descents():
    descent = work.coec(MLP, work.usual_descent(MLP), compute_on("cpu"), CoecOptions().record())
    assert operations(work.ridge(MLP)) < operations(work.rcpu(MLP, "cpu")) < operations(descent)
