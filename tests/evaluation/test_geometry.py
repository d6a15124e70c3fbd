"""Frames of whole models, and their summary."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.errors import NumericalError, OptionError
from coec.evaluation import geometry as module
from coec.evaluation.frames import compare_frames
from coec.evaluation.geometry import MEASURES, oddities, summarize
from coec.models.dense import Dense
from coec.types import KeptSet
from outcomes import raising


@pytest.fixture(scope="module")
def rows(dense, pruned_folder):
    return coec.geometry(dense, pruned_folder, ranks={"attention": 4, "mlp": 8})


def test_every_pruned_module_has_a_row(rows):
    assert [row["module"] for row in rows] == [
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert [(row["units_before"], row["units_after"]) for row in rows] == [(4, 3), (40, 28)] * 2
    assert [row["penalty"] is None for row in rows] == [False, True] * 2
    assert all(row["events"] == [] for row in rows)
    json.dumps(rows, allow_nan=False)


def test_a_row_is_the_comparison_of_the_stored_weights(rows, dense, pruned_folder):
    """Heads of four columns, two query heads to a KV group; values repeated per query head."""
    dense, pruned = Dense.open(dense), Dense.open(pruned_folder)
    attention = "model.layers.1.self_attn"
    stored = json.loads((pruned_folder / "coec.json").read_text())
    assert stored["recipe"]["options"]["r_p"] == 4
    groups = load_file(pruned_folder / "coec/kept.safetensors")["layers.1.attention"].tolist()
    columns = torch.tensor([g * 8 + i for g in groups for i in range(8)])
    value = dense.tensor(f"{attention}.v_proj.weight").double()
    repeated = torch.cat([value[g * 4 : g * 4 + 4] for g in groups for _ in range(2)])
    expected = compare_frames(
        dense.tensor(f"{attention}.o_proj.weight").double(),
        KeptSet(columns, 32),
        pruned.tensor(f"{attention}.o_proj.weight").double(),
        4,
        value_weight=repeated,
    )
    assert dataclasses.asdict(expected).items() <= rows[2].items()


def test_trained_producers_are_compared_and_said(dense, trained_folder, rows):
    """O and P are of the dense model alone; the penalty would be of values that are no longer."""
    trained = coec.geometry(dense, trained_folder, ranks={"attention": 4, "mlp": 8})
    assert [row["module"] for row in trained] == [row["module"] for row in rows]
    assert all(row["reads_fitted"] and row["penalty"] is None for row in trained)
    assert not any(row["reads_fitted"] for row in rows)
    assert all(0 < row["original_pruned"]["mean"] < 90 for row in trained)
    (note,) = [note for note in oddities(trained) if "trained" in note]
    assert "alignment penalty" in note
    assert "4 of 4 modules" in note


def test_nothing_compensated_nothing_turned(dense, tokens, tmp_path):
    coec.prune(dense, tmp_path / "out", calibration=tokens, samples=24, seq_len=32,
               compensation="none", preset="paper")  # fmt: skip
    for row in coec.geometry(dense, tmp_path / "out", ranks={"attention": 4, "mlp": 8}):
        assert row["pruned_compensated"]["greatest"] < 1e-6
        assert row["discrepancy"] == pytest.approx(0, abs=1e-12)
        assert row["original_pruned"] == row["original_compensated"]


def test_a_site_that_keeps_everything_is_left_out(tokens, tmp_path):
    network = tm.tiny("llama", torch.float32, num_attention_heads=2, num_key_value_heads=1)
    dense = tm.save(network, tmp_path / "dense")
    coec.prune(dense, tmp_path / "out", calibration=tokens, samples=24, seq_len=32,
               preset="paper")  # fmt: skip
    rows = coec.geometry(dense, tmp_path / "out", ranks={"mlp": 4})
    assert [row["site"] for row in rows] == ["mlp", "mlp"]
    assert summarize(rows).keys() == {"mlp"}


def test_progress_and_errors_name_the_module(dense, pruned_folder, monkeypatch):
    told = []
    coec.geometry(dense, pruned_folder, progress=lambda *step: told.append(step))
    assert told == [("geometry", i, 4) for i in range(1, 5)]
    monkeypatch.setattr(module, "compare_frames", raising(NumericalError("no luck")))
    with pytest.raises(NumericalError, match=r"model.layers.0.self_attn.o_proj: no luck"):
        coec.geometry(dense, pruned_folder)


@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        ({"heads": 4}, "unknown site 'heads' in ranks; sites: attention, mlp"),
        ({"mlp": 0}, "the rank of mlp must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_ranks_are_refused_before_a_model_is_opened(ranks, match):
    with pytest.raises(OptionError, match=match):
        coec.geometry("nowhere", "nowhere", ranks=ranks)


def row(site="attention", block=0, **changes):
    angles = {"mean": 10.0 + block, "least": 1.0, "greatest": 80.0}
    penalty = {"pruned": 1e-3, "compensated": 1e-4, "weighted_pruned": 1e-3,
               "weighted_compensated": 1e-3}  # fmt: skip
    return {
        "module": f"model.layers.{block}.x", "site": site, "r": 4, "original_pruned": angles,
        "original_compensated": angles, "pruned_compensated": angles,
        "discrepancy": 0.01 * (block + 1), "scale_change": 0.1, "gap_dense": 1.5,
        "gap_pruned": 1.4, "gap_compensated": 1.3,
        "penalty": penalty if site == "attention" else None, "reads_fitted": False, "events": [],
        **changes,
    }  # fmt: skip


def test_the_summary_averages_and_names_the_worst():
    rows = [row(block=0), row(block=1), row(block=5), row("mlp", discrepancy=None)]
    rows[1]["penalty"] = {**rows[1]["penalty"], "compensated": 5e-4}
    rows[2]["penalty"] = {**rows[2]["penalty"], "compensated": 0.0}
    summary = summarize(rows)
    attention = summary["attention"]
    assert attention["angle_original_pruned"] == {
        "mean": 12.0, "median": 11.0, "best": 10.0, "worst": 15.0,
        "worst_module": "model.layers.5.x",
    }  # fmt: skip
    # The module of which nothing is left has no factor; the smallest factor is the worst.
    assert attention["penalty_factor"]["best"] == pytest.approx(10)
    assert attention["penalty_factor"]["worst_module"] == "model.layers.1.x"
    assert attention["penalty_compensated"]["best"] == 0
    assert attention["modules"] == 3
    assert attention.keys() - {"modules", "r"} == MEASURES.keys()
    assert "penalty_pruned" not in summary["mlp"]
    assert "discrepancy" not in summary["mlp"]


def test_odd_modules_are_named():
    worse = {"pruned": 1e-4, "compensated": 1e-3, "weighted_pruned": 1.0,
             "weighted_compensated": 1.0}  # fmt: skip
    narrow, whole, raised, event = oddities([
        row(), row(block=1, gap_compensated=1.001), row(block=2, gap_pruned=None),
        row(block=3, penalty=worse, events=["gesdd failed"]),
    ])  # fmt: skip
    assert "below 1.01" in narrow
    assert "(1 of 4 modules, first: model.layers.1.x)" in narrow
    assert "O and P nearly coincide" in whole
    assert "raised the alignment penalty" in raised
    assert event == "model.layers.3.x: gesdd failed"
    assert oddities([row()]) == []


@pytest.mark.parametrize(("solver", "least_factor"), [("gradient", 7.2), ("joint", 1.0)])
def test_a_trained_model(solver, least_factor, shared, tmp_path):
    """The penalty falls by at least the paper's median factor under the paper's own solver."""
    folder = tm.readable(shared / "models/stories260K", tmp_path / "model")
    text = (shared / "data/tinystories/train.txt").read_text(encoding="utf-8")[:50000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    coec.prune(folder, tmp_path / "out", selection="wanda-sp", samples=16, seq_len=256,
               calibration=str(tmp_path / "text.txt"), solver=solver,
               preset="paper")  # fmt: skip
    rows = coec.geometry(folder, tmp_path / "out", ranks={"mlp": 16})
    summary = summarize(rows)
    assert summary["attention"]["penalty_factor"]["median"] > least_factor
    for site in ("attention", "mlp"):
        assert summary[site]["discrepancy"]["worst"] < 0.15
        assert 8 < summary[site]["angle_original_pruned"]["mean"] < 25
    assert all(math.isfinite(r["scale_change"]) for r in rows)
