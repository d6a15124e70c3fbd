"""What the report lists of all cells."""

import sweep_rows as sr


def test_tasks_have_errors(tmp_path):
    rows = [sr.row(zero_shot=sr.zero_shot(0.25), grids=["main"]), sr.dense()]
    heads, line = sr.table(tmp_path, rows, "Zero-shot accuracy by task, % ± standard error")
    texts = dict(zip(heads, line))
    assert (texts["boolq"], texts["rte"]) == ("25.0 ± 2.0", "25.0 ± 2.0")


def test_failures_have_their_reasons(tmp_path):
    rows = [sr.row(), sr.row(samples=8, status="failed", error="out of memory")]
    rows.append(sr.row(samples=9, status="failed"))
    lines = sr.table(tmp_path, rows, "Failed cells")[1:]
    assert [line[-1] for line in lines] == ["out of memory", "no reason recorded"]
    assert lines[0][:2] == ["wt2-llama", "rcpu + coec"]


def test_safeguards_are_counted(tmp_path):
    sites = [{"events": ["clamped"]}] * 3
    rows = [sr.row(sites=sites), sr.row(samples=8, sites=sites[:1])]
    assert sr.table(tmp_path, rows, "Safeguards that fired")[1:] == [["clamped", "4"]]


def test_conditions_are_listed_by_model(tmp_path):
    text = sr.perplexity(9.0, text="b.txt")
    rows = [
        sr.row("a", samples=8, environment={"coec": "0.1.0"}, perplexity=sr.perplexity(9.0)),
        sr.row("a", samples=16), sr.row("b", samples=8, perplexity=text), sr.dense("b"),
        sr.row("b", samples=16, seed=1),
    ]  # fmt: skip
    heads, *lines = sr.table(tmp_path, rows, "Conditions")
    found = {name: values for name, *values in lines}
    assert heads == ["Name", "a", "b"]
    assert found["evaluation.text"] == ["data/wikitext2/test.txt", "b.txt"]
    assert (found["seq_len"], found["seed"]) == (["256", "256"], ["0", "varies"])
    assert found["environment.coec"] == ["0.1.0", "–"]
    assert "samples" not in found


def test_what_there_is_nothing_of_has_no_section(tmp_path):
    assert list(sr.sections(tmp_path, [sr.row()])) == ["Conditions"]
