"""`coec collect`, and what takes its statistics."""

import json

import coec
import tiny_models as tm
from coec.pipeline import prune as pruning
from outcomes import succeeded


def test_one_collection_serves_many_prunings(dense, tokens, run, tmp_path):
    stats, how = tmp_path / "stats", ("--calibration", tokens, "--samples", 12, "--seq-len", 32)
    out, _ = succeeded(run("collect", dense, stats, *how))
    assert f"12 windows of 32 tokens from {tokens}" in out
    assert f"use it: coec prune {dense} OUT --statistics {stats}" in out
    for sparsity in (0.3, 0.5):
        given = ("--preset", "paper", "--sparsity", sparsity, "--compensation", "rcpu", "--json")
        direct, saved = tmp_path / f"direct{sparsity}", tmp_path / f"saved{sparsity}"
        assert run("prune", dense, direct, *how, *given)[0] == 0
        out, _ = succeeded(run("prune", dense, saved, "--statistics", stats, *given))
        assert json.loads(out)["recipe"]["samples"] == 12
        assert tm.same_weights(direct, saved)
    out, _ = succeeded(run("prune", dense, tmp_path / "fast", "--statistics", stats, "--preset",
                           "fast"))  # fmt: skip
    assert "nearer to the dense model" not in out  # what trains needs the text
    assert "other kinds of text" not in out
    for how in ((tmp_path / "out",), ("--dry-run",)):
        status, _, err = run("prune", dense, *how, "--statistics", stats, "--samples", 9)
        assert status == 1
        assert err.startswith("coec: the statistics in ")
        assert "were collected with samples = 12, not 9" in err


def test_a_plan_with_statistics_has_their_settings(dense, tokens, run, tmp_path):
    """And no text is read or run: that takes no memory."""
    settings = {"calibration": tokens, "samples": 12, "seq_len": 32, "holdout": 0.25}
    made = coec.collect(dense, tmp_path / "stats", **settings)
    out, _ = succeeded(run("prune", dense, "--statistics", made.folder, "--dry-run", "--json"))
    plan = json.loads(out)
    assert plan["seq_len"] == 32
    phases = plan["memory_bytes"]["phases"]
    of_text = {"text", "hidden states", "states of allocation", "copies", "forward pass"}
    assert not any(of_text & part.keys() for one in phases.values() for part in one.values())
    flags = [word for name, value in settings.items()
             for word in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
    alike = json.loads(run("prune", dense, *flags, "--dry-run", "--json")[1])
    Grams = [one["memory_bytes"]["phases"]["solving mlp"]["host"]["Grams"] for one in (plan, alike)]
    assert Grams[0] == Grams[1]
    assert coec.plan(dense, statistics=made).recipe.calibration.samples == 12
    assert coec.plan(dense, coec.Recipe(), statistics=made).recipe.calibration.samples == 12


def test_the_line_that_goes_on_is_printed(dense, tokens, run, tmp_path, monkeypatch):
    original, calls = pruning.solve_block, []

    def interrupted(measured, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(measured, **options)

    monkeypatch.setattr(pruning, "solve_block", interrupted)
    command = ("prune", dense, tmp_path / "out put", "--calibration", tokens, "--samples", "12",
               "--seq-len", "32", "--preset", "paper", "--compensation", "none")  # fmt: skip
    status, _, err = run(*command, "--restart")
    assert status == 130
    said = err.splitlines()[-3:]
    assert said[0] == "coec: interrupted"
    assert said[1] == f"coec: what is finished is kept in '{tmp_path / 'out put.partial'}'"
    assert said[2] == (
        f"coec: to go on: coec prune {dense} '{tmp_path / 'out put'}' --calibration {tokens} "
        "--samples 12 --seq-len 32 --preset paper --compensation none"
    )
    status, _, err = run(*command, "--sparsity", 0.5)
    assert status == 1
    assert "sparsity was 0.3, now 0.5" in err
    assert "pass --restart to throw it away" in err
    assert run(*command)[0] == 0
    assert len(calls) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["out put"]
