"""Counts that plans are made of, against the operators that torch runs."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import coec
import problems
from coec.linalg import conjugate as conjugate_module
from coec.planning import solves
from coec.planning.operations import Consumer
from coec.settings import CoecOptions

pytestmark = pytest.mark.unchecked  # whole solves

VIEWS = {
    "view", "slice", "select", "transpose", "alias", "detach", "expand", "t", "as_strided",
    "unsqueeze", "squeeze", "permute", "split", "_unsafe_view", "diagonal",
}  # fmt: skip
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2)}


class Tally(TorchDispatchMode):
    """Calls, operations of products and decompositions, and bytes of everything else."""

    def __init__(self):
        super().__init__()
        self.found = dict.fromkeys(("call", "product", "svd", "elementwise"), 0.0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        self.found["call"] += 1
        if name in PRODUCTS:
            A, B = (args[n] for n in PRODUCTS[name])
            self.found["product"] += 2.0 * A.shape[0] * A.shape[1] * B.shape[1]
        elif name == "_linalg_svd":
            b, m = sorted(args[0].shape)
            self.found["svd"] += 6 * m * b**2 + 20 / 3 * b**3
        elif name not in VIEWS and not any(w in name for w in ("eigh", "cholesky", "solve")):
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.found["elementwise"] += sum(x.numel() * x.element_size() for x in tensors)
        return out


def planned(one, steps, rounds, trials, inner, aligned):
    course = solves.SolverSteps(rounds, steps, steps, steps, trials, inner, aligned)
    found = {}
    for work in solves.coec(one, course, "float64", "cpu", CoecOptions().record()):
        found[work.kernel] = found.get(work.kernel, 0.0) + work.times * work.amount
    return found


@pytest.mark.parametrize(
    ("one", "aligned"),
    [(Consumer("mlp", 96, 288, 202), False), (Consumer("attention", 128, 128, 96), True)],
    ids=["mlp", "attention"],
)
def test_a_step_takes_the_work_in_the_table(one, aligned, monkeypatch):
    """Products and decompositions to 5 %; elementwise work and calls, which vary, to 35 %."""
    seen = {"trials": 0, "inner": 0}

    def counted(name, what):
        inner = getattr(conjugate_module, name)

        def run(*args):
            seen[what] += 1
            return inner(*args)

        monkeypatch.setattr(conjugate_module, name, run)

    counted("retract_cholesky", "trials")
    real = conjugate_module._tangent

    def tangent(divide, *args):
        def count(X):
            seen["inner"] += 1
            return divide(X)

        return real(count, *args)

    monkeypatch.setattr(conjugate_module, "_tangent", tangent)
    W, gram = problems.weight(one.m, one.d), problems.gram("power law", one.d, tokens=4 * one.d)
    value = problems.weight(one.k, 40) if aligned else None
    counts, notes = {}, {}
    for steps in (2, 6):
        seen.update(trials=0, inner=0)
        with Tally() as tally:
            result = coec.compensate(
                W, gram, problems.kept(one.d, one.k), value_weight=value, rounds=1,
                iterations=steps, precision=0.0,
            )  # fmt: skip
        assert result.diagnostics["right_iterations"] == [steps]
        counts[steps], notes[steps] = tally.found, dict(seen)
    trials, inner = ((notes[6][what] - notes[2][what]) / 4 for what in ("trials", "inner"))
    short, long = (planned(one, steps, 1, trials, inner, aligned) for steps in (2, 6))
    # What a whole solve takes besides is in the other test: here the difference of two lengths.
    for kernel, tolerance in {
        "product": 0.05,
        "svd": 0.05,
        "elementwise": 0.35,
        "call": 0.35,
    }.items():
        found = counts[6][kernel] - counts[2][kernel]
        assert long[kernel] - short[kernel] == pytest.approx(found, rel=tolerance), kernel


def test_parts_are_of_their_dtypes_and_devices():
    one = Consumer("mlp", 8, 20, 14)
    options = CoecOptions().record()
    on_cpu, on_gpu = (
        {work.kernel for work in solves.coec(one, solves.MLP, "float32", device, options)}
        for device in ("cpu", "cuda")
    )
    assert "svd" in on_cpu
    assert "svd" not in on_gpu
    work = solves.coec(one, solves.MLP, "float32", "cpu", options)
    assert {w.dtype for w in work} == {"float32", "float64", ""}
    assert {w.dtype for w in work if w.kernel == "eigh"} == {"float64"}
    assert solves.coec(one, solves.MLP, "float32", "cpu", {**options, "alpha": 0}) == []


def test_fewer_iterations_and_rounds_are_less_work():
    one, options = Consumer("mlp", 8, 20, 14), CoecOptions().record()

    def total(**own):
        work = solves.coec(one, solves.MLP, "float64", "cpu", {**options, **own})
        return math.fsum(w.times * w.amount for w in work if w.kernel != "elementwise")

    assert total(rounds=0) < total(rounds=1) < total(rounds=50)
    assert total(iterations=1) < total(iterations=200)
    assert total(rotation="left") < total()
    assert total(solver="gradient") != total(solver="joint")
