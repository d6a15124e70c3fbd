"""What a run may take: passes through blocks, waits for a device, sets of states, sums.

docs/lab/PERFORMANCE.md has these numbers.
"""

from collections import Counter
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import coec
import tiny_models as tm
from coec import devices, pruning, solve
from coec.models.dense import Dense
from coec.streams.layers import Layers
from coec.types import GramSum

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32, "forward_dtype": "float64"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A file of 96 windows, of which two are run at once."""
    monkeypatch.setattr(devices, "TOKENS_PER_BATCH", 64)
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 64, 96 * 32))
    return path


@pytest.mark.parametrize(
    ("settings", "attention", "mlp"),
    [
        ({"preset": "paper"}, 1, 1),
        # Dense, dense weights on the pruned model's inputs, pruned
        ({"preset": "fast"}, 3, 3),
        # A sixth of the windows validates: the pass that measures, and four that train, leave it
        # out, and it alone runs at the start and after every pass. What is trained runs again.
        ({"preset": "balanced", "holdout": 4 / 24},
         4 + (1 + 4) * 20 / 24 - 1 + 5 * 4 / 24, 3 + (1 + 4) * 20 / 24 - 1 + 5 * 4 / 24),
    ],
)  # fmt: skip
def test_windows_go_through_every_block_so_often(
    settings, attention, mlp, dense, tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(solve, "PREDICTION_PASSES", 0)
    passed = Counter()

    def count(module, args, out):
        for kind in ("Attention", "MLP"):  # the pruned model's type may be another than llama
            if type(module).__name__.endswith(kind):
                passed[kind] += len(out[0] if isinstance(out, tuple) else out)

    hook = register_module_forward_hook(count)
    try:
        coec.prune(dense, tmp_path / "out", calibration=tokens, **SETTINGS | settings)
    finally:
        hook.remove()
    once = SETTINGS["samples"] * Dense.open(dense).shape.layers
    if settings["preset"] == "balanced":  # the last block's predictions at the start, twice
        passed = {kind: count - 2 * 4 for kind, count in passed.items()}
    got = passed["Attention"] / once, passed["MLP"] / once
    assert got == pytest.approx((attention, mlp))


class Waits(TorchDispatchMode):
    """Counts reads of single numbers from tensors, for which a device has to end its work."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator in (
            torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default,
            torch.ops.aten.nonzero.default,
        )  # fmt: skip
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [{"preset": "fast"}, {"preset": "balanced", "holdout": 0.25}])
def test_a_block_waits_for_its_device_no_more_often_for_more_windows(
    settings, dense, many, tmp_path, monkeypatch
):
    """Of the first of two blocks."""
    plain, waits = pruning.solve, []

    def counted(*given):
        with Waits() as counter:
            result = plain(*given)
        waits.append(counter.count)
        return result

    monkeypatch.setattr(pruning, "solve", counted)
    for samples in (24, 96):
        coec.prune(dense, tmp_path / f"{samples}", calibration=many,
                   **SETTINGS | settings | {"samples": samples})  # fmt: skip
    few, _, more, _ = waits
    # Some are of windows in batches of another size, and of Grams of so many tokens; a batch of two
    # windows has none, and there are 36 more of them.
    assert more - few < 16


@pytest.mark.parametrize("settings", [
    {"preset": "fast"}, {"preset": "balanced", "holdout": 0.25},
    {"preset": "balanced", "propagate": False},
])  # fmt: skip
def test_three_sets_of_hidden_states_are_in_memory(settings, dense, many, tmp_path, monkeypatch):
    """The plan counts as many."""
    call, states, most = Layers.call, WeakSet(), 0

    def counted(self, *args):
        nonlocal most
        after = call(self, *args)
        states.add(after)
        most = max(most, len(states))
        return after

    monkeypatch.setattr(Layers, "call", counted)
    coec.prune(dense, tmp_path / "out", calibration=many, **SETTINGS | settings | {"samples": 96})
    batches = 48
    assert 2 * batches < most <= 3 * batches + 2


@pytest.mark.parametrize(
    ("settings", "sums"),
    [({"preset": "paper"}, 4), ({"preset": "balanced"}, 2),
     ({"preset": "balanced", "propagate": False}, 4)],
)  # fmt: skip
def test_the_sums_of_a_part_are_gone_before_the_next(
    settings, sums, dense, tokens, tmp_path, monkeypatch
):
    """There is the total as well: of one site if errors propagate, else of both."""
    init, alive, most = GramSum.__init__, WeakSet(), 0

    def counted(self, d, *args):
        nonlocal most
        init(self, d, *args)
        if d:  # and no batch
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr(GramSum, "__init__", counted)
    reconstruct = {} if settings["preset"] == "paper" else {"reconstruct": 1}
    coec.prune(dense, tmp_path / "out", calibration=tokens, **SETTINGS | settings | reconstruct)
    assert most == sums
