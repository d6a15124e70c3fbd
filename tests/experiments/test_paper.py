"""Every table and figure of the paper, on tiny random models."""

import json

import pandas as pd
import pytest
import torch

import tiny_models as tm
from experiments import geometry, paper

TEXT = ["--samples", "8", "--seq-len", "16", "--eval-seq-len", "16", "--sizes", "4", "8"]
PAIRS = [("Wanda-sp", "--"), ("Wanda-sp", "COEC"), ("FLAP", "bias"), ("FLAP", "COEC"),
         ("RCPU", "RCPU"), ("RCPU", "COEC")]  # fmt: skip
BUILD_UP = [*paper.BUILD_UP]
DEFINITION = """
task: boolq
dataset_path: json
dataset_kwargs: {data_files: {validation: %s}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: ["no", "yes"]
metric_list: [{metric: acc}]
"""


@pytest.fixture
def run(text, tmp_path):
    """Runs an experiment on one model or two; returns its table and the lines of rows."""
    one = {"num_hidden_layers": 1}
    dense = tm.save(tm.tiny("llama", torch.float32, **one), tmp_path / "model")
    one["layer_types"] = ["full_attention"]
    other = tm.save(tm.tiny("qwen3", torch.float32, **one), tmp_path / "other")
    out = tmp_path / "out"

    def call(name, *more, table=None, both=False):
        models = ["--model", str(dense), *(["--model", str(other)] if both else [])]
        given = [*TEXT, "--calibration", text, "--text", text, "--out", str(out), *more]
        paper.main([name, *models, *given])
        found = pd.read_csv(out / f"{table or name}.csv")
        assert r"\toprule" in (out / f"{table or name}.tex").read_text()
        return found, (out / "rows.jsonl").read_text().splitlines()

    call.out = out
    return call


def test_the_main_table_has_the_papers_rows_and_its_models_as_columns(run, monkeypatch):
    table, rows = run("main", table="main-perplexity", both=True)
    assert [*table.columns] == ["Sparsity", "Selection", "Comp.", "model", "other"]
    assert [*zip(table["Selection"], table["Comp."])] == PAIRS
    assert (table["model"] > 1).all()
    assert [*table["other"].isna()] == [name == "bias" for _, name in PAIRS]  # Qwen3 has none
    assert len(rows) == 11
    latex = (run.out / "main-perplexity.tex").read_text()
    assert 1 <= latex.count(r"\textbf") <= 6  # the better of each pair, per model, unless equal
    assert not list((run.out / "models").iterdir())

    # Kept rows, and a torn last one: only that one is measured again
    (run.out / "rows.jsonl").write_text("\n".join(rows)[:-5])
    measured = []
    monkeypatch.setattr(paper.coec, "prune", _counting(paper.coec.prune, measured))
    again, kept = run("main", table="main-perplexity", both=True)
    assert [settings["compensation"] for settings in measured] == ["bias", "coec"]
    assert kept == [*rows[:-1], kept[-1]]
    pd.testing.assert_frame_equal(again, table)


def _counting(function, calls):
    def counted(*arguments, **settings):
        calls.append(settings)
        return function(*arguments, **settings)

    return counted


@pytest.mark.slow
def test_the_supplement_adds_sparsities_to_kept_rows(run):
    run("main", table="main-perplexity")
    table, rows = run("sparsity", table="sparsity-perplexity")
    assert [*table["Sparsity"]] == [s for s in (0.1, 0.2, 0.3) for _ in PAIRS]
    assert len(rows) == 18


@pytest.mark.slow
def test_the_calibration_figure_has_a_line_per_compensation(run, monkeypatch):
    monkeypatch.setattr(paper, "SPARSITIES", (0.3,))
    table, _ = run("calibration", table="calibration-model")
    assert [*table.columns] == ["Sparsity", "Comp.", "4", "8"]
    assert set(table["Comp."]) == {"prune only", "RCPU", "COEC"}
    assert len(table) == 3
    assert (run.out / "calibration-model.png").read_bytes().startswith(b"\x89PNG")
    assert (run.out / "calibration-model.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_ablation_is_a_mean_over_models(run, monkeypatch):
    monkeypatch.setattr(paper, "VARIANTS", {"prune only": paper.VARIANTS["prune only"]})
    monkeypatch.setattr(paper, "BUILD_UP", {name: paper.BUILD_UP[name] for name in BUILD_UP[::5]})
    table, rows = run("ablation", both=True)
    assert [*table["Configuration"]] == BUILD_UP[::5]
    first = [json.loads(row)["perplexity"] for row in rows[:2]]
    assert table["PPL"][0] == pytest.approx(sum(first) / 2)


@pytest.mark.slow
def test_every_variant_of_the_ablation_is_one_of_coec(run):
    table, _ = run("ablation")
    assert [*table["Configuration"]] == BUILD_UP
    table = pd.read_csv(run.out / "variants.csv")
    assert [*table["Configuration"]] == [*paper.VARIANTS]
    at = table.set_index("Configuration")["PPL"]
    assert at["alpha = 0"] == pytest.approx(at["prune only"], rel=1e-6)


@pytest.mark.slow
def test_geometry_has_angles_of_both_sites(run):
    table, _ = run("geometry", table="geometry-model")
    assert [*table["site"]] == ["attention", "mlp"] * 3
    assert set(table["modules"]) == {1}
    assert table["op"].between(0, 90).all()
    assert (run.out / "geometry-model.png").is_file()
    aligned = table.set_index(["Alignment", "site"])["penalty_compensated"]
    assert aligned["lambda_a = 50", "attention"] < aligned["lambda_a = 0", "attention"]


@pytest.mark.slow
def test_efficiency_compares_the_dense_model_with_the_pruned_one(run):
    table, _ = run("efficiency", both=True)
    assert [*table["Unnamed: 0"][2:]] == ["model", "other"]
    assert {*table.columns} >= {"Params (B)", "Mem (GB)", "GFLOPs/tok", "tokens/s"}
    dense, pruned = (float(table[name][2]) for name in ("Params (B)", "Params (B).1"))
    assert pruned < dense == pytest.approx(tm.load(run.out.parent / "model").num_parameters() / 1e9)


@pytest.mark.slow
def test_tasks_are_those_of_lm_eval(run, tmp_path):
    pytest.importorskip("lm_eval")
    items = [{"question": f"is {n} even? ", "label": (n + 1) % 2} for n in range(4)]
    (tmp_path / "boolq.jsonl").write_text("\n".join(map(json.dumps, items)))
    (tmp_path / "tasks").mkdir()
    definition = DEFINITION % (tmp_path / "boolq.jsonl")
    (tmp_path / "tasks/boolq.yaml").write_text(definition)
    table, rows = run("main", "--tasks", "boolq", "--task-folder", str(tmp_path / "tasks"),
                      table="main-zero_shot")  # fmt: skip
    assert [*zip(table["Selection"], table["Comp."])] == PAIRS
    assert set(json.loads(rows[0])["task_scores"]) == {"boolq"}
    assert table["model"].isin([0, 25, 50, 75, 100]).all()


def test_a_slice_keeps_its_frames_and_a_rotation_turns_them_all():
    torch.manual_seed(0)
    W, kept = torch.randn(12, 10, dtype=torch.float64), torch.arange(8)
    same = geometry.compare(W, kept, W[:, kept], 3)
    assert same["angle_pc"] == pytest.approx(0, abs=1e-6)
    assert same["discrepancy"] == pytest.approx(0, abs=1e-12)
    assert same["angle_op"] == pytest.approx(same["angle_oc"])
    # W̃ = U_P diag(s) (V_P T)ᵀ, T a rotation by 30° of every leading direction into its own plane
    U, s, Vt = torch.linalg.svd(W[:, kept], full_matrices=False)
    cos, sin = torch.tensor(torch.pi / 6).cos(), torch.tensor(torch.pi / 6).sin()
    turned = Vt.clone()
    turned[:3], turned[3:6] = cos * Vt[:3] + sin * Vt[3:6], cos * Vt[3:6] - sin * Vt[:3]
    rotated = geometry.compare(W, kept, U @ torch.diag(s) @ turned, 3)
    assert rotated["angle_pc"] == pytest.approx(30, rel=1e-5)
    assert rotated["discrepancy"] == pytest.approx(float(1 - cos), rel=1e-5)
