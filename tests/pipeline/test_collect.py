"""Statistics kept on disk, and those of validation windows."""

import json
import shutil
from operator import setitem

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec.calibration.tokens import Stream
from coec.calibration.windows import sample_windows, source_digest, split_windows, validation_count
from coec.errors import CalibrationError, CoecError, OptionError, OutputError
from coec.execution.journal import seal
from coec.models.dense import Dense
from coec.models.files import sha256
from coec.pipeline import collect as collecting
from coec.pipeline import prune as pruning
from coec.streaming.statistics import Statistics
from coec.types import Gram
from outcomes import one_line
from problems import failing

IDS = torch.randint(2, tm.VOCABULARY, (12, 24), generator=torch.Generator().manual_seed(5))
SETTINGS = {"preset": "paper", "calibration": IDS, "samples": 10, "seq_len": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tm.save(tm.tiny("qwen2", torch.float32), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    return coec.collect(model, tmp_path_factory.mktemp("s") / "held", holdout=0.2, **SETTINGS)


@pytest.mark.parametrize("compensation", ["coec", "bias", "ridge-to-slice"])
def test_pruning_from_saved_statistics_is_the_same_to_the_bit(model, saved, compensation, tmp_path):
    settings = {**SETTINGS, "holdout": 0.2, "sparsity": 0.4, "compensation": compensation}
    if compensation == "ridge-to-slice":
        settings["selection"] = "obs"
    one = coec.prune(model, tmp_path / "one", **settings)
    two = coec.prune(model, tmp_path / "two", statistics=saved.folder, **settings)
    assert tm.same_weights(tmp_path / "one", tmp_path / "two")
    assert one.calibration == two.calibration
    for name in ("holdout_after", "top_token_energy"):
        assert [row[name] for row in one.sites] == [row[name] for row in two.sites]
    assert all(0 < row["top_token_energy"] < 1 for row in one.sites)


def test_saved_statistics_keep_their_precision_and_their_deviations(model, saved):
    dense = Dense.open(model)
    for block in saved.blocks(dense, torch.device("cpu")):
        for gram in block.grams.values():
            assert gram.precision == torch.finfo(torch.float32).eps
            loose = Gram(gram.xx, gram.x, gram.tokens)
            torch.testing.assert_close(gram.variance, loose.variance, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", ["self", "c4", "wikitext2", "hub:a/b"])
def test_a_file_named_like_a_data_set_is_not_what_is_read(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "c4":
        (tmp_path / name).mkdir()
    elif ":" not in name:
        (tmp_path / name).write_text("mine")
    assert source_digest(name) == name
    assert source_digest(tmp_path / "absent") == str(tmp_path / "absent")


def test_validation_windows_are_a_fraction_drawn_under_the_seed():
    windows = sample_windows(Stream(torch.arange(200), "x", ""), samples=10, seq_len=20, seed=0)
    fit, validation = split_windows(windows, 0.2, seed=0)
    assert len(fit) == 8
    assert len(validation) == 2
    together = torch.cat([fit, validation])
    assert torch.equal(together[together[:, 0].argsort()], windows.ids)
    draws = {tuple(split_windows(windows, 0.2, seed=s)[1][:, 0].tolist()) for s in range(8)}
    assert len(draws) > 3
    assert split_windows(windows, 0.0, seed=0)[1] is None


@pytest.mark.parametrize(
    ("windows", "fraction", "count"),
    [(4, 0.125, 1), (2, 0.01, 1), (10, 0.01, 1), (8, 0.125, 1), (64, 0.125, 8), (1, 0.0, 0)],
)
def test_a_fraction_is_at_least_one_window(windows, fraction, count):
    assert validation_count(windows, fraction) == count


@pytest.mark.parametrize(("count", "fraction"), [(10, 0.99), (1, 0.01), (1, 0.5), (2, 0.8)])
def test_a_fraction_that_leaves_nothing_to_fit_on_is_refused(count, fraction):
    windows = sample_windows(Stream(torch.arange(200), "x", ""), samples=count, seq_len=20, seed=0)
    with pytest.raises(
        CalibrationError, match=r"both need at least one; take more windows \(samples=N\)"
    ):
        split_windows(windows, fraction, seed=0)


def test_statistics_add_up_to_those_of_all_windows(model, saved, tmp_path):
    whole = coec.collect(model, tmp_path / "whole", **SETTINGS, guard=False)
    checkpoint = Dense.open(model)
    cpu = torch.device("cpu")
    parts = zip(whole.blocks(checkpoint, cpu), saved.blocks(checkpoint, cpu), strict=True)
    for one, two in parts:
        assert not one.holdout
        for site in ("attention", "mlp"):
            total = two.grams[site] + two.holdout[site]
            assert (two.grams[site].tokens, two.holdout[site].tokens) == (192, 48)
            assert total.tokens == one.grams[site].tokens
            assert (total.xx - one.grams[site].xx).norm() < 1e-6 * total.xx.norm()
            assert (total.x - one.grams[site].x).norm() < 1e-6 * total.x.norm()


def test_the_validation_error_is_that_of_the_validation_activations(model, saved, tmp_path):
    """Oracle: the dense layer's outputs on the validation rows, through the written weights."""
    report = coec.prune(
        model, tmp_path / "out", statistics=saved.folder, holdout=0.2, sparsity=0.4,
        compensation="bias", **SETTINGS,
    )  # fmt: skip
    kept = load_file(tmp_path / "out" / "coec/kept.safetensors")["layers.1.mlp"]
    windows = sample_windows(Stream(IDS, "tensor", ""), samples=10, seq_len=24, seed=0)
    dense = tm.load(model)
    seen = []
    layer = dense.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        dense(input_ids=split_windows(windows, 0.2, seed=0)[1])
        X = seen[0].double()
        W = layer.weight.double()
        Y = X @ W.T
        written = load_file(tmp_path / "out/model.safetensors")
        prefix = "model.layers.1.mlp.down_proj"
        Z = X[:, kept] @ written[f"{prefix}.weight"].double().T + written[f"{prefix}.bias"].double()
        before = X[:, kept] @ W[:, kept].T
    row = next(row for row in report.sites if row["module"] == prefix)
    energy = Y.square().sum()
    assert row["holdout_after"] == pytest.approx(float((Y - Z).square().sum() / energy), rel=1e-4)
    expected = float((Y - before).square().sum() / energy)
    assert row["holdout_before"] == pytest.approx(expected, rel=1e-4)
    rows = [row for row in report.sites if row["site"] == "mlp"]
    mean = sum(row["holdout_after"] for row in rows) / len(rows)
    assert report.mean_errors("mlp", held_out=True)[1] == pytest.approx(mean)


def test_statistics_of_another_model_and_of_other_weights_of_its_sizes_are_refused(
    dense, model, saved, tmp_path
):
    trained = shutil.copytree(model, tmp_path / "trained")
    tm.edit_weights(trained, lambda tensors: tensors["model.norm.weight"].add_(1e-6))
    for other in (dense, trained):
        with pytest.raises(OptionError, match="collected with model = "):
            coec.prune(other, tmp_path / "out", statistics=saved.folder, holdout=0.2, **SETTINGS)


def test_a_folder_without_statistics_is_refused(model, tmp_path):
    with pytest.raises(CalibrationError, match="holds no complete statistics"):
        coec.prune(model, tmp_path / "out", statistics=tmp_path, **SETTINGS)


def test_a_damaged_file_names_the_block_and_what_was_finished_stays(model, tmp_path, monkeypatch):
    made = coec.collect(model, tmp_path / "s", **SETTINGS)
    whole = (made.folder / "block-00001.safetensors").read_bytes()
    (made.folder / "block-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(CalibrationError, match="statistics of block 1 cannot be read"):
        coec.prune(model, tmp_path / "out", statistics=made.folder, **SETTINGS)
    assert not (tmp_path / "out").exists()
    assert Statistics.open(made.folder).made_with["samples"] == 10
    (made.folder / "block-00001.safetensors").write_bytes(whole)
    solved, solve = [], pruning.solve_block

    def counted(measured, **options):
        solved.append(measured.block.index)
        return solve(measured, **options)

    monkeypatch.setattr(pruning, "solve_block", counted)
    coec.prune(model, tmp_path / "out", statistics=made.folder, **SETTINGS)
    assert solved == [1]


def test_statistics_are_not_written_over(model, saved):
    with pytest.raises(OutputError, match="exists: choose another folder"):
        coec.collect(model, saved.folder, **SETTINGS)


@pytest.fixture
def damaged(model, saved, tmp_path):
    """Prunes from a copy of the statistics that a function has spoilt."""
    folder = shutil.copytree(saved.folder, tmp_path / "damaged")

    def prune(spoil, match=None):
        spoil(folder)
        with one_line(CoecError, match) as caught:
            coec.prune(model, tmp_path / "out", statistics=folder, holdout=0.2, **SETTINGS)
        assert not (tmp_path / "out").exists()
        kept = getattr(caught.value, "__notes__", [])
        assert len(kept) == (tmp_path / "out.partial").exists()
        return kept

    return prune


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", '{"calibration": 3, "made_with": {}}', '{"calibration": {}}', "[" * 10**5,
     '{"calibration": {}, "made_with": {}}', '{"calibration": {}, "made_with": []}'],
)  # fmt: skip
def test_a_damaged_record_of_statistics_is_one_line(content, damaged):
    assert not damaged(lambda folder: (folder / "statistics.json").write_text(content))


def all_of(folder):
    """Reads everything, as prunings and mergers do."""
    statistics = Statistics.open(folder)
    return [statistics.grams(n, torch.device("cpu")) for n in (0, 1)]


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.mark.parametrize(
    "file", ["block-00000.safetensors", "block-00001.safetensors", "statistics.json"]
)
def test_one_bit_that_changed_is_found_wherever_it_is(file, saved, tmp_path):
    """In the length of a header, the header with its counts, the payload, the record."""
    folder = shutil.copytree(saved.folder, tmp_path / "damaged")
    path, whole = folder / file, (saved.folder / file).read_bytes()
    all_of(folder)
    for place in {*range(0, len(whole), len(whole) // 25), *range(12), len(whole) - 1}:
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        with pytest.raises(CalibrationError, match="collect (them )?again"):
            all_of(folder)
    path.write_bytes(whole)
    all_of(folder)


def negate(folder):
    path = folder / "block-00001.safetensors"
    with safe_open(path, "pt") as file:
        counts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    save_file(tensors | {"fit.mlp.xx": -tensors["fit.mlp.xx"]}, path, counts)


def edit(folder):
    path = folder / "statistics.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda f: swap(*(f / f"block-0000{n}.safetensors" for n in (0, 1))), "what was collected"),
        (negate, "what was collected"),
        (edit, "no complete statistics"),
    ],
)
def test_exchanged_negated_and_edited_statistics_are_refused(spoil, match, damaged):
    damaged(spoil, match)


def vouch(folder):
    """Has the record say of every file what it is by now."""
    path = folder / "statistics.json"
    record = json.loads(path.read_text())
    del record["record_sha256"]
    record["files"] = {
        name: [(folder / name).stat().st_size, sha256(folder / name)] for name in record["files"]
    }
    path.write_text(json.dumps(record | {"record_sha256": seal(record)}))


NAN = float("nan")
DAMAGED_SUMS = {
    "no counts": lambda tensors, counts: counts.clear(),
    "words for counts": lambda tensors, counts: setitem(counts["fit.mlp"], 0, "many"),
    "no tokens": lambda tensors, counts: setitem(counts["fit.mlp"], 0, 0),
    "absurd precision": lambda tensors, counts: setitem(counts["fit.mlp"], 1, NAN),
    "another size": lambda tensors, counts: tensors.update(
        {"fit.mlp.x": torch.zeros(7), "fit.mlp.xx": torch.zeros(7, 7)}
    ),
    "nothing for validation": lambda tensors, counts: [
        tensors.pop(name) for name in [*tensors] if name.startswith("holdout")
    ],
    "NaN": lambda tensors, counts: tensors["fit.mlp.xx"][0, 0].fill_(NAN),
    "NaN among deviations": lambda tensors, counts: tensors["fit.mlp.centred"][0].fill_(NAN),
}
"""What may have become of the tensors and counts of a block."""


@pytest.mark.parametrize("name", DAMAGED_SUMS)
def test_damaged_sums_are_one_line(name, damaged):
    def spoil(folder):
        path = folder / "block-00001.safetensors"
        with safe_open(path, "pt") as file:
            counts = json.loads(file.metadata()["counts"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        DAMAGED_SUMS[name](tensors, counts)
        save_file(tensors, path, metadata={"counts": json.dumps(counts)})
        vouch(folder)

    damaged(spoil, r"statistics of block 1 cannot|layers\.1\.mlp.* hold NaN")


def test_statistics_of_another_text_of_the_same_name_are_refused(model, tmp_path):
    """A text is known by its content: another place is none, another word is."""
    text = tm.text_file(tmp_path / "text.txt")
    settings = {**SETTINGS, "calibration": text}
    made = coec.collect(model, tmp_path / "s", **settings)
    copy = shutil.copyfile(text, tmp_path / "copy.txt")
    settings["compensation"] = "none"
    coec.prune(model, tmp_path / "a", statistics=made.folder, **{**settings, "calibration": copy})
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text().replace("cat", "dog"))
    with pytest.raises(OptionError, match="collected with calibration = "):
        coec.prune(model, tmp_path / "b", statistics=made.folder, **settings)


def test_what_collect_returns_brings_its_settings(model, saved, tmp_path):
    """Nothing of the calibration need be said again, and what is said must agree."""
    one = coec.prune(model, tmp_path / "one", holdout=0.2, sparsity=0.4, **SETTINGS)
    two = coec.prune(model, tmp_path / "two", statistics=saved, sparsity=0.4, preset="paper")
    assert two.recipe == one.recipe
    assert two.calibration == one.calibration
    recipe = coec.Recipe(preset="paper", sparsity=0.4)
    coec.prune(model, tmp_path / "three", recipe, statistics=saved)
    for out in ("two", "three"):
        assert tm.same_weights(tmp_path / "one", tmp_path / out)


@pytest.mark.parametrize("setting", [{"samples": 128}, {"text_column": "x"}, {"seq_len": 12},
                                     {"calibration": IDS + 1}, {"forward_dtype": "bfloat16"},
                                     {"holdout": 0.0}, {"seed": 1}])  # fmt: skip
def test_a_setting_that_the_statistics_do_not_have_is_refused(setting, model, saved, tmp_path):
    """Also one that says a default."""
    name = next(iter(setting))
    with pytest.raises(OptionError, match=f"were collected with {name} = "):
        coec.prune(model, tmp_path / "out", statistics=saved, **setting)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_collection_goes_on(model, tmp_path, monkeypatch):
    """The block that was there is not computed again, and the files are the same to the byte."""

    settings = {**SETTINGS, "holdout": 0.2}
    whole = coec.collect(model, tmp_path / "whole", **settings).folder
    original, written = collecting.write_grams, []

    def once(path, grams):
        written.append(path.name)
        if len(written) == 2:
            raise KeyboardInterrupt
        original(path, grams)

    monkeypatch.setattr(collecting, "write_grams", once)
    with pytest.raises(KeyboardInterrupt):
        coec.collect(model, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    coec.collect(model, tmp_path / "out", **settings)
    assert [name[:11] for name in written] == ["block-00000", "block-00001", "block-00001"]
    for path in whole.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_collection_of_something_else_is_not_continued(model, tmp_path, monkeypatch):
    interrupted = failing(collecting.write_grams, KeyboardInterrupt(), 2)
    monkeypatch.setattr(collecting, "write_grams", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coec.collect(model, tmp_path / "out", **SETTINGS)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="seed was 0, now 1.*restart=True"):
        coec.collect(model, tmp_path / "out", seed=1, **SETTINGS)
    made = coec.collect(model, tmp_path / "out", seed=1, restart=True, **SETTINGS)
    assert made.made_with["seed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
