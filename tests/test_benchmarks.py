"""The benchmarks measure what they say: counts by hand, the literal form, derivatives, phases."""

import importlib.util
import itertools
import json

import pytest
import torch

import coec
from benchmarks import (
    block_floor,
    device_paths,
    elimination,
    operations,
    record,
    true_widths,
    two_blocks,
)
from benchmarks.instances import right_solve, synthetic, tempered
from benchmarks.meter import PHASES, REST, Counter, Meter
from benchmarks.operations import BLOCK_PARAMETERS, MODELS, Site, phases
from benchmarks.peers import BORROWED, OURS, PEERS, SOLVERS, Eliminated, OutOfTimeError, Trace, run
from coec.linalg import conjugate as conjugate_module
from coec.linalg.conjugate import conjugate
from coec.linalg.spd import regularized_inverse
from coec.methods.elimination import removal_path
from coec.methods.selection import elimination as elimination_module
from literal import literal
from problems import descended

WIDE, SQUARE = Site("mlp", 8, 20, 14), Site("attention", 12, 12, 8)


def test_counts_of_small_cases_by_hand():
    site = Site("mlp", m=2, d=5, k=3)
    assert site.b == 2
    assert operations.product(2, 3, 4) == 48
    assert operations.gram(site, tokens=10) == 2 * 5 * 10 * 5
    assert operations.eigh(3) == pytest.approx(126)
    assert operations.thin_svd(2, 3) == operations.thin_svd(3, 2) == pytest.approx(72 + 160 / 3)
    assert operations.tempering(site) == pytest.approx(14 / 3 * 125 + 90 + 100 + 60)
    assert operations.eigenbasis(site) == pytest.approx(126 + 36)
    # two tangents of two 2×3·3×2 products each; A Aᵀ, Cholesky, a triangle
    step = operations.conjugate_step(site, trials=1)
    assert step == pytest.approx(4 * 24 + 24 + 8 / 3 + 12)
    assert operations.preconditioner(site, cg_iterations=2) == 6 * 24
    # strips of rows 0-1, 2-3 and 4, each up to its own last column
    assert operations.lower_gram(5, 3, strip=2) == 2 * 3 * (2 * 2 + 2 * 4 + 1 * 5)
    assert operations.polar(2, 2) == pytest.approx(6 * (16 + 8 / 3 + 16) + 32)
    assert operations.left_rotation(site) == pytest.approx(24 + operations.polar(2, 2))
    extra = operations.left_rotation(site) + operations.right_problem(site)
    assert operations.joint_step(site, trials=1) == pytest.approx(step + extra)
    assert operations.assembly(site) == 36 + 24


def test_phases_of_a_matrix_add_up_over_rounds_and_steps():
    none, some = (
        {phase.name: phase.total for phase in phases(WIDE, 100, rounds, 5 * rounds)}
        for rounds in (0, 2)
    )
    assert none["joint step"] == 0
    assert some["joint step"] == 10 * operations.joint_step(WIDE)
    planes = operations.product(8, 14, 8)
    assert some["its preconditioner"] == 10 * (operations.preconditioner(WIDE) + planes)
    assert some["left rotation"] == 3 * none["left rotation"]
    assert some["rescale"] == 3 * none["rescale"]
    assert some["tempering"] == none["tempering"]


def test_kept_widths_of_the_large_models():
    for model, sites in MODELS.items():
        down, out = sites
        hidden, groups = down.m, 8 * 128
        attention = 2 * hidden * out.d + 2 * hidden * groups
        assert BLOCK_PARAMETERS[model] == attention + 3 * hidden * down.d
        for site in sites:
            units = site.d if site.name == "down_proj" else 8
            assert site.k == -(-7 * units // 10) * (site.d // units)


@pytest.mark.parametrize("site", [WIDE, SQUARE], ids=lambda site: site.name)
def test_a_conjugate_step_takes_the_operations_counted(monkeypatch, site):
    problem, R = right_solve(synthetic(site))
    monkeypatch.setattr(conjugate_module, "MULTIPLIER", 0.0)
    monkeypatch.setattr(conjugate_module, "MULTIPLIER_STEPS", 3)
    monkeypatch.setattr(conjugate_module, "TRIALS", 0)

    def count(steps: int) -> float:
        with Counter() as counter:
            ended = conjugate(problem, R, tolerance=0, iterations=steps)[1]
        assert ended.iterations == steps
        return counter.operations

    step = operations.conjugate_step(site, trials=1) + operations.preconditioner(
        site, cg_iterations=3
    )
    energies = 2 * R.numel()  # of the objective, a matrix-vector product
    assert count(3) - count(2) == pytest.approx(step + energies)


def test_an_elimination_takes_the_operations_counted(monkeypatch):
    monkeypatch.setattr(elimination_module, "_STRIP", 16)
    site, panel = Site("mlp", m=100, d=300, k=210), 10
    W, G = elimination.problem(site)
    with Counter() as counter:
        regularized_inverse(G, 1e-3)
        inverse = counter.operations
        assert inverse == pytest.approx(operations.inverse(300))
        removal_path(W, G, 300, 210, panel)
    # Blocks on the diagonal are whole, and what went is dropped a little later.
    rest = counter.operations - 2 * inverse
    assert rest == pytest.approx(operations.elimination(site, panel), rel=0.15)


def test_an_elimination_is_measured_in_parts(monkeypatch):
    monkeypatch.setattr(record, "matmul_rate", lambda *given, **more: 1e9)
    result = elimination.measure(Site("mlp", m=20, d=60, k=42))
    assert result["removed"] == 18
    assert min(result["inverse_seconds"], result["rest_seconds"], result["rate"]) > 0
    assert "| 60×20, 18 removed | rest |" in elimination.describe([result])


@pytest.mark.parametrize("site", [WIDE, SQUARE], ids=lambda site: site.name)
def test_the_literal_form_agrees_with_the_factored_one(site):
    instance = synthetic(site)
    problem = tempered(instance)
    limits = {"rounds": 3, "tol": 0.0}
    W, errors = literal(instance.weight, instance.gram, instance.kept, **limits)
    given = (instance.weight, instance.gram, instance.kept.indices)
    ours = descended(*given, solver="gradient", **limits)
    assert len(errors) == 5
    assert problem.error(W) == pytest.approx(problem.error(ours.weight), rel=1e-8)
    assert errors[-1] == pytest.approx(ours.diagnostics["errors_per_round"][-1], rel=1e-8)
    torch.testing.assert_close(W, ours.weight, rtol=1e-6, atol=1e-8)


def test_derivatives_given_to_peers():
    problem, R = right_solve(synthetic(WIDE))
    f = Eliminated(problem, Trace(limit=60))
    X, V = R.T.numpy().copy(), torch.randn(R.T.shape, dtype=torch.float64).numpy()
    h = 1e-6
    assert f.cost(X) == pytest.approx(problem.objective(R), rel=1e-12)
    slope = (f.cost(X + h * V) - f.cost(X - h * V)) / (2 * h)
    assert slope == pytest.approx(float((f.gradient(X) * V).sum()), rel=1e-6)
    turned = (f.gradient(X + h * V) - f.gradient(X - h * V)) / (2 * h)
    torch.testing.assert_close(torch.from_numpy(turned), torch.from_numpy(f.hessian(X, V)))


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_lowers_the_objective(name):
    library = name.split()[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} (pip install '.[bench]')")
    problem, R = right_solve(synthetic(WIDE))
    trace = run(SOLVERS[name], problem, R, limit=1.0)
    best = run(SOLVERS[OURS], problem, R, limit=1.0).best
    assert trace.values == sorted(trace.values, reverse=True)
    assert trace.best < problem.objective(R) * (1 - 1e-3)
    assert trace.best == pytest.approx(best, rel=0.02)
    assert set(BORROWED) < set(PEERS)


def test_a_trace_ends_a_solver_that_takes_too_long_or_stalls():
    trace = Trace(limit=0.0)
    with pytest.raises(OutOfTimeError, match="limit"):
        trace.note(1.0)
    stalled = Trace(limit=0.2)
    with pytest.raises(OutOfTimeError, match="progress"):
        all(stalled.note(1.0) is None for _ in itertools.count())
    assert stalled.time_to(1.0) < 0.2
    assert stalled.time_to(0.5) == float("inf")


def test_phases_of_a_compensation_add_up():
    instance = synthetic(WIDE)
    meter = Meter(torch.device("cpu"))
    with meter.running():
        result = coec.compensate(instance.weight, instance.gram, instance.kept)
    assert set(meter.seconds) == {*PHASES, REST}
    assert all(count > 0 for count in meter.operations.values())
    assert meter.operations["tempering"] == pytest.approx(operations.tempering(WIDE))
    plain = coec.compensate(instance.weight, instance.gram, instance.kept)
    assert torch.equal(result.weight, plain.weight)


def test_results_are_json_without_infinities(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.save(
        "x", ["--shared", "/a", "--limit", "1"], {"seconds": float("inf"), "rows": [(1, 2.0)]}
    )
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["seconds"] is None
    assert content["rows"] == [[1, 2.0]]
    assert content["arguments"] == "--limit 1"
    assert {"machine", "versions", "commit"} <= set(content)


def test_slope_of_a_power():
    assert record.slope([1, 2, 4], [3.0, 24.0, 192.0]) == pytest.approx(3)


def test_a_device_is_compared_with_the_cpu_in_all_that_is_timed(monkeypatch):
    monkeypatch.setattr(device_paths, "SMALL", Site("down_proj", 16, 40, 28))
    found = device_paths.differences(torch.device("cpu"))
    assert set(found) == set(device_paths.ALLOWED)
    assert all(found[name] <= allowed for name, allowed in device_paths.ALLOWED.items())
    assert "| NO |" in device_paths.describe_differences({"columns removed by obs": 1.0})
    timed = device_paths.timings(torch.device("cpu"), "Llama-3.1-8B", 0.005)
    assert "| elimination |" in device_paths.describe_timings(timed)


@pytest.mark.slow
def test_a_true_width_is_run_with_the_former_preconditioner_too(monkeypatch):
    monkeypatch.setattr(true_widths, "WIDE", 30)
    rates = dict.fromkeys((torch.float64, torch.float32), 1e9)
    for site in (WIDE, Site("mlp", 12, 40, 28)):
        found = true_widths.measure("x", site, torch.float64, rates, former=True)
        now, former = found["runs"].values()
        assert set(now["phases"]) == {*PHASES, REST}
        assert len(now["steps"]) == sum(now["right_iterations"])
        assert now["objective"] == pytest.approx(former["objective"], rel=1e-3)
        assert now["to"] == sorted(now["to"])
        assert "| right |" in true_widths.describe(found)


@pytest.mark.slow
def test_two_blocks_of_large_widths_are_rehearsed_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    two_blocks.main([
        "--presets", "fast", "--samples", "16", "--seq-len", "64", "--scale", "0.0625",
        "--device", "cpu", "--minutes", "60",
    ])  # fmt: skip
    found = json.loads((tmp_path / "two_blocks.json").read_text())
    assert found["difference"] == 0
    assert set(found["moved"].values()) == {0}
    [row] = found["rows"]
    assert row["preset"] == "fast"
    assert len(row["slowest"]) == 3
    assert sum(row["seconds"].values()) < row["wall"]
    assert "| fast |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_least_seconds_of_a_block_are_counted_as_a_gpu_takes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    block_floor.main(["--presets", "fast", "paper", "--scale", "0.0625", "--samples", "64"])
    rows = json.loads((tmp_path / "block_floor.json").read_text())["rows"]
    fast, paper = (row["seconds"] for row in rows)
    tokens = 64 * 2048
    forward = 2 * operations.BLOCK_PARAMETERS["Llama-3.1-8B"] * tokens / 783e12
    assert 1 < paper["passes"] / forward < 1.3  # the dense model, with its attention
    assert 2.6 < fast["passes"] / forward < 3.4  # twice, and the pruned one
    assert paper["eigenpairs"] > fast.get("eigenpairs", 0)
    assert paper["polar factors and SVDs"] > 0
    grams = (14_336**2 + 4096**2) * 2 * tokens / 783e12
    assert paper["sums"] == pytest.approx(grams, rel=0.01)
    states = 3 * tokens * 4096 * 2  # bfloat16
    assert states < rows[0]["bytes"] < states + 8 * 8 * 14_336**2  # and a few squares of channels
    assert "| fast |" in capsys.readouterr().out
