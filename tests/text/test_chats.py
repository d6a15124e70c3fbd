"""Chats as calibration text: rendered by the tokenizer's own template."""

import json

import pytest

import coec
import tiny_models as tm
from coec.errors import CalibrationError
from coec.events import recording
from coec.text.tokens import load_tokenizer, read_stream

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
CHATS = [[("user", f"w{n} w{n + 1}"), ("assistant", f"w{n + 2}")] for n in range(40)]
TEXT = "\n\n".join("".join(f"<{role}>{said}\n" for role, said in chat) for chat in CHATS)


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
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chats_are_the_text_that_the_template_makes(suffix, style, dense, tmp_path):
    (tmp_path / "same.txt").write_text(TEXT)
    expected = opened(dense, tmp_path / "same.txt")
    found = opened(dense, written(tmp_path / f"chats{suffix}", rows_of(style)))
    assert found.ids.tolist() == expected.ids.tolist()
    assert (found.chats, expected.chats) == (len(CHATS), 0)


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_report_says_that_chats_were_rendered(in_memory, dense, tmp_path):
    chats = rows_of("openai")
    text = chats if in_memory else str(written(tmp_path / "chats.jsonl", chats))
    report = coec.prune(dense, tmp_path / "out", calibration=text, samples=4, seq_len=16,
                        preset="fast")  # fmt: skip
    assert report.calibration["chats"] == len(CHATS)
    note = "40 chats were rendered by the tokenizer's chat template, with 100% of the assistants'"
    assert any(note in line for line in report.plan["notes"])


def test_a_template_that_fails_is_one_line(tmp_path):
    folder = tm.save(tm.tiny("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(CalibrationError, match="chat 1 cannot be rendered .*role and content"):
        opened(folder, written(tmp_path / "chats.jsonl", rows_of("openai")))


def test_text_in_a_column_comes_before_a_chat(dense, tmp_path):
    rows = [row | {"text": "w1 w2"} for row in rows_of("openai")]
    assert opened(dense, written(tmp_path / "a.jsonl", rows)).chats == 0
    named = opened(dense, written(tmp_path / "b.jsonl", rows), text_column="messages")
    assert named.chats == len(CHATS)


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
        (DROPPING, {"content": THINKING}, 2 / (2 + 7 + 8 + 8)),
        (TEMPLATE, {"content": "w4", "reasoning_content": "w5 w6 w7"}, 0.2),
        (TEMPLATE.replace("m['content']", "m['content'][0]['text']"),
         {"content": [{"type": "text", "text": "w4"}]}, 1.0),
    ],
)  # fmt: skip
def test_a_template_that_drops_reasoning_is_recorded(template, message, kept, dense, tmp_path):
    (dense / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "w0"}, {"role": "assistant", **message}]
    path = written(tmp_path / "chats.jsonl", [{"messages": chat}] * 3)
    with recording() as events:
        found = opened(dense, path)
    assert found.answers_kept / found.answers == pytest.approx(kept)
    assert [event for event in events if "dropped" in event] == [
        event for event in events if kept < 0.9
    ]
    assert len(events) == (kept < 0.9)
    (dense / "chat_template.jinja").write_text(TEMPLATE)


def test_prompts_alone_are_named_as_such(dense, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "w1 w2"}]}]
    with recording() as events:
        opened(dense, written(tmp_path / "prompts.jsonl", rows))
    assert ["prompts alone" in event for event in events] == [True]
