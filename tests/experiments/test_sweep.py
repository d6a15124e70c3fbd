"""The sweep: the same numbers as one by one, resumable, and a failure is a row."""

import json
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import coec
import sweep_rows as sr
import tiny_models as tm
from coec.calibration import windows
from coec.errors import CoecError, ModelError, OptionError, OutputError, ResultsError
from coec.experiments import cell as cell_module
from coec.experiments import sweep as module
from coec.experiments.files import RESULTS, Store
from coec.experiments.grid import expand
from coec.experiments.reporting.report import write_report
from coec.experiments.sweep import sweep
from coec.settings import Calibration
from outcomes import check_refused, raising, signalled, succeeded
from problems import failing

GRID = """
preset = "paper"
sparsity = 0.4
samples = 6
seq_len = 16
seed = [0, 1]
[[variants]]
compensation = ["none", "least-squares"]
[[variants]]
compensation = "coec"
alpha = [0.0, 0.9]
"""
IDS = torch.randint(2, tm.VOCABULARY, (400,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, token files, and a grid of eight cells in two calibrations."""
    root = tmp_path_factory.mktemp("sweep")
    tm.save(tm.tiny("llama", torch.float32), root / "tiny")
    np.save(root / "train.npy", IDS[:250].numpy())
    np.save(root / "test.npy", IDS[250:].numpy())
    models = f"""
[[models]]
path = {str(root / "tiny")!r}
calibration = {str(root / "train.npy")!r}
evaluate = {{ text = {str(root / "test.npy")!r}, seq_len = 16 }}
"""
    (root / "grid.toml").write_text(GRID + models)
    return root


@pytest.fixture(scope="module")
def finished(place):
    """An uninterrupted run: its folder, and the seeds of its dense passes."""
    with pytest.MonkeyPatch.context() as patch:
        passes = counted(patch, lambda recipe: recipe.calibration.seed)
        summary = sweep(cells_of(place), place / "whole")
    assert (summary.done, summary.failed, summary.ran) == (9, 0, 9)
    return place / "whole", passes


@pytest.fixture(scope="module")
def collected(place):
    """Statistics of the model on the first calibration of the grid."""
    return coec.collect(place / "tiny", place / "collected", cells_of(place)[1].recipe)


@pytest.fixture
def whole(finished):
    """The rows of the uninterrupted run."""
    return records(finished[0])


@pytest.fixture
def copied(finished, tmp_path):
    """A folder of one's own with the results of the uninterrupted run."""
    shutil.copytree(finished[0], tmp_path / "out")
    return tmp_path / "out"


def cells_of(place, **more):
    return expand(str(place / "grid.toml"), **more)


def refused(cells, out, error, match, **settings):
    """The sweep ends before any work."""
    with pytest.raises(error, match=match):
        sweep(cells, out, **settings)
    assert not out.exists()


def moved_to(folder, cells):
    """The cells with their model in another folder."""
    return [replace(cell, subject=replace(cell.subject, path=str(folder))) for cell in cells]


def scaled(weights):
    return {name: weight * 1.001 for name, weight in weights.items()}


def counted(patch, note=lambda recipe: 1):
    """Notes of every dense pass from now on."""
    passes, original = [], module.collect
    patch.setattr(module, "collect", lambda *a, **k: passes.append(note(a[2])) or original(*a, **k))
    return passes


def records(folder):
    """The rows of a folder by cell, as the file has them."""
    return {cell: row.record for cell, row in Store(folder).rows.items()}


def timeless(row):
    """A row without what differs between two runs of one machine."""
    row = json.loads(json.dumps(row))
    row.pop("seconds")
    row.pop("peak_memory_bytes")
    row["cost"].pop("peak_memory_bytes")
    row["perplexity"].pop("seconds")
    for site in row.get("sites", []):
        site.pop("seconds")
    return row


def test_a_cell_is_what_prune_and_eval_give(place, whole, tmp_path):
    row = next(
        r for r in whole.values()
        if r["settings"]["compensation"] == "coec" and r["settings"]["options"]["alpha"] == 0.9
        and r["settings"]["seed"] == 1
    )  # fmt: skip
    report = coec.prune(
        place / "tiny", tmp_path / "out", sparsity=0.4, samples=6, seq_len=16, seed=1,
        calibration=place / "train.npy", preset="paper",
    )  # fmt: skip
    result = coec.perplexity(report.out, place / "test.npy", seq_len=16)
    assert row["perplexity"]["perplexity"] == result.perplexity
    assert row["perplexity"]["text_sha256"] == result.text_sha256
    assert [s["error_after"] for s in row["sites"]] == [s["error_after"] for s in report.sites]
    assert row["calibration"] == report.calibration
    assert row["settings"] == report.recipe


def test_the_report_has_a_line_for_everything_that_varies_but_the_seed(copied):
    text = (write_report(copied).files[1]).read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [line[1:3] for line in lines if line[:1] == ["tiny"]] == [
        ["dense", "–"], ["rcpu + none", "–"], ["rcpu + least-squares", "–"],
        ["rcpu + coec", "0"], ["rcpu + coec", "0.9"],
    ]  # fmt: skip


def test_alpha_zero_is_prune_only_to_the_last_digit(whole):
    def value(seed, compensation, **options):
        (row,) = [
            r for r in whole.values()
            if r["settings"].get("seed") == seed and r["settings"]["compensation"] == compensation
            and options.items() <= r["settings"]["options"].items()
        ]  # fmt: skip
        return row["perplexity"]["perplexity"]

    for seed in (0, 1):
        assert value(seed, "coec", alpha=0.0) == value(seed, "none")
        assert value(seed, "coec", alpha=0.9) != value(seed, "none")


def test_every_row_has_the_full_record(whole):
    dense, *others = whole.values()
    assert dense["settings"]["compensation"] == "dense"
    for row in whole.values():
        assert row["status"] == "done"
        assert row["error"] is None
        assert row["peak_memory_bytes"] > 0
        assert {"python", "torch", "transformers", "coec", "device"} <= row["environment"].keys()
        assert row["perplexity"]["windows"] == 9
        assert {"collecting", "pruning", "evaluating"} <= row["seconds"].keys()
        parameters, cost = row["parameters"]["after"], row["cost"]
        assert (cost["parameters"], cost["weight_bytes"]) == (parameters, 4 * parameters)
        assert cost["gflops_per_token"] == 2 * parameters / 1e9
        assert row["peak_memory_bytes"] >= cost["peak_memory_bytes"] > cost["weight_bytes"]
    for row in others:
        assert row["calibration"]["windows"] == 6
        assert len(row["calibration"]["windows_sha256"]) == 64
        assert row["parameters"]["after"] < row["parameters"]["before"]
        assert [site["block"] for site in row["sites"]] == [0, 0, 1, 1]
        tempered = row["settings"]["options"].get("alpha", 0) > 0
        assert all(site.get("gcv_lambda", -1) >= 0 for site in row["sites"]) == tempered


def test_one_dense_pass_per_calibration_and_nothing_left_behind(finished):
    folder, passes = finished
    assert passes == [0, 1]
    assert sorted(p.name for p in folder.iterdir()) == [".lock", RESULTS]


def test_interrupted_and_run_again_the_rows_are_the_same(place, whole, monkeypatch, tmp_path):
    cells, after = cells_of(place), 4
    monkeypatch.setattr(module, "run", failing(cell_module.run, KeyboardInterrupt(), after + 1))
    with pytest.raises(KeyboardInterrupt):
        sweep(cells, tmp_path / "out")
    monkeypatch.undo()
    assert len(Store(tmp_path / "out").rows) == after
    with (tmp_path / "out" / RESULTS).open("ab") as file:
        file.write(b'{"cell": "half a li')  # as a full disk would leave
    summary = sweep(cells, tmp_path / "out")
    assert (summary.done, summary.ran, summary.torn) == (9, 9 - after, True)
    rows = records(tmp_path / "out")
    for row, expected in zip(rows.values(), whole.values(), strict=True):
        ours, theirs = timeless(row), timeless(expected)
        for key in ours.keys() | theirs.keys():
            assert (key, ours[key]) == (key, theirs[key])


def test_a_failed_cell_is_a_row_and_the_rest_goes_on(place, monkeypatch, tmp_path):
    original = cell_module.perplexity

    def sometimes(model, *args, **options):
        record = model.folder / "coec.json"
        name = "dense"
        if record.is_file():
            name = json.loads(record.read_text())["recipe"]["compensation"]
        if name == "least-squares":
            raise CoecError("the model's cross-entropy is not finite")
        if name == "none":
            raise KeyError("a defect\nof ours")
        return original(model, *args, **options)

    monkeypatch.setattr(cell_module, "perplexity", sometimes)
    cells = cells_of(place)
    summary = sweep(cells, tmp_path / "out")
    assert (summary.done, summary.failed) == (5, 4)
    assert set(summary.reasons.values()) == {
        "the model's cross-entropy is not finite", "KeyError: 'a defect\\nof ours'"
    }  # fmt: skip
    monkeypatch.undo()
    again = sweep(cells, tmp_path / "out")
    assert (again.ran, again.failed) == (0, 4)
    mended = sweep(cells, tmp_path / "out", retry_failed=True)
    assert (mended.ran, mended.done, mended.failed) == (4, 9, 0)
    assert len((tmp_path / "out" / RESULTS).read_text().splitlines()) == 13


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError(28, "no space left")])
def test_a_dense_pass_that_fails_costs_only_its_cells(place, monkeypatch, tmp_path, error):
    original = module.collect

    def sometimes(model, out, recipe, **options):
        if recipe.calibration.seed == 0:
            raise error
        return original(model, out, recipe, **options)

    monkeypatch.setattr(module, "collect", sometimes)
    summary = sweep(cells_of(place), tmp_path / "out")
    assert (summary.done, summary.failed) == (5, 4)
    (reason,) = set(summary.reasons.values())
    assert reason == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (KeyError("rope_scaling"), "KeyError: 'rope_scaling'"),
        ({"kl": float("nan")}, "perplexity.kl is not finite: nan"),
        ({"perplexity": 1e305}, "perplexity.perplexity must be a finite number, got 1e+305"),
    ],
)
def test_what_a_library_raises_and_a_number_that_nobody_could_read_cost_only_the_cell(
    change, reason, place, monkeypatch, tmp_path
):
    original = cell_module.perplexity

    def wild(*arguments, **options):
        if isinstance(change, Exception):
            raise change
        return replace(original(*arguments, **options), **change)

    monkeypatch.setattr(cell_module, "perplexity", wild)
    summary = sweep(cells_of(place)[:2], tmp_path / "out")
    assert (summary.done, summary.failed) == (0, 2)
    assert set(summary.reasons.values()) == {reason}


def test_a_reason_is_text_that_a_row_can_hold():
    spoiled = ValueError("\x1b[31mred\x1b[0m\n \udcff")
    assert cell_module.reason(spoiled) == "ValueError: ?[31mred?[0m ?"


def test_a_folder_that_cannot_be_made_is_one_line(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        sweep(cells_of(place)[:1], tmp_path / "file" / "out")
    with pytest.raises(OutputError, match="nobody replaced ~"):
        sweep(cells_of(place)[:1], "~/out")


def test_an_interrupted_cell_leaves_no_model(place, monkeypatch, tmp_path):
    monkeypatch.setattr(cell_module, "perplexity", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sweep(cells_of(place)[1:2], tmp_path / "out")
    assert not list((tmp_path / "out" / "models").iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [("samples = [6, 60]", "too little calibration text"),
     ("samples = 6\nholdout = [0.2, 0.99]", "leaves 6 for validation and 0 to")],
)  # fmt: skip
def test_a_text_is_checked_for_every_cell_before_any_work(
    change, reason, place, tmp_path, monkeypatch
):
    text = (place / "grid.toml").read_text().replace("samples = 6", change)
    (tmp_path / "g.toml").write_text(text)
    reads, original = [], windows.read_stream
    monkeypatch.setattr(
        windows, "read_stream", lambda *a, **k: reads.append(1) or original(*a, **k)
    )
    refused(expand(str(tmp_path / "g.toml")), tmp_path / "out", CoecError, reason)
    assert len(reads) <= 1


def test_a_text_that_changes_during_the_sweep_fails_its_cells(place, tmp_path, monkeypatch):
    """A row would name the text that was there at the start."""
    text = shutil.copyfile(place / "train.npy", tmp_path / "train.npy")
    (cell,) = cells_of(place)[1:2]
    calibration = replace(cell.recipe.calibration, source=str(text))
    cells = [replace(cell, recipe=replace(cell.recipe, calibration=calibration))]
    original = module.collect

    def late(*arguments, **options):
        np.save(text, IDS[5:250].numpy())
        return original(*arguments, **options)

    monkeypatch.setattr(module, "collect", late)
    summary = sweep(cells, tmp_path / "out")
    assert (summary.done, summary.failed) == (0, 1)
    assert "was changed while the sweep ran" in next(iter(summary.reasons.values()))


def test_finished_cells_join_another_grid(place, copied, tmp_path):
    grid = tmp_path / "wider.toml"
    grid.write_text((place / "grid.toml").read_text())
    summary = sweep(expand(str(grid)), copied)
    assert summary.ran == 0
    rows = records(copied)
    assert {tuple(row["grids"]) for row in rows.values()} == {("grid", "wider")}


def test_two_sweeps_into_one_folder(place, tmp_path):
    with (
        Store(tmp_path / "out").writing(),
        pytest.raises(OutputError, match="another sweep is writing"),
    ):
        sweep(cells_of(place), tmp_path / "out")


def test_a_damaged_line_is_not_thrown_away(place, tmp_path):
    sr.write(tmp_path, [sr.row()], f"nonsense\n{json.dumps(sr.row(samples=8))}\n")
    with pytest.raises(ResultsError, match="line 2 is not JSON"):
        sweep(cells_of(place), tmp_path)
    assert "nonsense" in (tmp_path / RESULTS).read_text()


def test_models_without_tokenizer_and_such_as_are_not_there_are_refused(place, text, tmp_path):
    bare = tm.save(tm.tiny("llama", torch.float32), tmp_path / "bare", tokenizer=False)
    cells = expand("seeds", models=[str(bare)], evaluate={"text": text})
    refused(cells, tmp_path / "out", ModelError, "has no tokenizer")
    cells = cells_of(place, models=["/no/such/model"])  # which stops the first as well
    refused(cells, tmp_path / "out", ModelError, "no model at '/no/such/model'")


def test_kept_models_and_statistics(place, tmp_path):
    cells = cells_of(place)[:3]
    sweep(cells, tmp_path / "out", keep_models=True, keep_statistics=True)
    assert (tmp_path / "out" / "models" / cells[1].id / "model.safetensors").is_file()
    assert len(list((tmp_path / "out" / "statistics").iterdir())) == 1


def test_the_command(place, copied, run):
    out, _ = succeeded(run("sweep", place / "grid.toml", "--dry-run"))
    assert "9 cells" in out
    printed = json.loads(run("sweep", place / "grid.toml", copied, "--json")[1])
    assert (printed["done"], printed["failed"], printed["ran"]) == (9, 0, 0)
    _, out, _ = run("sweep", place / "grid.toml", copied)
    assert "9 cells done, 0 failed (9 were there already)" in out
    assert "coec report" in out


def test_the_command_interrupted_says_what_is_there(place, monkeypatch, tmp_path, run):
    monkeypatch.setattr(module, "run", failing(cell_module.run, KeyboardInterrupt(), 2))
    status, _, err = run("sweep", place / "grid.toml", tmp_path / "out")
    assert (status, len(Store(tmp_path / "out").rows)) == (130, 1)
    assert f"finished cells are in {tmp_path / 'out'}; the same command goes on" in err


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("owner", "name", "rows"), [(cell_module, "_measured", 0), (module, "collect", 1)]
)
def test_a_signal_ends_it_whatever_code_in_c_makes_of_it(
    owner, name, rows, place, monkeypatch, tmp_path, run
):
    """The error that takes the signal's place is no failure of a cell."""
    monkeypatch.setattr(owner, name, signalled(signal.SIGTERM))
    status, _, err = run("sweep", place / "grid.toml", tmp_path / "out")
    assert (status, len(Store(tmp_path / "out").rows)) == (128 + signal.SIGTERM, rows)
    assert "interrupted" in err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--address", "auto"], "address has no effect with executor = here"),
        (["--executor", "cloud"], "executor must be one of here, ray, got 'cloud'"),
        (["--tasks", "arc_eazy"], "has no task 'arc_eazy'; did you mean arc_easy"),
        (["--device", "gpu"], "device"),
    ],
)
def test_a_dry_run_refuses_what_the_sweep_would(more, said, place, run, few_tasks):
    check_refused(run("sweep", place / "grid.toml", "--dry-run", *more), said)


def test_evaluation_text_sampled_from_the_dense_model(place, tmp_path):
    """The windows are those of `coec eval --text self`."""
    cells = cells_of(place, evaluate={"text": "self", "max_windows": 3})[:1]
    sweep(cells, tmp_path / "out")
    (row,) = records(tmp_path / "out").values()
    expected = coec.perplexity(
        place / "tiny", "self", baseline=place / "tiny", samples=3, seq_len=16
    )
    assert row["perplexity"]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert row["perplexity"]["text_sha256"] == expected.text_sha256


@pytest.fixture
def moved(place, finished, tmp_path):
    """Copies of the model, the texts, the grid and the results, to change."""
    for name in ("tiny", "whole"):
        shutil.copytree(place / name, tmp_path / name)
    for name in ("train.npy", "test.npy"):
        shutil.copyfile(place / name, tmp_path / name)
    return tmp_path


def test_a_model_is_known_by_its_content_not_by_its_place(place, moved):
    assert sweep(moved_to(moved / "tiny", cells_of(place)), moved / "whole").ran == 0


@pytest.mark.parametrize("what", ["model", "calibration text", "evaluation text"])
def test_rows_of_other_weights_or_texts_are_not_taken_for_these(what, place, moved):
    """A table of both would say what nobody measured."""
    changed = {"model": "tiny", "calibration text": "train.npy", "evaluation text": "test.npy"}
    path = place / changed[what]
    kept = moved / changed[what]
    try:
        if what == "model":
            tm.edit_weights(path, scaled)
        else:
            np.save(path, np.load(path)[::-1].copy())
        with pytest.raises(OutputError, match=f"the {what} of 'tiny' is another one"):
            sweep(cells_of(place), moved / "whole")
    finally:
        if kept.is_dir():
            shutil.copytree(kept, path, dirs_exist_ok=True)
        else:
            shutil.copyfile(kept, path)
    assert sweep(cells_of(place), moved / "whole").ran == 0


def test_statistics_of_other_weights_are_collected_again(place, tmp_path, monkeypatch):
    model = shutil.copytree(place / "tiny", tmp_path / "tiny")
    cells = moved_to(model, cells_of(place)[1:2])
    sweep(cells, tmp_path / "out", keep_statistics=True)
    (tmp_path / "out" / RESULTS).unlink()
    passes = counted(monkeypatch)
    sweep(cells, tmp_path / "out", keep_statistics=True)
    assert not passes
    (tmp_path / "out" / RESULTS).unlink()
    tm.edit_weights(model, scaled)
    assert sweep(cells, tmp_path / "out").done == 1
    assert passes == [1]


def test_a_damaged_model_is_found_before_any_work(place, tmp_path):
    model = shutil.copytree(place / "tiny", tmp_path / "tiny")
    tm.edit_weights(model, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    cells = moved_to(model, cells_of(place))
    refused(cells, tmp_path / "out", ModelError, "model.norm.weight .* holds NaN or Inf")


def test_a_sweep_with_failed_cells_exits_1(place, monkeypatch, tmp_path, run):
    monkeypatch.setattr(cell_module, "perplexity", raising(CoecError("no good")))
    status, out, err = run("sweep", place / "grid.toml", tmp_path / "out")
    assert status == 1
    assert "0 cells done, 9 failed" in out
    assert "failed, 9 cells: no good" in err


def test_statistics_that_were_collected_before_serve_the_cells(
    place, whole, collected, tmp_path, monkeypatch
):
    """The rows are those of the sweep's own dense pass, and what was given stays."""
    everything = cells_of(place)
    cells = [cell for cell in everything if not (cell.recipe and cell.recipe.calibration.seed)]
    passes = counted(monkeypatch)
    summary = sweep(cells, tmp_path / "out", statistics=[collected.folder])
    assert (summary.done, summary.failed, passes) == (5, 0, [])
    for cell, record in records(tmp_path / "out").items():
        assert timeless(record) == timeless(whole[cell])
    assert (collected.folder / "statistics.json").is_file()
    assert not (tmp_path / "out/statistics").exists()
    # A grid that says nothing of the calibration takes all of it from there.
    recipe = replace(cells[1].recipe, calibration=Calibration(), given=frozenset())
    plain = replace(cells[1], recipe=recipe)
    assert sweep([cells[0], plain], tmp_path / "out", statistics=[collected]).ran == 0


def test_statistics_that_do_not_serve_a_cell_are_refused(place, collected, tmp_path):
    cells, out = cells_of(place), tmp_path / "out"
    refused(cells, out, OptionError, "collected with seed = 0, not 1", statistics=[collected])
    other = tm.save(tm.tiny("qwen2", torch.float32), tmp_path / "other")
    strange = coec.collect(other, tmp_path / "strange", cells[1].recipe)
    refused(cells, out, OptionError, "are of none of these models", statistics=[strange])
    again = shutil.copytree(collected.folder, tmp_path / "again")
    match = "'.*collected' and '.*again' are of one model"
    refused(cells[:2], out, OptionError, match, statistics=[collected, again])
    # Also where a grid says a default: its cells would otherwise be others than they say.
    cells = plain_cells(place, tmp_path, 'compensation = "none"\nsamples = [6, 128]\n')
    match = "collected with samples = 6, not 128"
    refused(cells, out, OptionError, match, statistics=[collected])


def plain_cells(place, folder, toml):
    """Cells of a grid that says nothing of its texts."""
    (folder / "plain.toml").write_text(toml)
    text = {"text": str(place / "test.npy"), "seq_len": 16}
    return expand(str(folder / "plain.toml"), models=[str(place / "tiny")], evaluate=text)


def test_statistics_serve_where_their_text_is_not(place, tmp_path):
    text = tmp_path / "a.npy"
    np.save(text, IDS[:120].numpy())
    made = coec.collect(
        place / "tiny", tmp_path / "a", samples=6, seq_len=16, calibration=str(text)
    )
    text.unlink()
    cells = plain_cells(place, tmp_path, 'compensation = "none"\n')
    summary = sweep(cells, tmp_path / "out", statistics=[made])
    assert (summary.done, summary.reasons) == (2, {})


def test_the_command_takes_statistics(place, collected, tmp_path, run):
    (tmp_path / "small.toml").write_text('sparsity = 0.3\ncompensation = ["none", "rcpu"]\n')
    out, _ = succeeded(run(
        "sweep", tmp_path / "small.toml", tmp_path / "out", "--model", place / "tiny",
        "--text", place / "test.npy", "--eval-seq-len", 16, "--statistics", collected.folder,
    ))  # fmt: skip
    assert "3 cells done, 0 failed" in out
    rows = records(tmp_path / "out").values()
    assert {row["settings"].get("samples") for row in rows} == {None, 6}


def with_variants(place, folder, variants, head=""):
    """A grid like that of the place, of one seed and with other variants."""
    settings, _, rest = (place / "grid.toml").read_text().partition("[[variants]]")
    models = "[[models]]" + rest.partition("[[models]]")[2]
    text = head + settings.replace("seed = [0, 1]", "") + variants + models
    (folder / "g.toml").write_text(text)
    return str(folder / "g.toml")


def test_cells_that_run_both_models_take_the_text_itself(place, tmp_path):
    """Beside cells that are solved from the group's statistics, with the same windows."""
    variants = (
        '[[variants]]\nselection = "obs"\n'
        '[[variants]]\npreset = "best"\nkv_groups = "uniform"\nreconstruct = 1\n'
    )
    grid = with_variants(place, tmp_path, variants, "holdout = 0.2\n")
    assert sweep(expand(grid), tmp_path / "out").failed == 0
    rows = [row for row in Store(tmp_path / "out").rows.values() if not row.dense]
    paper, best = sorted(rows, key=lambda row: row.values["preset"] == "best")
    assert best.values["propagate"] is True
    assert paper.values["propagate"] is False
    assert best.calibration.windows_sha256 == paper.calibration.windows_sha256
    trained = [site["reconstruction"] for site in best.record["sites"] if "reconstruction" in site]
    assert trained
    assert all(fit["errors"][fit["taken"]] == min(fit["errors"]) for fit in trained)
    assert not any("reconstruction" in site for site in paper.record["sites"])


def test_a_mixture_of_texts_is_one_calibration(place, tmp_path):
    mixture = f"{place / 'train.npy'}=2,{place / 'test.npy'}"
    grid = (place / "grid.toml").read_text().replace(str(place / "train.npy"), mixture)
    (tmp_path / "g.toml").write_text(grid)
    cells = expand(str(tmp_path / "g.toml"))[:2]
    assert sweep(cells, tmp_path / "out").failed == 0
    row = next(row for row in records(tmp_path / "out").values() if "calibration" in row)
    assert row["calibration"]["source"] == mixture
    assert row["identity"]["calibration text"].count(",") == 1
    (tmp_path / "bad.toml").write_text(grid.replace(mixture, mixture + "=99,self"))
    refused(expand(str(tmp_path / "bad.toml")), tmp_path / "bad", CoecError, "leave self out")


@pytest.mark.slow
def test_a_group_of_such_cells_alone_collects_nothing(place, tmp_path, monkeypatch):
    """Its rows have the distance from the dense model too, and frames, if asked for."""
    grid = with_variants(place, tmp_path, '[[variants]]\npreset = "best"\nreconstruct = 1\n')
    monkeypatch.setattr("coec.experiments.sweep.collect", lambda *given, **more: 1 / 0)
    cells = expand(grid, evaluate={"distance": True, "geometry": True})
    assert sweep(cells, tmp_path / "out").failed == 0
    dense, best = sorted(Store(tmp_path / "out").rows.values(), key=lambda row: not row.dense)
    assert best.calibration.windows == best.values["samples"]
    chosen = best.record["reconstruction"]
    assert chosen["kv_groups"] in chosen["candidates"]
    assert {*chosen["candidates"]} == {"uniform", "all"}
    pruned = [site for site in best.record["sites"] if site["site"] == "mlp"]
    assert all(0 < site["geometry"]["angle_oc"] < 90 for site in pruned)
    assert 0 < best.perplexity.kl < 10
    assert 0 <= best.perplexity.agreement <= 1
    assert best.seconds["collecting"] == 0
    assert dense.perplexity.kl is dense.perplexity.agreement is None
