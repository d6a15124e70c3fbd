"""Text of the model's own."""

import shutil
from types import SimpleNamespace

import pytest
import torch

import coec
import tiny_models as tm
from coec import pruning
from coec.config.recipe import Recipe
from coec.devices import FreeMemory
from coec.errors import CalibrationError, ModelError
from coec.models.dense import Dense
from coec.models.description import Description
from coec.planning.memory import window_bytes
from coec.planning.plan import Plan
from coec.streams import self_text as module
from coec.streams.self_text import sample_from_model, windows_that_fit
from coec.streams.windows import CalibrationText
from coec.text.tokens import load_tokenizer
from outcomes import raising
from paper_models import LLAMA_8B


@pytest.fixture(scope="module")
def model():
    return tm.tiny("llama", torch.float32)


def draw(model, seed=0, tokenizer=None, samples=40):
    return sample_from_model(model, tokenizer, samples=samples, seq_len=12, seed=seed)


def test_the_seed_decides_the_text(model):
    assert torch.equal(draw(model).ids, draw(model).ids)
    assert not torch.equal(draw(model).ids, draw(model, seed=1).ids)


@pytest.mark.parametrize("at_once", [1, 8, 16])
def test_windows_do_not_depend_on_how_many_are_sampled_at_once(model, at_once):
    some = sample_from_model(model, None, samples=40, seq_len=12, seed=0, at_once=at_once)
    assert torch.equal(some.ids, draw(model).ids)


def test_tokens_are_those_that_multinomial_draws(model):
    windows = draw(model).ids
    for number in (0, 39):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(tm.VOCABULARY, (1, 1), generator=generator)
        while ids.shape[1] < 12:
            with torch.no_grad():
                logits = model(ids).logits[0, -1]
            logits[model.config.eos_token_id] = -torch.inf
            new = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            ids = torch.cat([ids, new[None]], dim=1)
        assert torch.equal(windows[number], ids[0])


def test_no_two_windows_are_alike_nor_two_texts(model):
    windows = torch.cat([draw(model, seed=seed).ids for seed in range(5)])
    assert len(windows.unique(dim=0)) == len(windows)


def test_so_many_are_sampled_at_once_as_fit(monkeypatch):
    described = Description.of(LLAMA_8B)
    size = window_bytes(described.shape, 128256, 2048, 2)
    assert 2**28 < size < 1.3 * 2**28  # keys and values of 131 kB for a token
    free = 24 * 10**9 - 2 * 8_030_261_248
    network, counts = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16), []
    for one in (None, 2**36, free, 10**9, 0):
        monkeypatch.setattr(module.FreeMemory, "of", lambda _, one=one: FreeMemory(one, None))
        counts.append(windows_that_fit(described, network, 2048))
    assert counts == [128, 128, 16, 2, 1]


def test_logits_that_are_not_finite_are_one_line():
    broken = tm.tiny("llama", torch.float32)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.inf)
    with pytest.raises(CalibrationError, match="logits are not finite.*forward_dtype=NAME"):
        draw(broken)


def test_every_window_is_full_and_never_ends(model):
    windows = draw(model)
    assert windows.ids.shape == (40, 12)
    assert not (windows.ids == model.config.eos_token_id).any()
    assert windows.source == "self (seed 0)"


def test_the_global_random_state_is_left_alone(model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draw(model)
    assert torch.equal(torch.rand(3), expected)


def test_windows_start_with_what_the_tokenizer_starts_with(shared, tmp_path):
    folder = tm.readable(shared / "models/stories260K", tmp_path / "model")
    model, tokenizer = tm.load(folder), load_tokenizer(folder)
    windows = draw(model, tokenizer=tokenizer, samples=4)
    assert (windows.ids[:, 0] == tokenizer.bos_token_id).all()
    assert windows.special_tokens == 1


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


def test_a_model_with_a_chat_template_writes_chats(model, tmp_path):
    tm.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = TEMPLATE
    start = tokenizer("<user>", add_special_tokens=False)["input_ids"]
    windows = sample_from_model(model, tokenizer, samples=200, seq_len=len(start) + 8, seed=0)
    assert (windows.ids[:, : len(start)] == torch.tensor(start)).all()
    assert windows.special_tokens == len(start)
    assert (windows.ids[:, len(start) :] == model.config.eos_token_id).any()  # the end of a turn


@pytest.mark.filterwarnings("ignore:the chat template was not used")
@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "nothing of what is said"])
def test_a_chat_template_without_a_users_turn_leaves_plain_text(template, model, tmp_path):
    tm.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    plain = draw(model, tokenizer=tokenizer, samples=4).ids
    tokenizer.chat_template = template
    assert torch.equal(draw(model, tokenizer=tokenizer, samples=4).ids, plain)


def test_equal_logits_give_every_token_but_the_end():
    flat = tm.tiny("llama", torch.float32)
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    windows = draw(flat, samples=200)
    counts = windows.ids[:, 1:].flatten().bincount(minlength=tm.VOCABULARY).float()
    assert counts[1] == 0
    others = counts[torch.arange(tm.VOCABULARY) != 1]
    assert int((others > 0).sum()) > 290  # 2,200 draws: nothing is cut off the distribution
    assert float(others.max()) < 25


def test_the_models_generation_settings_do_not_apply():
    """Chat models end with several tokens and carry penalties; neither belongs in the text."""
    plain, chatty = tm.tiny("llama", torch.float32), tm.tiny("llama", torch.float32)
    own = chatty.generation_config
    own.repetition_penalty, own.min_p, own.no_repeat_ngram_size = 5.0, 0.5, 2
    own.temperature, own.max_length = 0.1, 4
    assert torch.equal(draw(chatty).ids, draw(plain).ids)
    assert chatty.generation_config is own


def test_no_end_token_of_the_generation_settings_is_drawn(model):
    ends = tm.tiny("llama", torch.float32)
    ends.generation_config.eos_token_id = list(range(1, 150))
    windows = draw(ends)
    assert windows.ids.shape == (40, 12)
    assert (windows.ids[:, 1:] >= 150).logical_or(windows.ids[:, 1:] == 0).all()
    assert (draw(model).ids[:, 1:] < 150).any()


@pytest.mark.parametrize(
    ("start", "error", "match"),
    [
        ([300], ModelError, r"starts a text with the tokens \[300\]"),
        ([0, 1], CalibrationError, "windows of 2 tokens hold nothing but the 2"),
        (["x"], ModelError, "the tokenizer of '.*' fails on a text"),
    ],
)
def test_a_start_that_fits_neither_model_nor_windows(
    start, error, match, model, tmp_path, monkeypatch
):
    tm.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: {"input_ids": start})
    with pytest.raises(error, match=match):
        sample_from_model(model, tokenizer, samples=1, seq_len=2, seed=0)


def test_a_resumed_run_keeps_what_the_model_wrote(dense, tmp_path, monkeypatch):
    settings = {"preset": "paper", "calibration": "self", "samples": 6, "seq_len": 32}
    coec.prune(dense, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "solve", raising(ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            coec.prune(dense, tmp_path / "out", **settings)
    monkeypatch.setattr("coec.streams.answers.sample_from_model", None)
    report = coec.prune(dense, tmp_path / "out", **settings)
    assert report.calibration["windows"] == 6
    for name in ("model.safetensors", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_chats_of_another_day_are_not_read_by_a_resumed_run(dense, tmp_path):
    """Templates may write the date, and this one the microsecond."""
    folder = shutil.copytree(dense, tmp_path / "dated")
    template = "{{ strftime_now('%f') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    chats = [[{"role": "user", "content": "w1 w2 w3 w4"}]] * 40
    opened, kept = Dense.open(folder), {}
    recipe = Recipe(calibration=[{"messages": chat} for chat in chats], samples=6, seq_len=32)

    def once(name, make):
        if name not in kept:
            kept[name] = make()
        return kept[name]

    one, same = (
        CalibrationText.read(opened, recipe, None).windows(Plan.of(opened, recipe), once, None)
        for _ in range(2)
    )
    assert one.record["windows_sha256"] == same.record["windows_sha256"]


def test_a_device_without_room_for_the_model_is_said(dense, monkeypatch):
    opened, recipe = Dense.open(dense), Recipe(calibration="self", samples=6, seq_len=32)
    monkeypatch.setattr(Dense, "network", raising(torch.OutOfMemoryError("out of memory")))
    text = CalibrationText.read(opened, recipe, None)
    with pytest.raises(CalibrationError, match="no room for all of it"):
        text.windows(Plan.of(opened, recipe), lambda name, make: make(), None)
