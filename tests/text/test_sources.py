"""Data sets of the hub, without the hub: what is asked of `datasets`, and what comes back."""

import json

import pytest

from coec.errors import CalibrationError
from coec.text import sources
from coec.text.sources import read_parts
from outcomes import one_line


@pytest.fixture
def hub(monkeypatch):
    """Stands in for `datasets.load_dataset`: notes the calls, answers with `hub.answer`."""
    import datasets

    class Hub:
        def __init__(self):
            self.answer, self.asked = None, []

        def load(self, *args, **options):
            self.asked.append((args, options))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    return hub


def read_text(source, **options):
    return "".join(read_parts(source, **options))


def rows(*texts, column="text"):
    return [{"id": i, column: text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("split", "asked", "shard"),
    [
        ("train", "train", "en/c4-train.00000-of-01024.json.gz"),
        ("test", "validation", "en/c4-validation.00000-of-00008.json.gz"),
        ("validation", "validation", "en/c4-validation.00000-of-00008.json.gz"),
    ],
)
def test_c4_is_its_first_shard_streamed(split, asked, shard, hub):
    hub.answer = iter(rows("one", "two"))
    assert read_text("c4", split=split) == "one\n\ntwo"
    assert hub.asked == [
        (("allenai/c4",), {"data_files": {asked: shard}, "split": asked, "streaming": True})
    ]


def test_wikitext_is_joined_by_blank_lines(hub):
    hub.answer = {"text": ["", " = Title = ", "a line"]}
    assert read_text("wikitext2", split="train") == "\n\n = Title = \n\na line"
    wikitext = ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert hub.asked == [(wikitext, {"split": "train"})]


def test_reading_ends_with_the_document_that_reaches_the_bound(hub, monkeypatch):
    monkeypatch.setattr(sources, "HUB_CHARACTERS", 12)

    def endless():
        yield from rows("four", "four", "last")
        raise AssertionError("read on")

    hub.answer = endless()  # 4 + 2, 4 + 2: the second document reaches 12
    assert read_text("c4", split="train") == "four\n\nfour"


@pytest.mark.parametrize(
    ("source", "asked"),
    [("hub:owner/name", ("owner/name", None)), ("hub:owner/name:en", ("owner/name", "en"))],
)
def test_a_data_set_of_the_hub_is_streamed_from_the_split_that_is_meant(source, asked, hub):
    hub.answer = {"train": rows("one", "two"), "test": rows("three")}
    assert read_text(source, split="train") == "one\n\ntwo"
    assert read_text(source, split="test") == "three"
    assert hub.asked == [(asked, {"streaming": True})] * 2


def test_a_split_that_is_not_there_is_not_replaced_by_another(hub):
    hub.answer = {"train": rows("one"), "validation": rows("two")}
    with pytest.raises(
        CalibrationError,
        match=r"^'hub:owner/name' has no split 'test' \(it has: train, validation\).*save",
    ):
        read_text("hub:owner/name", split="test")


def test_a_column_can_be_named_and_must_be_text(hub):
    hub.answer = {"train": rows("one", column="story")}
    assert read_text("hub:owner/name", split="train", text_column="story") == "one"
    with pytest.raises(
        CalibrationError, match=r"row 1 .*'text' \(it has: id, story\); .*text_column=NAME"
    ):
        read_text("hub:owner/name", split="train")
    with pytest.raises(CalibrationError, match="row 1 .* column 'id' holds"):
        read_text("hub:owner/name", split="train", text_column="id")


@pytest.mark.parametrize("source", ["hub:name", "hub:a/b/c", "hub:", "hub:/name", "hub:a/b:c:d"])
def test_a_name_that_is_none_is_refused_before_the_hub_is_asked(source, hub):
    with pytest.raises(CalibrationError, match="names no data set: write hub:OWNER/NAME"):
        read_text(source, split="train")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("source", "name"),
    [("wikitext2", "WikiText-2"), ("c4", "C4"), ("hub:owner/name", "'hub:owner/name'")],
)
@pytest.mark.parametrize("message", ["Couldn't reach the hub\nand more", ""])
def test_a_hub_out_of_reach_is_one_line(source, name, message, hub):
    hub.answer = ConnectionError(message)
    reason = message.partition("\n")[0] or "ConnectionError"
    with pytest.raises(CalibrationError) as caught:
        read_text(source, split="train")
    assert str(caught.value).startswith(f"{name} could not be loaded ({reason}). Offline, give")
    assert "\n" not in str(caught.value)


def test_a_connection_lost_while_reading_is_one_line(hub):
    def broken():
        yield from rows("one")
        raise ConnectionError("reset by peer")

    hub.answer = broken()
    with pytest.raises(CalibrationError, match=r"C4 could not be loaded \(reset by peer\)"):
        read_text("c4", split="train")


def test_an_empty_split_is_an_error(hub):
    hub.answer = {"train": []}
    with pytest.raises(CalibrationError, match="'hub:owner/name' holds no text"):
        read_text("hub:owner/name", split="train")


def test_the_real_datasets_library_streams_a_folder(tmp_path, monkeypatch):
    """`datasets` takes owner/name for a folder where there is one: the real code, offline."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split, texts in {"train": ["one", "two"], "test": ["three"]}.items():
        lines = (json.dumps({"text": text}) for text in texts)
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    assert read_text("hub:owner/name", split="train") == "one\n\ntwo"
    assert read_text("hub:owner/name", split="test") == "three"
    with pytest.raises(CalibrationError, match=r"no split 'validation' \(it has: train, test\)"):
        read_text("hub:owner/name", split="validation")


def test_the_real_datasets_library_offline_is_one_line():
    with one_line(CalibrationError, match="'hub:owner/absent' could not be loaded"):
        read_text("hub:owner/absent", split="train")
