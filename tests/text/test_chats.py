"""Chats as calibration text: rendered by the tokenizer's own template."""

import json

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

import coec
import tiny_models as tm
from coec.errors import CalibrationError
from coec.events import recording
from coec.models.dense import Dense
from coec.text.chats import ChatTemplate
from coec.text.tokens import load_tokenizer, read_stream, source_of
from coec.text.windows import windows_in_order

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
CHATS = [[("user", f"w{n} w{n + 1}"), ("assistant", f"w{n + 2}")] for n in range(40)]
TEXTS = ["".join(f"<{role}>{said}\n" for role, said in chat) for chat in CHATS]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    tm.save(tm.tiny("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def opened(dense, path, **options):
    return read_stream(str(path), lambda: load_tokenizer(dense), split="train", **options)


def rows_of(style):
    if style == "openai":
        return [
            {"id": 1, "messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS
        ]
    names = {"user": "human", "assistant": "gpt"}
    return [{"conversations": [{"from": names[r], "value": c} for r, c in chat]} for chat in CHATS]


def written(path, rows):
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("style", ["openai", "sharegpt"])
@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".parquet"])
def test_chats_are_the_text_that_the_template_makes(suffix, style, dense, tmp_path):
    found = opened(dense, written(tmp_path / f"chats{suffix}", rows_of(style)))
    tokenizer = load_tokenizer(dense)
    for chat, text in zip(found.whole, TEXTS, strict=True):
        assert chat.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = text.partition("<assistant>")[2].strip()
        assert tokenizer.decode(chat.ids[chat.answered]).strip() == answer
    assert (found.chats, found.answers_kept) == (len(CHATS), found.answers)


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_report_says_that_chats_were_rendered(in_memory, dense, tmp_path):
    chats = rows_of("openai")
    text = chats if in_memory else str(written(tmp_path / "chats.jsonl", chats))
    report = coec.prune(dense, tmp_path / "out", calibration=text, samples=12, seq_len=16,
                        preset="fast")  # fmt: skip
    assert report.calibration["chats"] == len(CHATS)
    note = "40 chats were rendered by the tokenizer's chat template, with 100% of the assistants'"
    assert any(note in line for line in report.plan["notes"])


def test_a_template_that_fails_is_one_line(tmp_path):
    folder = tm.save(tm.tiny("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(
        CalibrationError, match="line 1: the chat cannot be rendered .*role and content"
    ):
        opened(folder, written(tmp_path / "chats.jsonl", rows_of("openai")))


def test_text_in_a_column_comes_before_a_chat_unless_it_is_empty(dense, tmp_path):
    rows = [row | {"text": "w1 w2"} for row in rows_of("openai")]
    assert opened(dense, written(tmp_path / "a.jsonl", rows)).chats == 0
    named = opened(dense, written(tmp_path / "b.jsonl", rows), text_column="messages")
    assert named.chats == len(CHATS)
    rows = [row | {"text": ""} for row in rows_of("openai")]
    assert opened(dense, written(tmp_path / "c.jsonl", rows)).chats == len(CHATS)


def test_a_list_that_is_no_chat_is_not_taken_for_one(dense, tmp_path):
    path = written(tmp_path / "a.jsonl", [{"other": ["w1"]}])
    with pytest.raises(CalibrationError, match="has no text in column 'text' .it has: other."):
        opened(dense, path)


def test_a_tokenizer_without_a_template_cannot_render_chats(dense, tmp_path):
    plain = tm.save(tm.tiny("llama"), tmp_path / "plain")
    with pytest.raises(CalibrationError, match="no chat template to write them"):
        opened(plain, written(tmp_path / "chats.jsonl", rows_of("openai")))


THINKING = "<think>\nw1 w2 w3\n</think>\nw4"
DROPPING = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "message", "kept"),
    [
        (TEMPLATE, {"content": THINKING}, 1.0),
        (DROPPING, {"content": THINKING}, 1.0),  # put back
        (TEMPLATE, {"content": "w4", "reasoning_content": "w5 w6 w7"}, 0.2),
        (TEMPLATE.replace("m['content']", "m['content'][0]['text']"),
         {"content": [{"type": "text", "text": "w4"}]}, 1.0),
    ],
)  # fmt: skip
def test_reasoning_that_a_template_drops_is_put_back_or_recorded(
    template, message, kept, dense, tmp_path, monkeypatch
):
    chat = [{"role": "user", "content": "w0"}, {"role": "assistant", **message}]
    path = written(tmp_path / "chats.jsonl", [{"messages": chat}] * 3)
    tokenizer = load_tokenizer(dense)
    tokenizer.chat_template = template
    with recording() as events:
        found = read_stream(str(path), lambda: tokenizer, split="train")
    assert found.answers_kept / found.answers == pytest.approx(kept)
    assert [event for event in events if "dropped" in event] == [
        event for event in events if kept < 0.9
    ]
    assert len(events) == (kept < 0.9)


QWEN = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}"
    "{% if loop.last and '</think>' not in m['content'] %}<think></think>{% endif %}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
R1 = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]") + (
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (TEMPLATE, ("w0", "w1"), "<user>w0\n<assistant>[w1]\n"),
        (TEMPLATE.replace("m['content']", "m['content'] | trim"), ("w0", " w1\n"),
         "<user>w0\n<assistant>[w1]\n"),
        # Reasoning of an earlier turn, put back; and none in the last turn, as the template has it
        (QWEN, ("w0", "<think>w9</think>w1", "w2", "<think>w8</think>w3"),
         "<user>w0\n<assistant>[<think>w9</think>w1]\n<user>w2\n<assistant>"
         "[<think>w8</think>w3]\n"),
        (QWEN, ("w0", "w1"), "<user>w0\n<assistant><think></think>[w1]\n"),
        # Nothing of an answer is taken for a part of its prompt, which ends with the same sign
        (QWEN, ("w0", "<think>w9</think>w1", "w2", ">w3"),
         "<user>w0\n<assistant>[<think>w9</think>w1]\n<user>w2\n<assistant>[>w3]\n"),
        # The prompt has the beginning of the reasoning already
        (R1, ("w0", "<think>\nw9\n</think>w1"), "<user>w0\n<assistant><think>\n[w9\n</think>w1]\n"),
    ],
)  # fmt: skip
def test_every_answer_follows_its_prompt(template, turns, text):
    """The expected text has brackets around the assistants' words."""
    chat = ChatTemplate(lambda: characters(template))
    roles = ("user", "assistant")
    made = chat([{"role": roles[n % 2], "content": words} for n, words in enumerate(turns)])
    assert shown(made) == text


def test_a_chat_whose_beginning_cannot_be_rendered_is_as_the_template_has_it():
    """A greeting, before which there is no prompt; reasoning in an earlier turn."""
    said = [("assistant", "w7"), ("user", "w0"), ("assistant", "<think>w9</think>w1"),
            ("user", "w2"), ("assistant", "w3")]  # fmt: skip
    made = ChatTemplate(lambda: characters(DROPPING))(
        [{"role": role, "content": words} for role, words in said]
    )
    assert shown(made) == "[<assistant>w7\n<user>w0\n<assistant>w1\n<user>w2\n<assistant>w3\n"


STRICT = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
STRICT += "<{{ m['role'] }}>{{ m['content'] | trim }}\n{% endfor %}"


def test_parts_are_text_where_a_template_takes_text_alone():
    """This template would write the list as Python does."""
    chat = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "w0"}, {"type": "text", "text": "w1"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "w2"}]},
    ]
    template = ChatTemplate(lambda: characters(STRICT))
    assert shown(template(chat)) == "<user>w0\nw1\n<assistant>[w2]\n"
    with pytest.raises(CalibrationError, match="takes text alone, .* a part of type 'image'"):
        template([{"role": "user", "content": [{"type": "image"}]}])


def test_keys_that_a_table_fills_with_none_are_not_there():
    chat = [
        {"role": "user", "content": "w0", "tool_calls": None, "from": None},
        {"role": "assistant", "content": "w1", "tool_calls": None, "reasoning_content": None},
    ]
    assert shown(ChatTemplate(lambda: characters(STRICT))(chat)) == "<user>w0\n<assistant>[w1]\n"


@pytest.mark.parametrize(
    "message",
    [
        {"speaker": "user", "text": "w0"},
        {"role": "user", "text": "w0"},
        {"role": "user", "content": None},
        {"role": None, "content": "w0"},
        {"from": "human"},
    ],
)
def test_a_message_without_role_or_content_is_refused(message):
    """A template writes nothing, or None, in their place."""
    with pytest.raises(
        CalibrationError, match="a chat is a list of messages with role and content"
    ):
        ChatTemplate(lambda: characters(TEMPLATE))([message])


def test_calls_of_tools_need_no_content():
    calls = [{"function": {"name": "f", "arguments": {}}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}]
    template = ChatTemplate(lambda: characters("{{ messages[0].tool_calls[0].function.name }}"))
    assert shown(template(chat)).strip("[]") == "f"


def characters(template):
    """A tokenizer whose tokens are characters."""
    fast = Tokenizer(models.BPE({chr(n): n for n in range(128)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    tokenizer.chat_template = template
    return tokenizer


def shown(chat):
    """The text of a chat of characters, with brackets around the assistants' words."""
    text, inside = "", False
    for token, answered in zip(chat.ids.tolist(), chat.answered.tolist(), strict=True):
        text += "[" * (answered > inside) + "]" * (answered < inside) + chr(token)
        inside = answered
    return text


def test_a_start_in_the_template_stands_once():
    """The tokenizer adds one to a text."""
    tokenizer = characters("^" + TEMPLATE)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("^ $A", None, [("^", 94)])
    assert tokenizer("a")["input_ids"] == [94, 97]
    chat = ChatTemplate(lambda: tokenizer)([{"role": "user", "content": "a"}])
    assert chat.ids.tolist().count(94) == 1


def test_prompts_alone_are_named_as_such(dense, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "w1 w2"}]}]
    with recording() as events:
        opened(dense, written(tmp_path / "prompts.jsonl", rows))
    assert ["prompts alone" in event for event in events] == [True]


@pytest.mark.parametrize("in_memory", [False, True])
def test_so_many_chats_are_read_that_windows_are_as_many_as_asked(in_memory, dense, tmp_path):
    """Packing leaves the end of the last chat of every window out."""
    chats = rows_of("openai") * 20
    text = chats if in_memory else written(tmp_path / "chats.jsonl", chats)
    windows = windows_in_order(
        Dense.open(dense), source_of(text, "text"), "text", count=40, seq_len=48,
        trust_remote_code=False,
    )  # fmt: skip
    assert len(windows.ids) == 40
    assert windows.in_pieces
