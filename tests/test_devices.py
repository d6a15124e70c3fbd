"""The dtype of the compensation follows what a device does well; devices that are elsewhere."""

import pytest
import torch

from coec import devices
from coec.devices import at_hand, choose_solve_dtype, double_rate

CUDA = torch.device("cuda", 7)  # named, never used


@pytest.fixture(autouse=True)
def unmeasured():
    double_rate.cache_clear()
    yield
    double_rate.cache_clear()


def test_a_cpu_solves_in_float64_without_a_measurement(monkeypatch):
    monkeypatch.setattr(devices, "double_rate", None)
    assert choose_solve_dtype("auto", torch.device("cpu")) == torch.float64


@pytest.mark.parametrize(
    ("rate", "chosen"),
    [(1.0, torch.float64), (0.5, torch.float64), (1 / 32, torch.float32), (1 / 64, torch.float32)],
)
def test_auto_follows_the_rate_of_float64_products(monkeypatch, rate, chosen):
    seconds = {torch.float64: 1.0, torch.float32: rate}
    monkeypatch.setattr(devices, "_product_seconds", lambda device, dtype: seconds[dtype])
    assert choose_solve_dtype("auto", CUDA) == chosen
    for asked in ("float64", "float32"):
        assert choose_solve_dtype(asked, CUDA) == getattr(torch, asked)


def test_a_device_without_float64_solves_in_float32(monkeypatch):
    def multiply(device, dtype):
        if dtype == torch.float64:
            raise TypeError("Cannot convert to float64")
        return 1.0

    monkeypatch.setattr(devices, "_product_seconds", multiply)
    assert choose_solve_dtype("auto", CUDA) == torch.float32


def test_the_rate_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(devices, "_product_seconds", lambda *given: measured.append(given) or 1.0)
    for _ in range(3):
        choose_solve_dtype("auto", CUDA)
    assert len(measured) == 2


def test_a_rate_is_that_of_products(monkeypatch):
    monkeypatch.setattr(devices, "PRODUCT", 64)
    assert 0 < double_rate(torch.device("cpu")) < 100


@pytest.mark.parametrize("there", [True, False])
def test_what_a_process_has_no_device_for_it_does_on_the_cpu(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert at_hand(CUDA) == (CUDA if there else torch.device("cpu"))
    assert at_hand(torch.device("cpu")) == torch.device("cpu")
