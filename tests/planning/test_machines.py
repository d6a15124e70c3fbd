"""Rates of machines: between sizes, of data sheets, measured and kept."""

import json

import pytest
import torch

from coec.errors import OptionError
from coec.planning import machines
from coec.planning.machines import (
    GPUS,
    PEAK_SHARE,
    Machine,
    Work,
    machine_named,
    this_machine,
)
from coec.planning.run import Seconds


def machine(**rates):
    return Machine("m", "cpu", rates)


def test_rates_lie_between_those_of_the_nearest_sizes():
    points = ((10.0, 1e9), (1000.0, 4e9))
    one = machine(product=points)
    rates = [one.rate(Work("product", 1.0, size)) for size in (1, 10, 100, 1000, 1e6)]
    assert rates == pytest.approx([1e9, 1e9, 2e9, 4e9, 4e9])


def test_seconds_are_amounts_over_rates_so_many_times():
    one = machine(product=((1.0, 2e9),), call=((1.0, 1e5),))
    work = [Work("product", 4e9, 1.0, 3.0, "float64"), Work("call", 1.0, 1.0, 1e5)]
    assert one.seconds(work) == pytest.approx(7.0)


def test_a_dtype_has_rates_of_its_own_where_there_are_some():
    one = Machine("m", "cpu", {"product": ((1.0, 1.0),), "product float32": ((1.0, 2.0),)})
    rates = [one.rate(Work("product", 1.0, dtype=dtype)) for dtype in ("float64", "float32")]
    assert rates == [1.0, 2.0]


def test_only_what_is_counted_in_operations_is_one():
    assert Work("product", 5.0, times=2).operations == 10
    assert Work("elementwise", 5.0).operations == Work("call", 1.0).operations == 0


@pytest.mark.parametrize("name", GPUS)
def test_a_data_sheet_has_every_rate(name):
    one = machine_named(name)
    assert not one.measured
    assert one.device_bytes == int(GPUS[name].gigabytes * 1e9)
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        assert one.rate(Work("product", 1.0, 1e5, dtype=dtype)) > 0
    for dtype in ("float64", "float32"):
        assert one.rate(Work("eigen", 1.0, 1e5, dtype=dtype)) > 0
    for kind in ("elementwise", "call", "read", "link", "host"):
        assert one.rate(Work(kind, 1.0)) > 0
    large = one.rate(Work("product", 1.0, 1e5, dtype="float32"))
    assert large == pytest.approx(GPUS[name].float32 * 1e12 * PEAK_SHARE)
    half = one.rate(Work("product", 1.0, 1e5, dtype="float16"))
    assert half == one.rate(Work("product", 1.0, 1e5, dtype="bfloat16"))


def test_a_machine_that_nobody_knows_is_refused():
    with pytest.raises(OptionError, match="unknown machine 'abacus'; known: h100, h200"):
        machine_named("abacus")


def test_rates_are_kept_and_measured_anew_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def measured(device, progress=None):
        made.append(Machine(f"the {len(made) + 1}th", "cpu", {"product": ((1.0, 2.0),)}))
        return made[-1]

    monkeypatch.setattr(machines, "measure", measured)
    device = torch.device("cpu")
    first, again = this_machine(device), this_machine(device)
    assert len(made) == 1
    assert again == first
    assert again.rates == {"product": ((1.0, 2.0),)}
    assert this_machine(device, anew=True).name == "the 2th"
    assert this_machine(device).name == "the 2th"
    [path] = (tmp_path / "coec").iterdir()
    known = json.loads(path.read_text())
    assert known["torch"] == torch.__version__
    assert known["threads"] == torch.get_num_threads()
    path.write_text("{damaged")
    assert this_machine(device).name == "the 3th"


def test_other_threads_are_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machines, "measure", lambda device, progress: Machine("m", "cpu", {}))
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        this_machine(torch.device("cpu"))
    assert len(list((tmp_path / "coec").iterdir())) == 2


def test_where_nothing_can_be_kept_rates_are_still_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(machines, "measure", lambda device, progress: Machine("m", "cpu", {}))
    assert this_machine(torch.device("cpu")).name == "m"


def test_small_measurements_have_every_rate(monkeypatch):
    """Of small matrices, so that it takes no ten seconds."""
    monkeypatch.setattr(machines, "_EDGES", {"cpu": (4, 8)})
    monkeypatch.setattr(machines, "_TENSORS", {"cpu": (2**12, 2**16)})
    monkeypatch.setattr(machines, "_RUNS", 1)
    told = []
    found = machines.measure(torch.device("cpu"), lambda *step: told.append(step))
    assert set(found.rates) == {
        "product float64", "product float32", "eigen float64", "eigen float32", "elementwise",
        "call", "read", "host",
    }  # fmt: skip
    assert all(rate > 0 for points in found.rates.values() for _, rate in points)
    assert [size for size, _ in found.rates["product float32"]] == [4, 8]
    assert told[-1] == ("measuring", 12, 12)
    assert found.measured


def test_durations_are_shown_with_what_they_may_lie_between():
    assert str(Seconds(480.0, 720.0, 1080.0)) == "12 min (8.0–18)"
    assert str(Seconds(2.0, 3.4, 7.0)) == "3.4 s (2.0–7.0)"
