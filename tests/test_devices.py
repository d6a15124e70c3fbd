"""Dtypes follow what a device does well; free memory is known, and freed memory handed back."""

import math
import sys

import pytest
import torch

import coec
from coec import devices
from coec.devices import (
    choose_solve_dtype,
    double_rate,
    hand_back,
    resident_bytes,
    summed_products,
)

CUDA = torch.device("cuda", 7)  # named, never used


@pytest.fixture(autouse=True)
def unmeasured():
    double_rate.cache_clear()
    yield
    double_rate.cache_clear()


def test_a_cpu_solves_in_float64_without_a_measurement(monkeypatch):
    monkeypatch.setattr(devices, "double_rate", None)
    assert choose_solve_dtype(torch.device("cpu")) == torch.float64


@pytest.mark.parametrize(
    ("rate", "chosen"),
    [(1.0, torch.float64), (0.5, torch.float64), (1 / 32, torch.float32), (1 / 64, torch.float32),
     (None, torch.float32)],
)  # fmt: skip
def test_a_gpu_follows_the_rate_of_float64_products(monkeypatch, rate, chosen):
    """Which is measured once; None stands for a device that has no such numbers."""
    measured = []

    def product_rate(device, dtype):
        measured.append(dtype)
        if dtype == torch.float64 and rate is None:
            raise TypeError("Cannot convert to float64")
        return rate if dtype == torch.float64 else 1.0

    monkeypatch.setattr(devices, "product_rate", product_rate)
    for _ in range(3):
        assert choose_solve_dtype(CUDA) == chosen
    assert measured == [torch.float64, torch.float32][: 1 if rate is None else 2]


@pytest.mark.parametrize(
    ("stored", "device", "summed", "chosen"),
    [("float16", "cuda", True, "bfloat16"), ("float16", "cuda", False, "float16"),
     ("bfloat16", "cuda", True, "bfloat16"), ("float16", "cpu", True, "float32")],
)  # fmt: skip
def test_sums_of_a_fit_are_not_in_float16_unless_that_is_asked_for(stored, device, summed, chosen):
    dtypes, device = devices.DTYPES, torch.device(device)
    got = devices.choose_forward_dtype(None, dtypes[stored], device, summed=summed)
    assert got == dtypes[chosen]
    assert devices.choose_forward_dtype("float16", dtypes[stored], device, summed=summed) == (
        torch.float16
    )


def test_a_rate_is_that_of_products(monkeypatch):
    monkeypatch.setattr(devices, "_CPU_ROWS", 64)
    assert 0 < double_rate(torch.device("cpu")) < 100


def test_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert devices._of_cgroup(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert devices._of_cgroup(tmp_path) is None
    old = tmp_path / "old/memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("900\n")
    (old / "memory.stat").write_text("total_inactive_file 50\n")
    assert devices._of_cgroup(tmp_path / "old") == 150
    assert devices._of_cgroup(tmp_path / "nothing") is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_freed_memory_between_pieces_that_stay_is_handed_back():
    if devices._malloc_trim() is None:
        pytest.skip("not glibc")
    pieces = [torch.ones(2**14) for _ in range(1024)]  # 64 KiB each, too small for a map
    pieces = pieces[::8]
    kept = resident_bytes()
    hand_back()
    assert kept - resident_bytes() > 0.8 * 2**26
    assert len(pieces) == 128


def test_a_run_hands_it_back_behind_every_block(dense, tokens, tmp_path, monkeypatch):
    """Behind the pass and the solve of each, and with two models behind the passes of both."""
    handed = []
    monkeypatch.setattr(devices, "_malloc_trim", lambda: handed.append)
    own = {"calibration": tokens, "samples": 4, "seq_len": 32}
    for reconstruct in (0, 1):
        handed.clear()
        out = tmp_path / str(reconstruct)
        coec.prune(dense, out, compensation="none", reconstruct=reconstruct, **own)
        assert len(handed) == 1 + 2 * 2  # once where the text was read


@pytest.fixture
def tensor_cores(monkeypatch):
    """Let this processor multiply narrow numbers into float32 as CUDA does; returns the calls."""
    calls = []

    def widened(A, B, *, out_dtype):
        assert A.dtype == B.dtype != out_dtype
        calls.append(A.dtype)
        return A.to(out_dtype) @ B.to(out_dtype)

    monkeypatch.setattr(devices, "widens", lambda device, dtype: dtype.itemsize == 2)
    monkeypatch.setattr(torch, "mm", widened)
    return calls


def rows(columns, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-6, 6, columns)
    return (spread * torch.randn(40, columns, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_multiplied_as_they_are(tensor_cores, dtype):
    X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(summed_products(X, X), X.float().T @ X.float())
    assert tensor_cores == [dtype]


def test_rows_of_float32_are_three_of_bfloat16_without_a_digit_lost(tensor_cores):
    A, X = rows(5, torch.float32, 0), rows(6, torch.bfloat16, 1)
    parts, rest = [], A
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1]
    assert torch.equal(sum(part.double() for part in parts), A.double())
    found, expected = summed_products(A, X), A.double().T @ X.double()
    assert tensor_cores == [torch.bfloat16] * 3
    size = A.abs().double().T @ X.abs().double()
    assert float(((found - expected).abs() / size).max()) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("a", "x", "out"),
    [("float32", "float16", "float32"), ("float64", "bfloat16", "float64"),
     ("float32", "float32", "float32")],
)  # fmt: skip
def test_other_rows_are_multiplied_in_the_wider_dtype(tensor_cores, a, x, out):
    A, X = rows(5, torch.float32, 0).to(getattr(torch, a)), torch.ones(40, 2).to(getattr(torch, x))
    found = summed_products(A, X)
    assert found.dtype == getattr(torch, out)
    assert torch.equal(found, A.T @ X.to(A.dtype))
    assert tensor_cores == []


def test_no_processor_widens_products():
    assert not devices.widens(torch.device("cpu"), torch.bfloat16)
    assert not devices.widens(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_one_entry_that_is_not_finite_is_found(dtype, value, shape):
    tensor = torch.ones(shape, dtype=dtype)
    tensor.view(-1)[-1] = value
    assert devices.is_finite(tensor) == math.isfinite(value)


def test_a_tensor_without_entries_is_finite():
    assert devices.is_finite(torch.empty(0, 3))
