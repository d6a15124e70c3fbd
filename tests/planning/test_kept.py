"""Units that somebody names: who is believed, what is refused, and that nothing else changes."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec import solve
from coec.errors import OptionError, UnfinishedError
from coec.planning.kept import KEPT, KeptUnits
from prunings import interrupt

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32}
UNITS = {"attention": [0, 2, 3], "mlp": [*range(3, 30)]}


@pytest.fixture(scope="module")
def ours(dense, tokens, tmp_path_factory):
    """A folder of ours, at the defaults."""
    out = tmp_path_factory.mktemp("ours") / "out"
    coec.prune(dense, out, calibration=tokens, **SETTINGS)
    return out


def of_all(**changes):
    """Units of both blocks' sites, by key."""
    units = {**UNITS, **changes}
    return {f"layers.{block}.{name}": units[name] for block in range(2) for name in units}


def written(folder):
    """The files that hold a model and its kept units."""
    names = ("model.safetensors", "config.json", KEPT)
    return {name: (folder / name).read_bytes() for name in names}


def save_units(units, path):
    if path.suffix == ".json":
        path.write_text(json.dumps({key: list(map(int, value)) for key, value in units.items()}))
    else:
        save_file({key: torch.tensor(value) for key, value in units.items()}, path)
    return path


def test_our_own_units_give_our_own_model_and_nothing_is_selected(
    dense, tokens, ours, tmp_path, monkeypatch
):
    monkeypatch.setattr(solve, "column_scores", None)
    report = coec.prune(dense, tmp_path / "out", kept=ours, calibration=tokens, **SETTINGS)
    assert written(tmp_path / "out") == written(ours)
    assert f"every site keeps the units of '{ours}'" in report.plan["notes"]
    assert report.recipe["kept"] == str(ours)
    assert report.plan["kept"] == {
        "source": str(ours), "sha256": KeptUnits.read(ours).digest, "sites": 4,
    }  # fmt: skip
    card = (tmp_path / "out/README.md").read_text()
    assert "- selection: given;" in card


@pytest.mark.parametrize("suffix", ["safetensors", "json", "mapping", "numpy"])
def test_units_in_any_order_and_any_form_are_the_same(suffix, dense, tokens, tmp_path):
    units = of_all()
    given = {key: value[::-1] for key, value in units.items()}
    if suffix in ("safetensors", "json"):
        given = save_units(given, tmp_path / f"kept.{suffix}")
    elif suffix == "numpy":
        given = {key: np.array(value, dtype=np.int32) for key, value in given.items()}
    how = {"calibration": tokens, "compensation": "none", "samples": 24, "seq_len": 32}
    report = coec.prune(dense, tmp_path / "out", kept=given, preset="paper", **how)
    stored = load_file(tmp_path / "out" / KEPT)
    assert {key: value.tolist() for key, value in stored.items()} == units
    assert report.plan["kept"]["sha256"] == KeptUnits.of(units).digest


def test_sites_that_are_not_named_are_selected_as_ever(dense, tokens, ours, tmp_path):
    """With dense statistics no site knows of another."""
    named = {"layers.0.attention": [1, 2, 3], "layers.1.mlp": [*range(28)]}
    report = coec.prune(dense, tmp_path / "out", kept=named, calibration=tokens, **SETTINGS)
    mine, theirs = load_file(tmp_path / "out" / KEPT), load_file(ours / KEPT)
    for key in theirs:
        assert mine[key].tolist() == named.get(key, theirs[key].tolist())
    assert "2 sites keep the units of 'mapping'" in report.plan["notes"]
    assert report.recipe["kept"] == "mapping"


@pytest.mark.parametrize(
    "idle",
    [{"sparsity": 0.9}, {"attention_sparsity": 0.5}, {"budget": 0.9},
     {"multiple_of": 64}, {"by_block": True}],
    ids=lambda idle: next(iter(idle)),
)  # fmt: skip
def test_what_has_no_effect_where_every_site_is_named_is_refused(idle, dense):
    [name] = idle
    with pytest.raises(OptionError, match=f"^{name} has no effect with 'mapping'"):
        coec.plan(dense, kept=of_all(), **idle)
    assert coec.plan(dense, kept={f"layers.{n}.attention": [0, 2] for n in (0, 1)}, **idle)


def test_the_plan_shows_the_widths(dense, run, tmp_path):
    file = save_units(of_all(), tmp_path / "kept.json")
    status, out, _ = run("prune", dense, "--dry-run", "--json", "--kept", file)
    shown = json.loads(out)
    assert status == 0
    assert shown["widths"]["mlp"]["after"] == 27
    assert shown["widths"]["kv_groups"]["after"] == 3
    assert shown["kept"]["sites"] == 4


BAD = {
    "twice": (
        of_all(mlp=[1, 5, 1]),
        "unit 1 twice",
    ),
    "negative": (of_all(mlp=[-1, 5]), "unit -1"),
    "beyond": (
        of_all(attention=[0, 4]),
        "unit 4",
    ),
    "empty": (of_all(mlp=[]), "layers.0.mlp"),
    "fraction": (of_all(mlp=[0, 1.0]), "whole numbers"),
    "truth": (of_all(mlp=[0, True]), "whole numbers"),
    "word": (of_all(mlp="all"), "whole numbers"),
    "ragged": (of_all(mlp=[[0], [1, 2]]), "whole numbers"),
    "huge": (of_all(mlp=[0, 2**63]), "whole numbers"),
    "wrapped": (of_all(mlp=np.array([2**64 - 1], np.uint64)), "unit -1"),
    "mask": (of_all(mlp=torch.ones(40, dtype=torch.bool)), "whole numbers"),
    "unknown": (
        {"layers.0.mpl": [0]},
        "did you mean 'layers.0.mlp'",
    ),
    "deeper": ({"layers.7.mlp": [0]}, "layers.7.mlp"),
    "nothing": ({}, "names no site"),
    "everything": (
        of_all(attention=[*range(4)], mlp=[*range(40)]),
        "nothing is removed",
    ),
    "uneven": (
        of_all() | {"layers.1.mlp": [0, 1]},
        "mlp.* differ by block",
    ),
    "number": (7, "kept"),
    "other": ({1, 2}, "kept"),
}


@pytest.mark.parametrize("name", BAD)
def test_units_that_cannot_be_are_refused_before_any_work(name, dense, tmp_path):
    kept, match = BAD[name]
    how = {"calibration": tmp_path / "no text", "preset": "paper"}
    with pytest.raises(OptionError, match=match):
        coec.prune(dense, tmp_path / "out", kept=kept, **how)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("units.json", None, "no kept units at '.*units.json': give a safetensors"),
        ("x" * 300, None, "no kept units at|name too long"),
        ("units.json", b"{", r"'.*units.json' holds no kept units \(Expecting"),
        ("units.json", b"[1, 2]", "holds no kept units .it is no JSON object"),
        ("units.safetensors", b"nothing", r"'.*units.safetensors' holds no kept units"),
        ("units.txt", b"\xff\xfe", "holds no kept units"),
        (
            "units.json",
            b'{"layers.0.mlp": [0, 1], "layers.0.mlp": [0]}',
            "names 'layers.0.mlp' twice",
        ),
    ],
)
def test_a_file_that_holds_none(name, content, why, dense, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=re.compile(why, re.IGNORECASE)):
        coec.plan(dense, kept=str(tmp_path / name))


def test_a_file_that_was_changed_is_another_run(dense, tokens, tmp_path, monkeypatch):
    """Where it lies does not matter."""
    file, other = save_units(of_all(), tmp_path / "kept.json"), tmp_path / "moved.json"
    how = {**SETTINGS, "calibration": tokens}
    interrupt(monkeypatch, coec.prune, dense, tmp_path / "out", kept=file, **how)
    shutil.move(file, other)
    save_units(of_all(mlp=[*range(27)]), file)
    with pytest.raises(UnfinishedError, match="kept was "):
        coec.prune(dense, tmp_path / "out", kept=file, **how)
    coec.prune(dense, tmp_path / "out", kept=other, **how)
    stored = load_file(tmp_path / "out" / KEPT)
    assert stored["layers.0.mlp"].tolist() == UNITS["mlp"]


@pytest.mark.parametrize(("decided", "named"), [("heads", ""), ("auto", ""), ("heads", KEPT)])
def test_a_folder_says_what_its_units_are(decided, named, dense, tokens, tmp_path):
    settings = {"calibration": tokens, "samples": 8, "seq_len": 32, "preset": "paper",
                "compensation": "none"}  # fmt: skip
    coec.prune(dense, tmp_path / "heads", attention_units=decided, sparsity=0.5, **settings)
    kept = tmp_path / "heads" / named
    again = coec.prune(dense, tmp_path / "again", attention_units="auto", kept=kept, **settings)
    assert again.plan["widths"]["query_heads"]["after"] == 4
    assert tm.same_weights(tmp_path / "heads", tmp_path / "again")
    with pytest.raises(OptionError, match="attention_units"):
        coec.prune(dense, tmp_path / "no", attention_units="groups", kept=kept, **settings)


@pytest.mark.parametrize("preset", ["paper", "fast"])
def test_a_folder_says_which_blocks_it_leaves_out(preset, tokens, tmp_path):
    """Whose widths follow its own, and not a sparsity."""
    dense = tm.save(tm.tiny("llama", torch.float32, num_hidden_layers=4), tmp_path / "dense")
    settings = {"calibration": tokens, "samples": 8, "seq_len": 32, "bos": "off"}
    first, again = tmp_path / "first", tmp_path / "again"
    how = {**settings, "preset": "fast", "sparsity": 0.5, "multiple_of": 1, "drop_blocks": 1}
    dropped = coec.prune(dense, first, **how).plan["dropped_blocks"]
    report = coec.prune(dense, again, kept=first, preset=preset, **settings)
    assert report.plan["dropped_blocks"] == dropped
    assert tm.load(again).config.num_hidden_layers == 3
    assert (again / KEPT).read_bytes() == (first / KEPT).read_bytes()
    if preset == "fast":
        assert tm.same_weights(first, again)
    with pytest.raises(OptionError, match="drop_blocks"):
        coec.plan(dense, kept=first, preset="fast", drop_blocks=1)
    shallow = tm.save(tm.tiny("llama", torch.float32), tmp_path / "shallow")
    edited = json.loads((first / "coec.json").read_text())
    edited["plan"]["dropped_blocks"] = [7]
    (first / "coec.json").write_text(json.dumps(edited))
    with pytest.raises(OptionError, match="leaves out blocks 7, and this model has 2"):
        coec.plan(shallow, kept=first)
