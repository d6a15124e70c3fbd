"""The benchmarks measure what they say."""

import json

import pytest
import torch

from benchmarks import block_floor, record, right_solve, texts
from benchmarks.meter import Counter

BLOCK_PARAMETERS = 218_103_808
"""Entries of the seven weight matrices of a block of Llama-3.1-8B."""


def test_operators_are_counted():
    A, B = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    S = torch.eye(3, dtype=torch.float64)
    expected = {
        lambda: A @ B: 48,
        lambda: torch.addmm(A, A, S): 36,
        lambda: torch.linalg.eigh(S): 126,
        lambda: torch.linalg.svd(A, full_matrices=False): 72 + 160 / 3,
        lambda: torch.linalg.cholesky(S): 9,
        lambda: torch.linalg.solve_triangular(S, B, upper=False): 36,
    }
    for run, operations in expected.items():
        counter = Counter({torch.float64: 2.0})
        with counter:
            run()
        assert counter.operations == pytest.approx(operations)
        assert counter.floor == pytest.approx(operations / 2)


def test_both_solvers_are_measured_on_every_matrix(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    right_solve.main(["--sites", "--shapes", "8x20", "12x12"])
    rows = json.loads((tmp_path / "right_solve.json").read_text())["rows"]
    assert [row["solver"] for row in rows] == ["joint", "gradient"] * 2
    for joint, gradient in (rows[:2], rows[2:]):
        assert 0 < joint["objective"] <= 1.01 * gradient["objective"]
    assert "| joint |" in capsys.readouterr().out


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


def test_questions_are_drawn_evenly_and_understood_without_choices(tmp_path):
    (tmp_path / "tasks").mkdir()
    for source, column in texts.SOURCES.items():
        plain = [f"is it {source} {n}" + "?" * (source != "boolq") for n in range(5)]
        rows = [{column: text} for text in [*plain, "Which of these is it?", plain[0]]]
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / f"tasks/{source}.jsonl").write_text(lines, encoding="utf-8")
    drawn = texts.questions(tmp_path, 20)
    assert len(set(drawn)) == 20
    assert [sum(source in text for text in drawn[:8]) for source in texts.SOURCES] == [2] * 4
    assert all(text.endswith("?") and "these" not in text for text in drawn)
    assert texts.questions(tmp_path, 8) == texts.questions(tmp_path, 8)
    assert all(text.startswith("Is it") for text in drawn if "boolq" in text)


@pytest.mark.slow
def test_the_least_seconds_of_a_block_are_counted_as_a_gpu_takes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    block_floor.main(["--presets", "fast", "paper", "--scale", "0.0625", "--samples", "8"])
    rows = json.loads((tmp_path / "block_floor.json").read_text())["rows"]
    fast, paper = (row["seconds"] for row in rows)
    tokens = 8 * 2048
    forward = 2 * BLOCK_PARAMETERS * tokens / 783e12
    assert 1 < paper["passes"] / forward < 1.3  # the dense model, with its attention
    assert 2.6 < fast["passes"] / forward < 3.4  # twice, and the pruned one
    assert paper["decompositions"] > fast.get("decompositions", 0)
    grams = (14_336**2 + 4096**2) * 2 * tokens / 783e12
    assert paper["sums"] == pytest.approx(grams, rel=0.01)
    states = 3 * tokens * 4096 * 2  # bfloat16
    assert states < rows[0]["bytes"] < states + 8 * 8 * 14_336**2  # and a few squares of channels
    assert "| fast |" in capsys.readouterr().out
