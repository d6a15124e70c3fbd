"""Answers of the dense model to a user's prompts, as text."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import coec
import tiny_models as tm
from coec.errors import CalibrationError, CoecError, OptionError, UnfinishedError
from coec.streams import answers as module
from coec.streams.answers import Prompts
from coec.text.tokens import load_tokenizer
from outcomes import raising

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = {"preset": "fast", "samples": 4, "seq_len": 32, "answer_tokens": 20}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    tm.save(tm.tiny("llama", torch.float32), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    drawn = {"do_sample": True, "temperature": 0.8, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(drawn))
    return folder


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"self:{path}"


@pytest.fixture
def prompts(tmp_path):
    """Prompts of every form, in two languages."""
    rows = [{"prompt": f"w{n} w{n + 1}"} for n in range(6)]
    rows += [{"prompt": [{"role": "user", "content": f"ŵ{n} 数"}]} for n in range(6)]
    rows += [{"messages": [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]}]
    rows += [{"conversations": [{"from": "human", "value": "w3"}]}]
    return written(tmp_path / "prompts.jsonl", rows)


def read(dense, source, positions=128):
    return Prompts.read(source, "text", load_tokenizer(dense), 20, positions)


def network(dense, **changes):
    model = tm.load(dense, torch.float32)
    model.generation_config = GenerationConfig(**{"eos_token_id": 1, "pad_token_id": 1} | changes)
    return model


def test_prompts_are_rendered_up_to_the_answer(dense, prompts):
    tokenizer, found = load_tokenizer(dense), read(dense, prompts).all
    texts = ["<user>w0 w1\n<assistant>", "<user>ŵ0 数\n<assistant>",
             "<system>w1\n<user>w2\n<assistant>", "<user>w3\n<assistant>"]  # fmt: skip
    for number, text in zip((0, 6, 12, 13), texts, strict=True):
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found[number].tolist() == expected


def test_answers_are_those_of_generate(dense, prompts):
    """Greedy ones, each alone, although prompts of other lengths are in the batch."""
    model, found = network(dense), read(dense, prompts)
    for chat in found.answered(model, found.all, seed=0, at_once=5):
        (prompt,) = [p for p in found.all if torch.equal(p, chat.ids[: len(p)])]
        alone = model.generate(prompt[None], max_new_tokens=20)[0]
        assert torch.equal(chat.ids, alone)
        assert chat.answered.tolist() == [n >= len(prompt) for n in range(len(chat.ids))]


def test_fillers_have_no_part_in_answers(dense):
    """Rules on tokens that are there already would count those before a shorter prompt."""
    prompts = [torch.tensor([5, 9, 30]), torch.arange(10, 40)]
    model = network(dense)
    end = int(model.generate(prompts[0][None], max_new_tokens=1)[0, -1])
    assert end not in torch.cat(prompts)
    model = network(dense, no_repeat_ngram_size=1, eos_token_id=end)
    answer = Prompts("self:a.jsonl", prompts, 20, 128).answered(model, prompts, 0, at_once=5)[0]
    assert answer.ids.tolist() == [5, 9, 30, end]


@pytest.mark.parametrize(
    "changes", [{"num_return_sequences": 2}, {"return_dict_in_generate": True}]
)
def test_settings_that_concern_no_words_do_not_apply(changes, dense, prompts):
    found = read(dense, prompts)
    usual, other = (
        found.answered(network(dense, do_sample=True, **c), found.all, seed=0, at_once=5)
        for c in ({}, changes)
    )
    assert [chat.ids.tolist() for chat in usual] == [chat.ids.tolist() for chat in other]


def test_settings_that_fail_are_one_line(dense, prompts):
    model, found = network(dense, stop_strings=["a"]), read(dense, prompts)
    with pytest.raises(
        CalibrationError, match="cannot answer .*stop string.*generation_config.json"
    ):
        found.answered(model, found.all, seed=0, at_once=5)


@pytest.mark.parametrize("drawn", [False, True])
def test_answers_of_logits_that_are_not_finite_are_refused(drawn, dense, prompts):
    model, found = network(dense, do_sample=drawn), read(dense, prompts)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(CalibrationError, match="its logits are not finite"):
        found.answered(model, found.all, seed=0, at_once=5)


def test_own_settings_and_the_seed_decide_answers(dense, prompts):
    model, found = network(dense, do_sample=True), read(dense, prompts)
    state = torch.get_rng_state()
    one, same, other = (
        [chat.ids.tolist() for chat in found.answered(model, found.all, seed, at_once=5)]
        for seed in (0, 0, 1)
    )
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), state)
    greedy = network(dense, do_sample=True, top_k=1)
    assert [c.ids.tolist() for c in found.answered(greedy, found.all, 0, at_once=5)] == [
        c.ids.tolist() for c in found.answered(network(dense), found.all, 1, at_once=5)
    ]


def test_a_resumed_run_asks_only_what_is_not_answered(dense, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP", 3)
    monkeypatch.setattr(module, "windows_that_fit", lambda *_: 3)
    settings = SETTINGS | {"calibration": prompts, "samples": 9}
    report = coec.prune(dense, tmp_path / "whole", **settings)
    assert "answers, seed 0" in report.calibration["source"]
    asked, generated = [], module._generated

    def failing(*arguments):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(arguments)
        return generated(*arguments)

    monkeypatch.setattr(module, "_generated", failing)
    with pytest.raises(KeyboardInterrupt):
        coec.prune(dense, tmp_path / "out", **settings)
    monkeypatch.setattr(module, "_generated", lambda *a: (asked.append(a), generated(*a))[1])
    resumed = coec.prune(dense, tmp_path / "out", **settings)
    monkeypatch.setattr(module, "_generated", generated)
    assert resumed.calibration["windows_sha256"] == report.calibration["windows_sha256"]
    assert tm.same_weights(tmp_path / "whole", tmp_path / "out")
    seeds = [arguments[-1] for arguments in asked]
    assert len(seeds) == len(set(seeds))


@pytest.mark.parametrize(("samples", "size"), [(8, 5), (1, 2)])
def test_a_group_of_prompts_fills_a_batch_if_so_many_are_needed(
    samples, size, dense, prompts, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "GROUP", 2)
    monkeypatch.setattr(module, "windows_that_fit", lambda *_: 5)
    sizes, generated = [], module._generated
    monkeypatch.setattr(
        module, "_generated", lambda *a: (sizes.append(len(a[1])), generated(*a))[1]
    )
    coec.prune(dense, tmp_path / "out", **SETTINGS | {"calibration": prompts, "samples": samples,
                                                      "holdout": 0})  # fmt: skip
    assert max(sizes) == size


@pytest.mark.parametrize("command", ["prune", "recover"])
def test_other_generation_settings_are_refused_by_a_resumed_run(
    command, dense, prompts, tmp_path, monkeypatch
):
    """Answers of two kinds would be in one text."""
    folder = shutil.copytree(dense, tmp_path / "model")
    coec.prune(folder, tmp_path / "pruned", **SETTINGS | {"calibration": prompts})

    def run():
        if command == "prune":
            coec.prune(folder, tmp_path / "out", **SETTINGS | {"calibration": prompts})
        else:
            coec.recover(folder, tmp_path / "pruned", tmp_path / "out", text=prompts, tokens=600,
                         seq_len=32)  # fmt: skip

    with monkeypatch.context() as patch:
        patch.setattr(module, "_generated", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    with pytest.raises(UnfinishedError, match="generation_config was"):
        run()


def test_shares_of_a_text_and_of_answers(dense, prompts, tmp_path):
    text = tm.text_file(tmp_path / "text.txt")
    report = coec.prune(
        dense, tmp_path / "out", **SETTINGS | {"calibration": f"{text}=3,{prompts}=1"}
    )
    assert report.calibration["windows"] == 4
    with_own = coec.prune(dense, tmp_path / "b", **SETTINGS | {"calibration": f"{prompts},self"})
    assert with_own.calibration["windows"] == 4


def test_the_baseline_answers_in_an_evaluation(dense, prompts, tmp_path):
    found = coec.perplexity(dense, prompts, baseline=dense, samples=3, seq_len=32)
    every = coec.perplexity(dense, prompts, baseline=dense, samples=1000, seq_len=32)
    assert found.windows == 3 < every.windows < 1000
    assert (found.windows, found.kl) == (3, pytest.approx(0, abs=1e-9))
    with pytest.raises(OptionError, match="is written by the baseline: give baseline"):
        coec.perplexity(dense, prompts, samples=3, seq_len=32)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bos": "on"}, "bos=on has no effect with text=self"),
        ({"max_windows": 2}, "max_windows has no effect with text=self.*: leave it out"),
        ({"text": "self:a.jsonl,b.txt"}, "is a mixture of texts"),
    ],
)
def test_settings_that_do_nothing_for_answers_are_refused(settings, match, dense, prompts):
    how = {"text": prompts, "baseline": dense, "samples": 3, "seq_len": 32}
    with pytest.raises(CoecError, match=match):
        coec.perplexity(dense, **how | settings)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
         "line 41: a prompt ends with the user's turn"),
        ({"prompt": [{"role": "user", "content": "w1"}, "w2"]}, "line 41: a chat is a list of"),
        ({"prompt": 7}, "line 41: column 'prompt' holds 7"),
        ({"prompt": "w1 " * 200}, "line 41: the prompt has .* and the model 64 positions"),
        ({"prompt": "a\ud800"}, "line 41: character 2 is half of a surrogate pair"),
    ],
)  # fmt: skip
def test_one_wrong_row_is_named_by_its_line(row, match, dense, tmp_path):
    rows = [{"prompt": f"w{n}"} for n in range(40)] + [row]
    source = written(tmp_path / "prompts.jsonl", rows)
    with pytest.raises(CalibrationError, match=match):
        coec.prune(dense, tmp_path / "out", **SETTINGS | {"calibration": source})
    assert not (tmp_path / "out.partial").exists()


def test_too_few_answers_are_refused_with_a_way_out(dense, prompts, tmp_path):
    few = SETTINGS | {"calibration": prompts, "samples": 400}
    with pytest.raises(CalibrationError, match=r"has 14 prompts, whose answers fill \d+ windows"):
        coec.prune(dense, tmp_path / "out", **few)


def test_the_command_that_got_too_few_answers_is_not_offered_again(run, dense, prompts, tmp_path):
    sizes = ("--samples", 400, "--seq-len", 32, "--answer-tokens", 20)
    command = ("prune", dense, tmp_path / "out", "--sparsity", 0.3, "--calibration", prompts)
    status, _, err = run(*command, *sizes)
    assert status == 1
    *_, kept, last = err.splitlines()
    assert "is kept in" in kept
    assert "--restart" in last


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"calibration": "self:none.jsonl"}, "no text at 'none.jsonl'"),
        ({"calibration": "self:notes.txt"}, "'notes.txt' holds no prompts: give self:FILE"),
        ({"calibration": "self", "answer_tokens": 5}, "answer_tokens has no effect without calib"),
        ({"calibration": "self:a.jsonl", "vocabulary": 100}, "set vocabulary_text"),
    ],
)
def test_bad_prompts_are_refused_before_work(settings, match, dense, tmp_path):
    with pytest.raises(CoecError, match=match):
        coec.prune(dense, tmp_path / "out", preset="fast", **settings)


def test_recover_trains_on_answers_and_resumes(dense, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP", 3)
    monkeypatch.setattr(module, "windows_that_fit", lambda *_: 3)
    text = tm.text_file(tmp_path / "text.txt")
    coec.prune(dense, tmp_path / "pruned", calibration=text, preset="fast", samples=4, seq_len=32)
    settings = {"text": f"{prompts},{text}", "tokens": 600, "seq_len": 32, "answer_tokens": 20}
    report = coec.recover(dense, tmp_path / "pruned", tmp_path / "whole", **settings)
    assert report.recoveries[-1]["text"]["source"] == settings["text"]
    generated = module._generated
    seeds = []

    def failing(*arguments):
        if len(seeds) == 2:
            raise KeyboardInterrupt
        seeds.append(arguments[-1])
        return generated(*arguments)

    monkeypatch.setattr(module, "_generated", failing)
    with pytest.raises(KeyboardInterrupt):
        coec.recover(dense, tmp_path / "pruned", tmp_path / "out", **settings)
    monkeypatch.setattr(module, "_generated", lambda *a: (seeds.append(a[-1]), generated(*a))[1])
    coec.recover(dense, tmp_path / "pruned", tmp_path / "out", **settings)
    assert tm.same_weights(tmp_path / "whole", tmp_path / "out")
    assert len(seeds) == len(set(seeds))


def test_recover_refuses_a_wrong_prompt_before_work(dense, prompts, tmp_path):
    coec.prune(dense, tmp_path / "pruned", **SETTINGS | {"calibration": prompts})
    source = written(tmp_path / "bad.jsonl", [{"prompt": "w1"}, {"prompt": 7}])
    for text, match in ((source, "line 2: column 'prompt' holds 7"),
                        (f"{prompts},none.txt", "no text at 'none.txt'")):  # fmt: skip
        with pytest.raises(CalibrationError, match=match):
            coec.recover(dense, tmp_path / "pruned", tmp_path / "out", text=text, tokens=600,
                         seq_len=32)  # fmt: skip
    with pytest.raises(OptionError, match="answer_tokens has no effect"):
        coec.recover(dense, tmp_path / "pruned", tmp_path / "out", text="self", answer_tokens=5)
    assert not (tmp_path / "out.partial").exists()


def test_recover_refuses_a_prompt_that_its_teacher_has_no_positions_for(dense, prompts, tmp_path):
    coec.prune(dense, tmp_path / "pruned", **SETTINGS | {"calibration": prompts})
    short = tm.tiny("llama", torch.float32, max_position_embeddings=32)
    teacher = tm.save(short, tmp_path / "teacher")
    source = written(tmp_path / "long.jsonl", [{"prompt": "w1 " * 8}])
    with pytest.raises(CalibrationError, match="has 42 tokens, and the model 32 positions"):
        coec.recover(dense, tmp_path / "pruned", tmp_path / "out", text=source, tokens=600,
                     seq_len=32, teacher=teacher)  # fmt: skip


def test_recover_refuses_ids_that_a_shorter_teacher_does_not_have(dense, prompts, tmp_path):
    """They are in the third window, after those that are read before work."""
    wide = shutil.copytree(dense, tmp_path / "wide")
    tm.save(tm.tiny("llama", torch.float32, vocab_size=tm.VOCABULARY + 20), wide)
    coec.prune(wide, tmp_path / "pruned", **SETTINGS | {"calibration": prompts})
    ids = torch.full((8, 32), 5)
    ids[2] = tm.VOCABULARY + 3
    np.save(tmp_path / "ids.npy", ids.numpy())
    with pytest.raises(
        CalibrationError, match=f"has the token id {tm.VOCABULARY + 3}, the teacher"
    ):
        coec.recover(wide, tmp_path / "pruned", tmp_path / "out", tokens=600, seq_len=32,
                     text=f"{prompts},{tmp_path}/ids.npy", teacher=dense)  # fmt: skip
