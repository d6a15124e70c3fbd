"""A recovery: what it writes, what decides, how it goes on, what it refuses."""

import json
import os
import shlex
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import coec
import tiny_models as tm
from coec.checkpoint.card import card
from coec.checkpoint.journal import Journal
from coec.checkpoint.report import Report
from coec.config.recovery import Recovery
from coec.errors import CalibrationError, ModelError, OptionError, OutputError, UnfinishedError
from coec.events import recording
from coec.models.dense import Dense
from coec.models.files import sha256
from coec.recovery import distillation, prune_and_recover, session, text
from coec.recovery import job as job_module
from coec.recovery.job import Job
from coec.recovery.text import read_windows
from coec.text.windows import window_digests
from problems import failing

SETTINGS = {"tokens": 2048, "seq_len": 32, "learning_rate": 3e-3, "batch_size": 8}

IDS = torch.from_numpy(np.random.default_rng(5).integers(2, tm.VOCABULARY, (16, 32)))


@pytest.fixture(scope="module")
def recovered(dense, pruned, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("recovered") / "out"
    report = coec.recover(dense, pruned, out, text=tokens, **SETTINGS)
    return out, report


@pytest.fixture
def recover(dense, pruned, tokens, tmp_path):
    """Recovers the pruned model into `out`, with a few of the settings changed."""

    def call(out="out", **changes):
        return coec.recover(dense, pruned, tmp_path / out, **SETTINGS | {"text": tokens} | changes)

    return call


def weights(folder):
    opened = Dense.open(folder)
    return {name: opened.tensor(name) for name in opened.files}


def differing(a, b):
    theirs = weights(b)
    return [name for name, tensor in weights(a).items() if not torch.equal(tensor, theirs[name])]


def test_the_result_is_nearer_to_the_dense_model_on_other_windows(recovered, dense, pruned):
    out, report = recovered
    validation = report.recoveries[-1]["held_out"]
    assert validation["after"] < 0.95 * validation["before"]
    before, after = (coec.perplexity(m, IDS, baseline=dense, seq_len=32) for m in (pruned, out))
    assert after.kl < before.kl


@pytest.mark.parametrize(("seen", "both"), [(0, 0), (30, 0), (37, 2), (39, 4)])
def test_windows_that_calibrated_validate_nothing_while_there_are_others(seen, both):
    """Of 40 windows five validate; `seen` of all calibrated, and `both` do both."""
    ids = torch.arange(40 * 4).view(40, 4)
    calibrated = frozenset(window_digests(torch.cat([ids[:seen], ids + 1000])))
    trained, validation = text.split(ids, 0, calibrated)
    assert sorted(trained + validation) == list(range(40))
    assert (len(validation), sum(n < seen for n in validation)) == (5, both)


def test_passes_may_be_in_bfloat16(recovered, recover, dense, tmp_path):
    """As they are on a GPU; what is written has the dtypes of the start."""
    validation = recover(forward_dtype="bfloat16").recoveries[-1]["held_out"]
    assert validation["after"] < 0.95 * validation["before"]
    assert differing(tmp_path / "out", recovered[0])
    dtypes, expected = (
        {n: t.dtype for n, t in weights(f).items()} for f in (tmp_path / "out", recovered[0])
    )
    assert dtypes == expected
    with pytest.raises(OptionError, match="forward_dtype"):
        recover("other", forward_dtype="float16")


def test_the_result_is_the_same_format_with_other_weights(recovered, pruned):
    out, report = recovered
    files, expected = ({p.relative_to(f) for p in f.rglob("*")} for f in (out, pruned))
    assert files == expected
    for name in ("config.json", "coec/kept.safetensors", "tokenizer.json"):
        assert (out / name).read_bytes() == (pruned / name).read_bytes()
    dtypes, expected = ({n: t.dtype for n, t in weights(f).items()} for f in (out, pruned))
    assert dtypes == expected
    assert len(differing(out, pruned)) == len(weights(out))  # all weights are trained
    assert Report.read(out).recoveries == json.loads((out / "coec.json").read_text())["recoveries"]
    assert report.plan == Report.read(pruned).plan


def test_transformers_computes_what_was_validation(recovered, dense):
    out, report = recovered
    teacher, student = tm.load(dense), tm.load(out)
    record = report.recoveries[-1]
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, tm.VOCABULARY, (24, 32)))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    validation = ids[order[: record["held_out"]["windows"]].sort().values]
    p, q = (tm.logits(model, validation).log_softmax(-1) for model in (teacher, student))
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert float(kl) == pytest.approx(record["held_out"]["after"], rel=1e-4)


def test_the_card_and_the_report_say_what_was_done(recovered):
    out, report = recovered
    card, record = (out / "README.md").read_text(), report.recoveries[-1]
    assert "2,048 tokens" in card
    assert "coec recover" in card
    assert [point["tokens"] for point in record["curve"]][-1] == record["tokens"] == 2048
    assert Report.read(out).recoveries[-1]["text"]["source"] == "tokens.npy"
    assert record["passes"] == pytest.approx(2048 / 21 / 32, rel=0.01)


def test_the_command_on_the_card_has_what_is_not_usual(recovered):
    _, report = recovered
    record = report.recoveries[-1]
    changes = {"text_column": "body", "optimizer": "adamw-8bit"}
    changes["text"] = record["text"] | {"source": "my text.jsonl"}
    written = card(replace(report, recoveries=[record | changes]))
    command = written.partition("coec recover DENSE PRUNED OUT")[2].partition("```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["--text", "my text.jsonl", "--text-column", "body"]
    assert words[words.index("--optimizer") + 1] == "adamw-8bit"
    assert "--predictions" not in words


@pytest.mark.slow
def test_a_harmful_training_leaves_the_start(recover, pruned, tmp_path):
    record = recover(learning_rate=1.0).recoveries[-1]
    assert not record["improved"]
    assert record["held_out"]["after"] == record["held_out"]["before"]
    assert not differing(tmp_path / "out", pruned)


@pytest.mark.parametrize("rate", [100, 1e30])
def test_a_training_that_diverges_ends_at_its_first_state(rate, recover, pruned, tmp_path):
    with recording() as events:
        record = recover(learning_rate=rate).recoveries[-1]
    assert (record["steps"], record["tokens"], record["improved"]) == (2, 512, False)
    assert sum("diverged (at step 2" in event for event in events) == 1
    assert not differing(tmp_path / "out", pruned)
    json.loads((tmp_path / "out/coec.json").read_text(), parse_constant=pytest.fail)


def test_a_training_that_diverged_is_not_taken_up(recover, tmp_path, monkeypatch):
    whole = recover("whole", learning_rate=100).recoveries[-1]
    with monkeypatch.context() as patch:
        ending = failing(session.Session._validated, KeyboardInterrupt(), 1)
        patch.setattr(session.Session, "_validated", ending)
        with pytest.raises(KeyboardInterrupt):
            recover(learning_rate=100)
    with recording() as events:
        record = recover(learning_rate=100).recoveries[-1]
    assert sum("diverged (at step 2" in event for event in events) == 1
    for name in ("steps", "tokens", "passes", "curve", "held_out"):
        assert record[name] == whole[name]
    assert not differing(tmp_path / "out", tmp_path / "whole")


def test_few_windows_are_read_a_few_times_and_no_more(recover, monkeypatch):
    """Of 12 windows 2 validate: 10 are read four times, in steps of 8 windows."""
    seen, compute_loss = [], distillation.Distillation.compute_loss

    def noted(self, model, inputs, *given, **more):
        seen.extend(map(tuple, inputs["input_ids"].tolist() if model.training else []))
        return compute_loss(self, model, inputs, *given, **more)

    monkeypatch.setattr(distillation.Distillation, "compute_loss", noted)
    record = recover(text=IDS[:12], tokens="1B").recoveries[-1]
    assert (record["passes"], record["steps"], record["asked"]) == (text.PASSES, 5, 10**9)
    assert record["tokens"] == 32 * len(seen)
    assert sorted(Counter(seen).values()) == [text.PASSES] * 10


def test_predictions_that_were_stored_stand_for_the_teacher(recover, monkeypatch):
    monkeypatch.setattr(text, "TOP", tm.VOCABULARY)
    one, other = (
        recover(kind, predictions=kind).recoveries[-1]["held_out"] for kind in ("live", "stored")
    )
    assert other["before"] == pytest.approx(one["before"], rel=1e-3)
    assert other["after"] == pytest.approx(one["after"], rel=5e-3)


@pytest.mark.slow
def test_text_that_the_dense_model_writes(recover, tmp_path):
    one, other = (recover(name, text="self").recoveries[-1] for name in "ab")
    assert one["text"]["windows"] > 64
    assert not differing(tmp_path / "a", tmp_path / "b")
    assert other["curve"] == one["curve"]


def test_minutes_become_tokens_by_the_speed_of_the_first_steps(
    dense, pruned, tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "tokens_per_second", lambda *given: 200.0)
    settings = {"text": tokens, "minutes": 0.1, "seq_len": 32, "batch_size": 4}
    record = coec.recover(dense, pruned, tmp_path / "out", **settings).recoveries[-1]
    assert (record["asked"], record["steps"]) == (1200, 9)


def ended_at(name, monkeypatch, call):
    """Recover until a piece of a name is in the journal."""

    def ended(method):
        def wrapped(self, piece, *given, **facts):
            method(self, piece, *given, **facts)
            if piece.startswith(name):
                raise KeyboardInterrupt

        return wrapped

    with monkeypatch.context() as patch:
        for method in ("note", "put"):
            patch.setattr(Journal, method, ended(getattr(Journal, method)))
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["state", "text", "start"])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    ending, recovered, recover, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    ended_at(ending, monkeypatch, recover)
    assert not out.exists()
    with pytest.raises(UnfinishedError, match="lora was null, now 4"):
        recover(lora=4)
    seen = []
    recover(progress=lambda phase, done, total: seen.append((phase, done)))
    assert not differing(out, recovered[0])
    assert (("resuming steps", 2) in seen) == (ending == "state")
    assert (("resuming steps", 0) in seen) == (ending == "start")
    assert not out.with_name("out.partial").exists()


@pytest.mark.slow
def test_a_run_whose_folder_was_moved_goes_on_to_the_same_bits(
    recovered, recover, tmp_path, monkeypatch
):
    ended_at("state 4", monkeypatch, recover)
    (tmp_path / "out.partial").rename(tmp_path / "moved.partial")
    seen = []
    recover("moved", progress=lambda phase, done, total: seen.append((phase, done)))
    assert ("resuming steps", 4) in seen
    assert not differing(tmp_path / "moved", recovered[0])


def saved_state(folder, step, best):
    """Write what looks like a state of the Trainer; return the digests of its files."""
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(bytes([step]) * 100)
    best_path = None if best is None else str(folder / f"checkpoint-{best}")
    (path / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": best_path}))
    return {name: sha256(path / name) for name in ("model.safetensors", "trainer_state.json")}


def test_a_state_that_was_not_finished_is_not_taken_up(tmp_path):
    saved = {step: saved_state(tmp_path, step, 2) for step in (2, 4)}
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-other").write_text("a file")
    assert distillation.last_state(tmp_path, saved) == str(tmp_path / "checkpoint-4")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert distillation.last_state(tmp_path / "none", {}) is None


def flip(path, count=1):
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content))[:count]:
        content[place] ^= 1
    path.write_bytes(content)


STATE_DAMAGE = {
    "a bit": flip,
    "missing": lambda path: path.unlink(),
    "besides": lambda path: path.with_name("besides.bin").write_bytes(b"1"),
    "a link": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: os.mkfifo(path.with_name("scaler.pt")),  # the Trainer reads such a file
}


@pytest.mark.parametrize("damage", STATE_DAMAGE)
def test_a_state_that_was_changed_is_not_taken_up(damage, tmp_path):
    saved = {step: saved_state(tmp_path, step, 2) for step in (2, 4)}
    STATE_DAMAGE[damage](tmp_path / "checkpoint-4" / "model.safetensors")
    with recording() as events:
        assert distillation.last_state(tmp_path, saved) == str(tmp_path / "checkpoint-2")
    assert ["checkpoint-4' is not what was saved" in event for event in events] == [True]
    assert not (tmp_path / "checkpoint-4").exists()


def test_a_state_whose_best_was_changed_is_not_taken_up(tmp_path):
    saved = {2: saved_state(tmp_path, 2, 2), 4: saved_state(tmp_path, 4, 4)}
    saved[6] = saved_state(tmp_path, 6, 4)
    flip(tmp_path / "checkpoint-4" / "model.safetensors")
    assert distillation.last_state(tmp_path, saved) == str(tmp_path / "checkpoint-2")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model", "optimizer", "trainer_state"])
def test_a_damaged_state_ends_in_the_same_bits(file, recovered, recover, tmp_path, monkeypatch):
    ended_at("state 4", monkeypatch, recover)
    flip(next((tmp_path / "out.partial/states/checkpoint-4").glob(f"{file}.*")), 2048)
    recover()
    assert not differing(tmp_path / "out", recovered[0])


def test_what_was_recovered_can_be_recovered_again(recovered, dense, tokens, tmp_path):
    report = coec.recover(dense, recovered[0], tmp_path / "out", text=tokens, **SETTINGS)
    assert len(report.recoveries) == 2


BAD = {
    "another dense model": ({}, ModelError, "was not made from"),
    "no report": ({}, ModelError, "no coec.json in"),
    "two budgets": ({"minutes": 1}, OptionError, "tokens and minutes"),
    "minutes": ({"tokens": None, "minutes": 1, "predictions": "stored"}, OptionError, "=stored"),
    "nothing": ({"tokens": 0}, OptionError, "tokens"),
    "words": ({"tokens": "many"}, OptionError, "tokens"),
    "batch": ({"batch_size": 100}, OptionError, "batch_size"),
    "unknown": ({"epochs": 3}, OptionError, "unknown setting 'epochs'"),
    "long windows": ({"seq_len": 65}, OptionError, "seq_len"),
    "batch and windows": ({"text": IDS[:8], "batch_size": 30}, OptionError, "batch_size=30"),
    "one window": ({"seq_len": 64}, CalibrationError, "holds rows of 32 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_work(case, dense, pruned, tokens, tmp_path):
    changed, error, words = BAD[case]
    first, second = dense, pruned
    if case == "another dense model":
        first = tm.save(tm.tiny("llama", torch.float32, rms_norm_eps=1e-4), tmp_path / "dense")
    if case == "no report":
        second = dense
        first = pruned
    with pytest.raises(error, match=words):
        coec.recover(first, second, tmp_path / "out", **{"text": tokens, **SETTINGS, **changed})
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("characters", "changes", "error", "words"),
    [
        (40, {}, CalibrationError, "one window"),
        (400, {"tokens": 10**6, "batch_size": 1000}, OptionError, "batch_size"),
    ],
)
def test_a_text_that_is_too_short_is_refused(characters, changes, error, words, recover, tmp_path):
    with pytest.raises(error, match=words):
        recover(text=tm.text_file(tmp_path / "short.txt", characters), **changes)
    assert not (tmp_path / "out.partial").exists()


def test_an_output_that_is_there_is_not_replaced(recovered, recover, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(recovered[0], out)
    with pytest.raises(OutputError, match="is not empty"):
        recover()
    recover(force=True, tokens=512)
    assert Report.read(out).recoveries[-1]["tokens"] == 512


def test_budgets_are_written_as_people_write_them():
    amounts = {"300k": 300_000, "20M": 20_000_000, "1.5b": 1_500_000_000, "7": 7, 5: 5}
    for amount, tokens in amounts.items():
        assert Recovery(tokens=amount).tokens == tokens
    assert Recovery().tokens == 10_000_000
    assert Recovery(minutes=3).tokens is None


ENOUGH = {"tokens": 32 * 60, "batch_size": 1, "learning_rate": None}
"""A budget that rates are tried within: two of sixty steps, three times."""


@pytest.fixture
def many(recover, tmp_path, monkeypatch):
    """Recovers on enough text that rates are tried."""
    monkeypatch.setattr(session, "_TRIAL_STEPS", 2)
    path = tmp_path / "many.npy"
    np.save(path, np.random.default_rng(6).integers(2, tm.VOCABULARY, (100, 32)))
    return lambda *out, **changes: recover(*out, **{"text": path} | ENOUGH | changes)


@pytest.mark.slow
def test_rates_are_tried_where_a_tenth_of_the_budget_is_enough(many, monkeypatch):
    assert many(tokens=32 * 59).recoveries[-1]["rates_tried"] == []
    assert many("given", learning_rate=1e-3).recoveries[-1]["rates_tried"] == []
    record = many("tried").recoveries[-1]
    tried = {row["learning_rate"]: row["kl"] for row in record["rates_tried"]}
    low, rule, high = tried
    assert (rule / low, high / rule) == (pytest.approx(3), pytest.approx(3))
    assert record["learning_rate"] == min(tried, key=tried.__getitem__)
    assert (record["steps"], record["improved"]) == (60, True)
    # A rule that is a hundred times too low: the highest of the three is taken.
    monkeypatch.setattr(job_module, "RATE", job_module.RATE / 100)
    record = many("low").recoveries[-1]
    assert record["learning_rate"] == record["rates_tried"][2]["learning_rate"]


def test_a_rate_that_diverges_is_not_taken(many, monkeypatch):
    evaluate, calls = distillation.Distillation.evaluate, []

    def third_diverges(self, *args, **kwargs):
        calls.append(evaluate(self, *args, **kwargs))
        return {"eval_loss": float("nan")} if len(calls) == 3 else calls[-1]

    monkeypatch.setattr(distillation.Distillation, "evaluate", third_diverges)
    record = many().recoveries[-1]
    assert len(record["rates_tried"]) == 2
    assert record["learning_rate"] in {row["learning_rate"] for row in record["rates_tried"]}


@pytest.mark.slow
def test_a_killed_trial_of_rates_is_not_done_again(many, monkeypatch, tmp_path):
    whole = many("whole").recoveries[-1]
    with monkeypatch.context() as patch:
        killed = failing(distillation.Distillation.train, KeyboardInterrupt(), 4)
        patch.setattr(distillation.Distillation, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            many()
    told = []
    again = many(progress=lambda *step: told.append(step[0])).recoveries[-1]
    assert "trying learning rates" not in told
    assert not differing(tmp_path / "out", tmp_path / "whole")
    assert again["rates_tried"] == whole["rates_tried"]


def test_a_small_budget_has_small_steps_and_a_lower_rate_for_each(dense, pruned, tmp_path):
    steps = {20_000_000: 8, 3_000_000: 2, 1_000_000: 1, 1000: 1, None: 8}
    for tokens, windows in steps.items():
        assert Recovery().windows_per_step(2048, tokens) == windows
    for tokens in (20_000_000, 5 * 2048, None):
        assert Recovery(batch_size=5).windows_per_step(2048, tokens) == 5
    models = Dense.open(dense), Dense.open(pruned)
    job = Job.checked(*models, tmp_path / "out", Recovery(text=IDS, seq_len=32), trust=False)
    assert job.rate(0.4, 4) == pytest.approx(2 * job.rate(0.4, 1))
    assert job.rate(0.4, 4) == pytest.approx(2 * job.rate(0.1, 4))
    assert job.rate(4.0, 1) == job.rate(1.0, 1)
    lora = replace(job, recovery=job.recovery.model_copy(update={"lora": 4}))
    assert lora.rate(0.4, 4) == pytest.approx(10 * job.rate(0.4, 4))


def test_a_schedule_divides_its_batch_among_processes():
    schedule = session.Schedule.of(10_000, 10, batch=8, most_at_once=3, processes=2)
    assert (schedule.batch, schedule.at_once, schedule.accumulated) == (8, 2, 2)
    assert schedule.steps == 125
    odd = session.Schedule.of(10_000, 10, batch=8, most_at_once=100, processes=3)
    assert (odd.batch, odd.at_once) == (9, 3)


def test_windows_begin_as_those_that_calibrated(tmp_path):
    dense = tm.begin_texts(tm.save(tm.tiny("llama", torch.float32), tmp_path / "dense"))
    settings = {"calibration": tm.text_file(tmp_path / "text.txt"), "samples": 12, "seq_len": 32}
    for bos, out in (("on", tmp_path / "on"), ("off", tmp_path / "off")):
        prune_and_recover(dense, out, 256, bos=bos, **settings)
        record = Report.read(out).recoveries[-1]
        assert record["text"]["bos"] is (bos == "on")


def test_a_mixture_of_texts_trains_by_its_shares(recover, dense, tokens, tmp_path):
    np.save(tmp_path / "other.npy", IDS.numpy())
    text = f"{tokens}=2,{tmp_path}/other.npy"
    settings = Recovery(text=text)
    windows = read_windows(Dense.open(dense), settings, 32, 6, trust_remote_code=False)
    own, other = (torch.from_numpy(np.load(path)) for path in (tokens, tmp_path / "other.npy"))
    expected = torch.stack([own[0], other[0], own[1], own[2], other[1], own[3]])
    assert torch.equal(windows.ids, expected)
    assert windows.source == text
    with recording() as events:
        few = read_windows(Dense.open(dense), settings, 32, 66, trust_remote_code=False)
    assert len(few.ids) == 24 + 16
    assert "tokens.npy' has 24 windows, and its share is 44" in "".join(events)
    report = recover(text=text, tokens=256)
    assert report.as_dict()["recoveries"][-1]["text"]["source"] == "tokens.npy=2,other.npy"
    report = recover("own", text=f"{tokens},self", tokens=256)
    assert report.as_dict()["recoveries"][-1]["text"]["source"] == "tokens.npy,self"
