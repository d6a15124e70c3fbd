"""Grids: what is crossed with what, and which mistakes are caught before any work."""

import json
from pathlib import Path

import pytest

from coec.compensation import COMPENSATIONS
from coec.errors import OptionError
from coec.experiments.grid import NEWER, READY_GRIDS, Evaluation, expand
from coec.planning.recipe import Recipe


def write(folder, text, name="mine"):
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def pruned(cells):
    return [cell for cell in cells if cell.recipe is not None]


COUNTS = {
    "main": 18,  # 3 selections × 2 compensations × 3 sparsities
    "ablation": 23,
    "calibration-size": 36,  # 3 sparsities × 4 sizes × 3 compensations
    "seeds": 9,
    "alpha": 9,
    "lambda-a": 7,
    "delta": 8,
    "overfitting": 36,  # 12 compensations × 3 sizes
    "rounds": 8,  # 4 caps × 2 solvers
    "rescale-ridge": 18,  # 2 rotations × (GCV and 8 ridges)
}


@pytest.mark.parametrize("name", READY_GRIDS)
def test_ready_grids_expand(name):
    cells = expand(name, models=["a/model"])
    assert len(pruned(cells)) == COUNTS[name]
    assert cells[0].recipe is None
    assert len({cell.id for cell in cells}) == len(cells)


def test_the_ablation_names_its_rows():
    cells = pruned(expand("ablation", models=["a/model"]))
    rows = {cell.labels["ablation"]: cell.recipe for cell in cells}
    assert list(rows)[:6] == [
        "RCPU", "+ GCV rescale", "+ two-sided rotation", "+ reduced Stiefel", "+ tempering",
        "+ alignment",
    ]  # fmt: skip
    full = rows["+ alignment"].record()["options"]
    assert (full["alpha"], full["lambda_a"], full["delta"], full["r_p"]) == (0.9, 50.0, 7e-4, 16)
    assert {r.record()["compensation"] for r in rows.values()} <= set(COMPENSATIONS)


def test_axes_are_crossed_and_variants_linked(tmp_path):
    grid = write(
        tmp_path,
        """
        sparsity = [0.1, 0.2]
        seed = 3
        [[variants]]
        compensation = ["none", "rcpu"]
        [[variants]]
        compensation = "coec"
        alpha = [0.5, 1.0]
        sparsity = 0.4
        label = "hot"
        """,
    )
    cells = pruned(expand(grid, models=["m"]))
    prunings = [cell.recipe.pruning for cell in cells]
    assert [(p.sparsity, p.compensation, p.options) for p in prunings] == [
        (0.1, "none", {}), (0.1, "rcpu", {}), (0.2, "none", {}), (0.2, "rcpu", {}),
        (0.4, "coec", {"alpha": 0.5}), (0.4, "coec", {"alpha": 1.0}),
    ]  # fmt: skip
    assert {cell.recipe.calibration.seed for cell in cells} == {3}
    assert cells[-1].labels == {"mine": "hot"}
    assert cells[-1].grids == ("mine",)


def test_what_wins_over_what(tmp_path):
    """fixed < the model's table < flags < axes and variants."""
    grid = write(
        tmp_path,
        """
        compensation = "none"
        sparsity = 0.3
        seq_len = 11
        seed = [7]
        [[variants]]
        samples = 5
        [[models]]
        path = "m"
        seq_len = 12
        calibration = "model.txt"
        seed = 9
        samples = 9
        """,
    )
    (cell,) = pruned(expand(grid, settings={"seq_len": 13, "samples": 8}))
    chosen = cell.recipe.calibration
    assert (chosen.seq_len, chosen.seed, chosen.samples) == (13, 7, 5)
    assert chosen.source == "model.txt"


def test_a_cell_of_two_grids_is_one_cell(tmp_path):
    grid = write(tmp_path, 'grids = ["main", "ablation"]\nsamples = 64\n')
    cells = expand(grid, models=["m"])
    both = [cell for cell in pruned(cells) if cell.grids == ("main", "ablation")]
    assert [cell.labels for cell in both] == [{"ablation": "RCPU"}, {"ablation": "+ alignment"}]
    assert len(pruned(cells)) == 18 + 23 - 2
    assert {cell.recipe.calibration.samples for cell in pruned(cells)} == {64}
    assert cells[0].grids == ("main", "ablation")


def test_models_have_their_own_texts(tmp_path):
    grid = write(
        tmp_path,
        """
        grids = ["seeds"]
        evaluate = { max_windows = 5, text = "both.txt" }
        [[models]]
        path = "x/one"
        evaluate = { text = "one.txt" }
        [[models]]
        path = "y/one"
        label = "other"
        """,
    )
    cells = expand(grid, evaluate={"seq_len": 64})
    first, second = (cell.subject for cell in cells if cell.recipe is None)
    assert first.evaluation == Evaluation(text="one.txt", max_windows=5, seq_len=64)
    assert second.evaluation == Evaluation(text="both.txt", max_windows=5, seq_len=64)
    assert (first.label, second.label) == ("one", "other")


def test_a_digest_depends_on_everything_asked_for():
    def ids(**more):
        return {cell.id for cell in expand("seeds", models=["m"], **more)}

    base = ids()
    assert base == ids(settings={"samples": 128})  # the default, said aloud
    assert base == ids(evaluate={"trust_remote_code": True}, settings={"trust_remote_code": True})
    for change in (
        {"settings": {"samples": 64}},
        {"settings": {"text_column": "x"}},
        {"evaluate": {"max_windows": 3}},
    ):
        assert len(base & ids(**change)) <= 1  # the dense model may be the same


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparsty = 0.3", r"unknown key 'sparsty'; did you mean 'sparsity'\?"),
        ("[[variant]]\nseed = 1", r"unknown key 'variant'; did you mean 'variants'\?"),
        ("models = 'm'", "models must be a valid list"),
        ("[variants]\nseed = 1", "variants must be a valid list"),
        ("seed = []", r"seed must be a number, text, true or false, got \[\]"),
        ('[[variants]]\nlabel = "a\\u0001"', r"label must be text without control .*'a\\x01'"),
        ("seq-len = 8\nseq_len = 16", "sets seq_len twice, as 'seq-len' and 'seq_len'"),
        ("[[variants]]\nseq-len = 8\nseq_len = 16", "sets seq_len twice, as 'seq-len' and"),
        ("sparsity = 1.5", "strictly between 0 and 1, got 1.5"),
        ("alpha = [0.5]\ncompensation = 'none'", "compensation 'none' has no option 'alpha'"),
        ("seed = [0", "is not valid TOML"),
        ("[[models]]\nlabel = 'x'", "path is missing"),
        ("[[models]]\npath = 'a'\nseed = [1, 2]",
         r"models\[0\].seed must be a number, .* got \[1, 2\]"),
        ("[[models]]\npath = 'a/x'\n[[models]]\npath = 'b/x'", "two models are called 'x'"),
        ("[[models]]\npath = 'a'\nsamples = 9\n[[models]]\npath = 'a'\nlabel = 'b'",
         "'a' and 'b' are one model measured in one way: .* an axis"),
        ("[[models]]\npath = 'a'\nevaluate = 'b'",
         r"models\[0\].evaluate must be a valid dictionary, got 'b'"),
        ("[[models]]\npath = 'a'\nlabel = 3", "label must be a valid string, got 3"),
        ("[[variants]]\nlabel = 3", "label must be a valid string, got 3"),
        ("calibration = {a = 1}",
         "calibration must be a number, text, true or false, got {'a': 1}"),
        ("samples = true", "samples must be a whole number of at least 1, got True"),
        ("seed = true", "seed must be a whole number of at least 0, got True"),
        ("evaluate = {txt = 'a'}", r"\[evaluate\]: unknown key 'txt'; did you mean 'text'\?"),
        ("evaluate = {max_windows = true}", "max_windows must be a valid integer, got True"),
        ("evaluate = {geometry = 'yes'}", "geometry must be a valid boolean, got 'yes'"),
        ("grids = ['mian']", "no grid 'mian': give a TOML file, or one of ablation"),
    ],
)  # fmt: skip
def test_mistakes_in_a_grid(text, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        expand(write(tmp_path, text), models=["m"])


@pytest.mark.parametrize("table", ["[[models]]\npath = 'a'", "[evaluate]\nmax_windows = 3"])
def test_an_included_grid_brings_no_models_or_evaluation(table, tmp_path):
    inner = write(tmp_path, f"seed = [0, 1]\n{table}", "inner")
    outer = write(tmp_path, f"grids = [{inner!r}]")
    with pytest.raises(
        OptionError, match=r"included by .*: write its \[.* in the file that is run"
    ):
        expand(outer, models=["m"])


def test_a_grid_without_a_model_and_one_that_includes_itself(tmp_path):
    with pytest.raises(OptionError, match=r"no model: add \[\[models\]\], or pass model=PATH"):
        expand("main")
    path = write(tmp_path, f"grids = [{str(tmp_path / 'mine.toml')!r}]")
    with pytest.raises(OptionError, match="includes itself"):
        expand(path, models=["m"])


def test_the_documented_grid_is_one(tmp_path):
    document = Path(__file__).parents[2] / "docs/lab/EXPERIMENTS.md"
    text = document.read_text(encoding="utf-8")
    example = text.partition("```toml\n")[2].partition("```")[0]
    cells = expand(write(tmp_path, example, "documented"))
    own = [cell for cell in pruned(cells) if "documented" in cell.grids]
    assert len(own) == 8  # two seeds × two alphas × with and without training
    assert {cell.recipe.calibration.samples for cell in cells if cell.recipe} == {64}
    assert cells[0].subject.evaluation.text == "other.txt"
    assert cells[0].subject.evaluation.limit == 100


def test_what_a_grid_says_for_all_is_dropped_where_nothing_hears_it(tmp_path):
    axes = 'lambda_a = [0.0, 50.0]\nr_p = 8\nsolver = ["joint", "gradient"]\ndelta = 1e-3'
    grid = write(tmp_path, f'preset = "paper"\n{axes}')
    options = [cell.recipe.pruning.options for cell in pruned(expand(grid, models=["m"]))]
    assert [("r_p" in o, "delta" in o) for o in options] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    said = write(tmp_path, 'preset = "paper"\n[[variants]]\nlambda_a = 0.0\nr_p = 8')
    with pytest.raises(OptionError, match="r_p has no effect with lambda_a = 0"):
        expand(said, models=["m"])


def test_published_rows_are_still_cells_of_their_grid(monkeypatch):
    """A sweep goes on from them: a later setting has not made them another computation."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    cells = {cell.id for cell in expand("benchmarks/grids/beyond.toml")}
    rows = (root / "benchmarks/results/beyond.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(row)["cell"] for row in rows} <= cells
    for name, nothing in NEWER.items():
        assert Recipe(preset="paper").record()[name] == nothing
