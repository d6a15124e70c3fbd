"""A teacher other than the dense model: its predictions are learned, and its name is recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import coec
import tiny_models as tm
from coec.checkpoint.report import Report
from coec.config.recovery import Recovery
from coec.errors import CalibrationError, ModelError, OptionError, OutputError, UnfinishedError
from coec.models.dense import Dense
from coec.recovery.plan import footprints
from coec.recovery.session import Session
from outcomes import one_line

SETTINGS = {"tokens": 2048, "seq_len": 32, "learning_rate": 3e-3, "batch_size": 8}
IDS = torch.from_numpy(np.random.default_rng(5).integers(2, tm.VOCABULARY, (16, 32)))
PADDED = tm.VOCABULARY + 20


def pad(folder: Path) -> Path:
    """Append random rows to the embedding and the head of a folder's model, in place."""

    def longer(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            more = torch.randn(PADDED - tm.VOCABULARY, tm.HIDDEN)
            tensors[name] = torch.cat([tensors[name], more])

    tm.edit_config(folder, vocab_size=PADDED)
    return tm.edit_weights(folder, longer)


def tuned(folder: Path) -> Path:
    """Save the dense model with other values, as if it was trained further."""
    model = tm.tiny("llama", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    return tm.save(model, folder)


@pytest.fixture(scope="module")
def sibling(tmp_path_factory):
    return tuned(tmp_path_factory.mktemp("sibling") / "sibling")


@pytest.fixture
def recover(dense, pruned, tokens, sibling, tmp_path):
    """Recovers the pruned model into `out` by the sibling, with a few of the settings changed."""

    def call(out="out", start=(dense, pruned), **changes):
        how = SETTINGS | {"text": tokens, "teacher": sibling} | changes
        return coec.recover(*start, tmp_path / out, **how)

    return call


@pytest.fixture(scope="module")
def taught(dense, pruned, tokens, sibling, tmp_path_factory):
    out = tmp_path_factory.mktemp("taught") / "out"
    return out, coec.recover(dense, pruned, out, text=tokens, teacher=sibling, **SETTINGS)


def test_the_result_is_nearer_to_the_teacher_on_other_windows(taught, sibling, pruned):
    out, report = taught
    validation = report.recoveries[-1]["held_out"]
    assert validation["after"] < 0.95 * validation["before"]
    before, after = (coec.perplexity(m, IDS, baseline=sibling, seq_len=32) for m in (pruned, out))
    assert after.kl < before.kl


def test_the_teacher_decides_what_is_learned(taught, recover, sibling, tmp_path):
    recover(teacher=None)
    models = taught[0], tmp_path / "out"
    one, other = (coec.perplexity(m, IDS, baseline=sibling, seq_len=32).kl for m in models)
    assert one < 0.98 * other


def test_the_report_and_the_card_say_who_taught(taught, recover, sibling, tmp_path):
    record, card = Report.read(taught[0]).recoveries[-1], (taught[0] / "README.md").read_text()
    assert record["teacher"] == "sibling"
    assert record["teacher_sha256"] == Dense.open(sibling).digest
    assert "KL to `sibling`, which taught it, " in card
    assert "--teacher sibling" in card
    assert "the dense model" not in card.partition("## Recovered")[2].partition("```")[0]
    assert recover(teacher=None, tokens=256).recoveries[-1]["teacher"] is None
    assert "KL to the dense model " in (tmp_path / "out/README.md").read_text()


def test_the_command_says_who_taught(run, dense, pruned, tokens, sibling, tmp_path):
    flags = ("--text", tokens, "--tokens", 512, "--seq-len", 32, "--teacher", sibling)
    status, out, err = run("recover", dense, pruned, tmp_path / "out", *flags)
    assert status == 0, err
    assert "taught by        sibling" in out
    assert "KL to teacher    " in out
    assert f"--baseline {dense}" in out


def test_a_run_goes_on_with_its_teacher_alone(taught, recover, dense, tmp_path, monkeypatch):
    def ended(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_write", ended)
        with pytest.raises(KeyboardInterrupt):
            recover()
    with pytest.raises(UnfinishedError, match="teacher was"):
        recover(teacher=dense)
    seen = []
    recover(progress=lambda phase, done, total: seen.append((phase, done)))
    assert ("resuming steps", 8) in seen
    assert tm.same_weights(tmp_path / "out", taught[0])


@pytest.mark.parametrize("predictions", ["live", "stored"])
def test_a_teacher_that_is_padded_teaches_the_same(predictions, recover, tmp_path):
    padded = pad(tuned(tmp_path / "padded"))
    one, other = (
        recover(name, predictions=predictions, **how).recoveries[-1]
        for name, how in (("one", {}), ("other", {"teacher": padded}))
    )
    assert other["curve"] == one["curve"]
    assert other["held_out"] == one["held_out"]
    assert tm.same_weights(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("predictions", ["live", "stored"])
def test_a_student_that_is_padded_learns_the_same(
    predictions, recover, dense, tokens, sibling, tmp_path
):
    padded = pad(tm.save(tm.tiny("llama", torch.float32), tmp_path / "padded"))
    starts = []
    for model in (dense, padded):
        out = tmp_path / f"pruned-{model.name}"
        coec.prune(model, out, calibration=tokens, samples=24, seq_len=32, preset="paper")
        starts.append((model, out))
    one, other = (
        recover(start[0].name + "-out", start, predictions=predictions).recoveries[-1]
        for start in starts
    )
    assert [point["kl"] for point in other["curve"]] == pytest.approx(
        [point["kl"] for point in one["curve"]], rel=1e-4
    )
    assert other["held_out"]["before"] == pytest.approx(one["held_out"]["before"], rel=1e-4)


def test_the_teacher_writes_the_text_with_the_tokens_of_both(recover, tmp_path):
    """The rows of the padding are likely here: a student without them could not read their ids."""
    padded = pad(tuned(tmp_path / "padded"))
    record = recover(text="self", tokens=256, teacher=padded).recoveries[-1]
    assert record["text"]["source"] == "self (seed 1)"


def test_the_plan_counts_the_teacher(sibling, pruned, tmp_path):
    larger = tm.save(tm.tiny("llama", torch.float32, num_hidden_layers=4), tmp_path / "larger")
    sizes = [
        footprints(teacher, pruned, Recovery(tokens=512), torch.device("cpu"), None)[0]
        for teacher in (sibling, larger)
    ]
    counts = [Dense.open(model).parameters for model in (sibling, larger)]
    more = sizes[1].memory["teacher"] - sizes[0].memory["teacher"]
    assert more == 4 * (counts[1] - counts[0])


def test_the_dry_run_counts_the_teacher(run, dense, pruned, tmp_path):
    larger = tm.save(tm.tiny("llama", torch.float32, num_hidden_layers=4), tmp_path / "larger")
    flags = ("--dry-run", "--tokens", 512, "--seq-len", 32, "--json")
    one, other = (
        json.loads(run("recover", dense, pruned, *flags, *more)[1])["ways"][0]
        for more in ((), ("--teacher", larger))
    )
    assert other["memory"]["teacher"] > one["memory"]["teacher"]


def other_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    ids = list(vocabulary.values())
    content["model"]["vocab"] = dict(zip(vocabulary, [*ids[:2], *reversed(ids[2:])]))
    path.write_text(json.dumps(content))
    return folder


def fewer_positions(folder: Path) -> Path:
    tm.edit_config(folder, max_position_embeddings=16)
    return folder


def fewer_tokens(folder: Path) -> Path:
    def shorter(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:290].clone()

    tm.edit_config(folder, vocab_size=290)
    return tm.edit_weights(folder, shorter)


def not_finite(folder: Path) -> Path:
    return tm.edit_weights(folder, lambda tensors: tensors["lm_head.weight"].fill_(torch.nan))


BAD = {
    other_tokenizer: (ModelError, "have different tokenizers: the teacher must"),
    fewer_positions: (OptionError, "seq_len=32 is beyond"),
    fewer_tokens: (CalibrationError, "the teacher's vocabulary has 290"),
    not_finite: (ModelError, "lm_head.weight"),
}


@pytest.mark.parametrize("change", BAD)
def test_a_teacher_that_cannot_teach_is_refused(change, recover, tmp_path):
    error, words = BAD[change]
    with one_line(error, words):
        recover(teacher=change(tuned(tmp_path / "bad")))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_teacher_that_is_not_there_or_in_the_way_is_refused(recover, sibling, tmp_path):
    with one_line(ModelError, "no model at"):
        recover(teacher=str(tmp_path / "none"))
    with one_line(OutputError, "lie inside each other"):
        recover(tuned(tmp_path / "here"), teacher=tmp_path / "here", force=True)
    assert not (tmp_path / "out.partial").exists()
