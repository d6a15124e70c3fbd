"""Zero-shot scores against the obvious loop, and against lm-eval's own command."""

import hashlib
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import coec
import tiny_models as tm
from coec.calibration.tokens import load_tokenizer
from coec.errors import CalibrationError, ModelError, OptionError
from coec.evaluation import harness
from coec.evaluation import zero_shot as module
from coec.evaluation.harness import official_tasks
from outcomes import WORK, one_line, raising

pytestmark = pytest.mark.usefixtures("few_tasks")
ROWS = {
    "boolq": [
        {"question": "is it far", "passage": "It is near.", "label": 0},
        {"question": "is snow cold", "passage": "Snow is ice.", "label": 1},
        {"question": "can a cat read", "passage": "Cats sleep.", "label": 0},
        {"question": "do birds fly", "passage": "Most do.", "label": 1},
    ],
    "arc_easy": [
        {"id": "0", "question": "What is wet?", "answerKey": "B",
         "choices": {"text": ["a dry old stone", "rain", "sand"], "label": ["A", "B", "C"]}},
        {"id": "1", "question": "What burns?", "answerKey": "2",
         "choices": {"text": ["ice in the glass", "wood", "éééé", "a"],
                     "label": ["1", "2", "3", "4"]}},
        {"id": "2", "question": "What is up?", "answerKey": "A",
         "choices": {"text": ["the wide blue sky", "mud", "a well"], "label": ["A", "B", "C"]}},
    ],
    "winogrande": [
        {"sentence": "Ann beat Sue since _ was fast.", "option1": "Ann", "option2": "Sue",
         "answer": "1"},
        {"sentence": "The cup fell off the shelf as _ was bent.", "option1": "it",
         "option2": "the old shelf", "answer": "2"},
        {"sentence": "Tom fed the dog when _ barked.", "option1": "Tom", "option2": "the dog",
         "answer": "2"},
    ],
    "hellaswag": [
        {"ind": 0, "activity_label": "Cooking", "ctx_a": "A man cuts bread.", "ctx_b": "he",
         "ctx": "", "endings": ["eats it.", "flies to the moon.", "[title] sings  on.", "is."],
         "label": "0", "split": "val"},
        {"ind": 1, "activity_label": "Rowing", "ctx_a": "Two boats start.", "ctx_b": "",
         "ctx": "", "endings": ["one wins.", "a", "they cook rice for a king.", "stop"],
         "label": "2", "split": "val"},
    ],
}  # fmt: skip


def questions(task, row):
    """Every (context, continuation), the answer as it is counted, and which is right."""
    match task:
        case "boolq":
            context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
            return [(context, f" {a}", a) for a in ("no", "yes")], row["label"]
        case "arc_easy":
            choices = row["choices"]
            context = f"Question: {row['question']}\nAnswer:"
            right = choices["label"].index(row["answerKey"])
            return [(context, f" {a}", a) for a in choices["text"]], right
        case "winogrande":
            before, after = row["sentence"].split("_")
            options = [row["option1"], row["option2"]]
            return [(before + o, after, o) for o in options], int(row["answer"]) - 1
        case "hellaswag":
            context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}".strip()
            endings = [e.replace("[title] sings  on.", ". sings on.") for e in row["endings"]]
            return [(context, f" {e}", e) for e in endings], int(row["label"])


@torch.no_grad()
def naive(folder, task, rows):
    """acc and acc_norm: the sum of log-probabilities of every continuation, one at a time."""
    model, encode = tm.load(folder), load_tokenizer(folder)
    right = {"acc": [], "acc_norm": []}
    for row in rows:
        asked, answer = questions(task, row)
        sums = []
        for context, continuation, _ in asked:
            first = encode(context)["input_ids"]
            ids = first + encode(continuation)["input_ids"]
            log_p = F.log_softmax(tm.logits(model, torch.tensor([ids]))[0], -1)
            sums.append(sum(float(log_p[i - 1, ids[i]]) for i in range(len(first), len(ids))))
        per_character = [s / len(counted) for s, (_, _, counted) in zip(sums, asked)]
        for metric, values in (("acc", sums), ("acc_norm", per_character)):
            right[metric].append(values.index(max(values)) == answer)
    return {metric: sum(hits) / len(hits) for metric, hits in right.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tm.tiny("llama", torch.float32, max_position_embeddings=128)
    return tm.save(model, tmp_path_factory.mktemp("model") / "model")


def put(folder, task, rows):
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / f"{task}.jsonl").write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def data(tmp_path):
    for task, rows in ROWS.items():
        put(tmp_path, task, rows)
    return tmp_path


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(module, "load_network", raising(WORK))


@pytest.fixture
def unplugged(monkeypatch):
    asked = raising(AssertionError("the network was asked"))
    monkeypatch.setattr("socket.socket.connect", asked)
    monkeypatch.setattr("socket.getaddrinfo", asked)


@pytest.mark.usefixtures("unplugged")
@pytest.mark.parametrize("batch_size", [1, 8])
def test_scores_are_those_of_the_naive_loop(batch_size, folder, data, capfd):
    heard = []
    result = coec.zero_shot(
        folder, list(ROWS), tasks_data=data, batch_size=batch_size,
        progress=lambda *step: heard.append(step),
    )  # fmt: skip
    assert [score.task for score in result.tasks] == list(ROWS)
    for score in result.tasks:
        expected = naive(folder, score.task, ROWS[score.task])
        has_norm = score.task in ("arc_easy", "hellaswag")
        assert score.acc == expected["acc"], score.task
        assert score.acc_norm == (expected["acc_norm"] if has_norm else None), score.task
        assert score.metric == ("acc_norm" if has_norm else "acc")
        assert score.value == getattr(score, score.metric)
        assert score.items == len(ROWS[score.task])
        assert score.data == hashlib.sha256((data / f"{score.task}.jsonl").read_bytes()).hexdigest()
        n, p = score.items, score.value
        assert score.stderr == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
    requests = sum(len(questions(task, row)[0]) for task, rows in ROWS.items() for row in rows)
    assert heard == [("zero-shot", done + 1, requests) for done in range(requests)]
    assert capfd.readouterr() == ("", "")


def test_the_mean_is_over_the_metrics_of_the_paper_and_the_record_says_what_was_run(folder, data):
    result = coec.zero_shot(folder, "boolq, arc_easy,boolq", tasks_data=data)
    boolq, arc = result.tasks
    assert result.mean == pytest.approx((boolq.acc + arc.acc_norm) / 2)
    stderr = math.sqrt(boolq.acc_stderr**2 + arc.acc_norm_stderr**2) / 2
    assert result.mean_stderr == pytest.approx(stderr)
    assert boolq.chance == 1 / 2
    assert arc.chance == pytest.approx((1 / 3 + 1 / 4 + 1 / 3) / 3)

    record = json.loads(json.dumps(result.as_dict()))
    assert list(record["tasks"]) == ["boolq", "arc_easy"]
    assert record["tasks"]["arc_easy"]["acc_norm"] == result.tasks[1].acc_norm
    assert record["tasks"]["boolq"]["version"] == "2.0"
    assert (record["seq_len"], record["limit"], record["truncated"]) == (128, None, 0)
    assert record["parameters"] == tm.load(folder).num_parameters()
    assert (bool(record["lm_eval"]), record["seconds"] > 0) == (True, True)


def test_a_limit_takes_the_first_items(folder, data):
    result = coec.zero_shot(folder, "boolq,arc_easy", tasks_data=data, limit=2)
    for score in result.tasks:
        assert score.items == 2
        assert score.acc == naive(folder, score.task, ROWS[score.task][:2])["acc"]
    one = coec.zero_shot(folder, "boolq", tasks_data=data, limit=1)
    assert (one.tasks[0].stderr, one.mean_stderr) == (None, None)


def test_requests_beyond_the_window_are_cut_and_counted(folder, data):
    long = [{**row, "passage": "word " * 40} for row in ROWS["boolq"]]
    put(data, "boolq", [*long, ROWS["boolq"][0]])
    result = coec.zero_shot(folder, "boolq", tasks_data=data)
    assert result.truncated == 2 * len(long)
    put(data, "boolq", ROWS["boolq"][:1])
    context = len(questions("boolq", ROWS["boolq"][0])[0][0][0])  # one token per character
    # The last token is only predicted: a request may be one longer than the window.
    for seq_len, cut in ((context + 3, 0), (context + 2, 1), (context + 1, 2)):
        result = coec.zero_shot(folder, "boolq", tasks_data=data, seq_len=seq_len)
        assert result.truncated == cut, seq_len  # " no" has 3 tokens, " yes" 4
    with pytest.raises(OptionError, match="an answer has 4 tokens, more than seq_len=3"):
        coec.zero_shot(folder, "boolq", tasks_data=data, seq_len=3)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("tasks", "settings", "match"),
    [
        ("hellaswaq", {}, "has no task 'hellaswaq'; did you mean hellaswag"),
        ("ai2_arc", {}, "'ai2_arc' is a group of lm-eval's tasks: name the tasks"),
        (" ,", {}, "no task is named: give 'seven'"),
        ([], {}, "no task is named: give 'seven'"),
        ("boolq", {"limit": 0}, "limit must be a whole number of at least 1"),
        ("boolq", {"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ("boolq", {"seq_len": 200}, "seq_len=200 is beyond the model's 128 positions"),
        ("boolq", {"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_tasks_and_settings_are_checked_before_the_model_is_loaded(tasks, settings, match, folder):
    with one_line(OptionError, match=match):
        coec.zero_shot(folder, tasks, **settings)


@pytest.mark.usefixtures("unloaded")
def test_a_file_that_is_missing_is_named_with_those_that_are_there(folder, data, tmp_path):
    with pytest.raises(
        CalibrationError,
        match=r"no '.*rte.jsonl' for task 'rte'; .* there: arc_easy, boolq, hellaswag, winogrande$",
    ):
        coec.zero_shot(folder, "seven", tasks_data=data)
    with pytest.raises(CalibrationError, match="there: none"):
        coec.zero_shot(folder, "seven", tasks_data=tmp_path / "nowhere")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("content", ['{"text": "a"}\n', "not json", ""])
def test_a_file_of_another_form_is_named(content, folder, data, capfd):
    (data / "boolq.jsonl").write_text(content)
    with one_line(CalibrationError, match=r"boolq.jsonl' does not fit lm-eval's task"):
        coec.zero_shot(folder, "boolq", tasks_data=data)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["UNSAFE_CODE", "MULTIMODAL"])
def test_a_task_that_runs_code_or_shows_images_is_refused(kind):
    class Manager:
        def load(self, names):
            return {"tasks": {name: SimpleNamespace(**{kind: True}) for name in names}}

    with pytest.raises(OptionError, match="task 'odd' runs generated code or shows images"):
        harness._loaded(Manager(), "odd", None)


@pytest.mark.usefixtures("unloaded")
def test_a_task_that_computes_its_own_data_reads_no_files(folder, tmp_path):
    (tmp_path / "ruler_vt.jsonl").write_text("{}")
    with pytest.raises(OptionError, match="'ruler_vt' computes its own data"):
        coec.zero_shot(folder, "ruler_vt", tasks_data=tmp_path)


def test_a_model_without_tokenizer_is_refused(data, tmp_path):
    bare = tm.save(tm.tiny("llama", torch.float32), tmp_path / "bare", tokenizer=False)
    with pytest.raises(ModelError, match="has no tokenizer"):
        coec.zero_shot(bare, "boolq", tasks_data=data)


@pytest.mark.usefixtures("unloaded")
def test_without_lm_eval_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(OptionError, match=r"pip install 'coec\[zero-shot\]'"):
        coec.zero_shot(folder)


@pytest.mark.usefixtures("unloaded")
def test_a_hub_out_of_reach_says_what_to_give_instead(folder, monkeypatch):
    unreachable = ConnectionError("Couldn't reach the hub\nand more")
    monkeypatch.setattr("datasets.load_dataset", raising(unreachable))
    with pytest.raises(
        CalibrationError, match=r"task 'boolq' .*\(Couldn't reach the hub\).*tasks_data=DIR"
    ):
        coec.zero_shot(folder, "boolq")


def test_a_task_without_accuracy_keeps_the_metrics_of_lm_eval(folder, tmp_path):
    put(tmp_path, "wikitext", [{"page": "The cat sat on a mat ."}, {"page": "It was late ."}])
    result = coec.zero_shot(folder, "wikitext", tasks_data=tmp_path)
    (score,) = result.tasks
    assert (score.metric, score.value, score.acc, score.chance) == (None,) * 4
    assert {"word_perplexity", "byte_perplexity", "bits_per_byte"} <= score.other.keys()
    assert (result.mean, result.mean_stderr) == (None, None)


@pytest.mark.slow
def test_lm_evals_own_command_says_the_same(shared, tmp_path, monkeypatch):
    """Its command line, in a process of its own, on the same model and the same files."""
    monkeypatch.setattr(harness, "official_tasks", official_tasks)  # all of them here
    model = tm.readable(shared / "models/wt2-llama", tmp_path / "model")
    names = ["boolq", "winogrande", "hellaswag", "arc_challenge"]
    definitions = tmp_path / "definitions"
    definitions.mkdir()
    for name in names:
        entry = official_tasks().task_index[name]
        split = entry.cfg.get("test_split") or "validation"
        (definitions / f"{name}.yaml").write_text(
            f"include: {entry.yaml_path}\ntask: {name}_here\ntag: null\ndataset_path: json\n"
            f"dataset_name: null\ndataset_kwargs:\n  data_files:\n"
            f"    train: {shared}/data/tasks/{name}.jsonl\n"
            f"    {split}: {shared}/data/tasks/{name}.jsonl\n"
            + ("validation_split: null\n" if split == "test" else "")
        )
    subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
         f"pretrained={model},dtype=float32", "--tasks", ",".join(f"{n}_here" for n in names),
         "--include_path", definitions, "--limit", "15", "--num_fewshot", "0", "--batch_size", "8",
         "--device", "cpu", "--output_path", tmp_path / "theirs"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        check=True, capture_output=True,
    )  # fmt: skip
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]
    ours = coec.zero_shot(model, names, tasks_data=shared / "data/tasks", limit=15)
    for score in ours.tasks:
        expected = theirs[f"{score.task}_here"]
        for metric in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
            assert getattr(score, metric) == expected.get(f"{metric},none"), (score.task, metric)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("task", "row", "change", "match"),
    [
        ("boolq", 2, {"label": None}, "row 2, has no right answer in column 'label'"),
        ("boolq", 2, {"label": -1}, r"row 2, .* column 'label' \(found: -1\).* hide theirs"),
        ("boolq", 1, {"label": 2}, r"does not fit .*list index out of range"),
        ("arc_easy", 1, {"answerKey": ""}, r"answerKey|not in list"),
        ("arc_easy", 3, {"answerKey": "Z"}, r"arc_easy.jsonl' does not fit .*not in list"),
        ("hellaswag", 1, {"label": ""}, "hellaswag"),
        ("hellaswag", 2, {"label": "9"}, "row 2, .*'label'.*found: 9"),
        ("winogrande", 3, {"answer": ""}, "winogrande"),
        ("boolq", 1, "label", "task 'boolq', row 1, .* column 'label'"),
    ],
)
def test_an_answer_that_is_missing_or_hidden_is_refused(task, row, change, match, folder, data):
    rows = [dict(one) for one in ROWS[task]]
    if isinstance(change, str):  # no row has the column
        rows = [{k: v for k, v in row.items() if k != change} for row in rows]
    else:
        rows[row - 1] |= change
    put(data, task, rows)
    with one_line(CalibrationError, match) as caught:
        coec.zero_shot(folder, task, tasks_data=data)
    assert task in str(caught.value)


def test_only_the_rows_that_are_asked_need_answers(folder, data):
    rows = [*ROWS["boolq"][:2], {**ROWS["boolq"][2], "label": -1}]
    put(data, "boolq", rows)
    assert coec.zero_shot(folder, "boolq", tasks_data=data, limit=2).tasks[0].items == 2


def test_git_is_not_asked_where_the_command_runs(folder, data, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # git would complain that this is no repository
    coec.zero_shot(folder, "boolq", tasks_data=data)
    assert capfd.readouterr() == ("", "")


def test_a_limit_is_checked_before_the_model_is_found(tmp_path):
    with pytest.raises(OptionError, match="limit must be a whole number"):
        coec.zero_shot(tmp_path / "nowhere", "nonsense", limit=0)
