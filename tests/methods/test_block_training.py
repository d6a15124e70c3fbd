"""Training of a block as a whole, on small linear blocks whose answers are known."""

import math

import pytest
import torch

from coec.errors import NumericalError
from coec.methods.block_training import (
    Example,
    Training,
    relative_error,
    train_block,
)

pytestmark = pytest.mark.unchecked  # many steps
CPU = torch.device("cpu")
H, LENGTH = 6, 64
LONG = {"passes": 80, "rate": 0.1}
"""As long as it takes to arrive."""


def linear(theta, states):
    return states @ theta["W"].T


def two_layers(theta, states):
    return states @ theta["A"].T @ theta["B"].T


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examples(count=48, *, length=LENGTH, seed=0, W=None, noise=0.0):
    """Windows whose targets are those of one linear map."""
    W = random(H, H, seed=99) if W is None else W
    inputs = random(count, length, H, seed=seed)
    targets = inputs @ W.T + noise * random(count, length, H, seed=seed + 1)
    return [Example(x, t, torch.ones(length)) for x, t in zip(inputs, targets, strict=True)]


def trained(windows, validation=(), block=linear, start=None, objective=None, **more):
    start = {"W": random(H, H, seed=3)} if start is None else start
    written = dict.fromkeys(start, torch.float32)
    how = {"passes": 4, "rate": 0.1, "seed": 0, "written": written, **more}
    objective = objective or relative_error(windows, CPU)
    return train_block(block, start, windows, validation, Training(objective, **how))


def test_a_linear_map_is_found():
    found = trained(examples(), examples(6, seed=7), **LONG)
    assert found.errors[0] > 1
    assert found.errors[found.taken] == min(found.errors) < 1e-3 * found.errors[0]
    assert found.taken > 10
    torch.testing.assert_close(found.theta["W"], random(H, H, seed=99), rtol=0, atol=0.05)
    assert len(found.fitted) == LONG["passes"] == len(found.errors) - 1


def test_the_objective_is_the_weighed_error_of_the_targets():
    outputs, targets = random(3, 4, H, seed=5), random(3, 4, H, seed=1)
    weights = random(3, 4, seed=2).abs()
    objective = relative_error(list(map(Example, outputs, targets, weights)), CPU)
    energy = (weights * targets.square().sum(-1)).sum() / 12
    expected = (weights * (targets - outputs).square().sum(-1)).sum() / energy
    assert float(objective(outputs, targets, weights)) == pytest.approx(float(expected), rel=1e-6)
    narrow = objective(outputs.bfloat16(), targets.bfloat16(), weights)
    assert narrow.dtype == torch.float32
    assert float(narrow) == pytest.approx(float(expected), rel=0.02)


def test_the_start_is_returned_where_every_pass_harms_validation():
    """Also with a state that is not finite in the end."""
    windows, validation = examples(), examples(6, seed=7)
    start = {"W": random(H, H, seed=99) + 0.01}
    for rate in (10.0, 1e30):
        found = trained(windows, validation, start=start, rate=rate)
        assert found.taken == 0
        assert torch.equal(found.theta["W"], start["W"])
        assert not any(error < found.errors[0] for error in found.errors)


def test_validation_windows_choose_the_pass():
    """The best one, though training goes on to lower errors on its own windows."""
    few = examples(2, length=4, noise=3.0)
    start = {"W": random(H, H, seed=99) + 0.5 * random(H, H)}
    found = trained(few, examples(6, seed=7), start=start, passes=30)
    assert 0 < found.taken < 30
    assert found.fitted[-1] < found.fitted[0]
    assert found.errors[found.taken] == min(found.errors) < found.errors[-1]
    again = trained(few, examples(6, seed=7), start=found.theta, passes=1)
    assert again.errors[0] == found.errors[found.taken]


def test_a_seed_decides_the_order_of_the_windows_and_so_every_bit():
    one, same, other = (trained(examples(noise=0.5), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.theta["W"], same.theta["W"])
    assert one.record() == same.record()
    assert not torch.equal(one.theta["W"], other.theta["W"])


@pytest.mark.parametrize("c", [1 / 8, 64.0])
def test_the_rate_is_relative_to_the_size_of_a_matrix(c):
    """A block is the same whose one matrix is larger and whose other is smaller."""
    A, B = random(H, H, seed=3), random(H, H, seed=4)
    windows = examples()
    one = trained(windows, block=two_layers, start={"A": A, "B": B})
    other = trained(windows, block=two_layers, start={"A": c * A, "B": B / c})
    assert one.errors == pytest.approx(other.errors, rel=1e-4)
    assert one.fitted == pytest.approx(other.fitted, rel=1e-4)


def test_weights_of_tokens_count():
    """Half of every window asks for one map, half for another: the weights say which is found."""
    inputs = random(48, LENGTH, H)
    first, second = random(H, H, seed=8), random(H, H, seed=9)
    targets = torch.cat([inputs[:, ::2] @ first.T, inputs[:, 1::2] @ second.T], dim=1)
    inputs = torch.cat([inputs[:, ::2], inputs[:, 1::2]], dim=1)
    weights = torch.full((LENGTH,), 1.9)
    weights[LENGTH // 2 :] = 0.1
    windows = [Example(x, t, weights) for x, t in zip(inputs, targets, strict=True)]
    found = trained(windows, **LONG).theta["W"]
    torch.testing.assert_close(found, 0.95 * first + 0.05 * second, rtol=0, atol=0.05)


@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_a_start_that_is_not_finite_is_said(where):
    windows = examples()
    getattr(windows[1], where)[0, 0] = math.nan
    with pytest.raises(NumericalError, match=r"^the outputs of the block at the start are not fin"):
        trained(windows)


def test_what_is_measured_is_what_will_be_written():
    """A change too small for the output's digits is none."""
    start = {"W": random(H, H, seed=3).bfloat16().float()}
    small = {"start": start, "rate": 1e-6, "passes": 3}
    narrow = trained(examples(), written={"W": torch.bfloat16}, **small)
    assert narrow.taken == 0
    assert len(set(narrow.errors)) == 1
    assert narrow.fitted == pytest.approx(narrow.errors[1:], rel=1e-4)
    assert trained(examples(), **small).taken
    last = trained(examples(), written={"W": torch.bfloat16}, passes=8)
    rounded = last.theta["W"].bfloat16().float()
    assert not torch.equal(rounded, last.theta["W"])
    objective = relative_error(examples(), CPU)
    error = sum(
        float(objective(linear({"W": rounded}, w.inputs), w.targets, w.weights)) for w in examples()
    )
    assert last.errors[last.taken] == pytest.approx(error / (48 * LENGTH), rel=1e-5)


@pytest.mark.parametrize("ends", [False, True])
def test_a_training_may_end_with_a_pass_that_makes_it_worse_than_the_start(ends):
    """The start is exact on the validation windows; those trained on are of another map."""
    start = {"W": random(H, H, seed=99)}
    windows, validation = examples(W=random(H, H, seed=7)), examples(4, seed=5, W=start["W"])
    found = trained(windows, validation, start=start, passes=9, ends_when_worse=ends)
    assert (found.taken, len(found.errors)) == (0, 2 if ends else 10)
    torch.testing.assert_close(found.theta, start)
