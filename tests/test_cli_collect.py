"""`coec collect`, and what takes its statistics."""

import json

import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm


def test_one_collection_serves_many_prunings(dense, run, tmp_path):
    tokens = tm.token_file(tmp_path / "tokens.npy")
    stats, how = tmp_path / "stats", ("--calibration", tokens, "--samples", 12, "--seq-len", 32)
    status, out, _ = run("collect", dense, stats, *how)
    assert status == 0
    assert f"12 windows of 32 tokens from {tokens}" in out
    assert f"use it: coec prune {dense} OUT --statistics {stats}" in out
    for sparsity in (0.3, 0.5):
        given = ("--preset", "paper", "--sparsity", sparsity, "--compensation", "rcpu", "--json")
        direct, saved = tmp_path / f"direct{sparsity}", tmp_path / f"saved{sparsity}"
        assert run("prune", dense, direct, *how, *given)[0] == 0
        status, out, _ = run("prune", dense, saved, "--statistics", stats, *given)
        assert status == 0
        assert json.loads(out)["recipe"]["samples"] == 12
        one, two = (load_file(folder / "model.safetensors") for folder in (direct, saved))
        assert all(torch.equal(one[name], two[name]) for name in one)
    for how in ((tmp_path / "out",), ("--dry-run",)):
        status, _, err = run("prune", dense, *how, "--statistics", stats, "--samples", 9)
        assert status == 1
        assert err.startswith("coec: the statistics in ")
        assert "were collected with samples = 12, not 9" in err


def test_a_plan_with_statistics_has_their_settings(dense, run, tmp_path):
    """And no text is read or run: that takes no memory."""
    tokens = tm.token_file(tmp_path / "tokens.npy")
    settings = {"calibration": tokens, "samples": 12, "seq_len": 32, "holdout": 0.25}
    made = coec.collect(dense, tmp_path / "stats", **settings)
    status, out, _ = run("prune", dense, "--statistics", made.folder, "--dry-run", "--json")
    assert status == 0
    plan = json.loads(out)
    assert plan["seq_len"] == 32
    phases = plan["memory_bytes"]["phases"]
    of_text = {"text", "hidden states", "forward pass"}
    assert not any(of_text & part.keys() for one in phases.values() for part in one.values())
    flags = [word for name, value in settings.items()
             for word in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
    alike = json.loads(run("prune", dense, *flags, "--dry-run", "--json")[1])
    Grams = [one["memory_bytes"]["phases"]["solving mlp"]["host"]["Grams"] for one in (plan, alike)]
    assert Grams[0] == Grams[1]
    assert coec.plan(dense, statistics=made).recipe.calibration.samples == 12
    assert coec.plan(dense, coec.Recipe(), statistics=made).recipe.calibration.samples == 12


def test_the_line_that_goes_on_is_printed(dense, run, tmp_path, monkeypatch):
    tokens = tm.token_file(tmp_path / "tokens.npy")
    from coec.pipeline import prune as pruning

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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out put", "tokens.npy"]
