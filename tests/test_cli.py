"""The command as users type it."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coec
import tiny_models as tm
from coec import devices
from coec.cli.commands import COMMANDS, command_of
from coec.cli.common import measuring, named, text_flag
from coec.cli.signals import END_SIGNALS
from coec.methods import COMPENSATIONS
from coec.methods.selection import SELECTIONS
from coec.models.architectures import ARCHITECTURES
from outcomes import check_refused, raising, signalled, succeeded

WINDOWS = ("--samples", 24, "--seq-len", 32)
NONE = ("--preset", "paper", "--compensation", "none")


@pytest.fixture
def prune(run, dense, tokens, tmp_path):
    """Prunes into `tmp_path / "out"`: exit status, stdout, stderr."""
    command = "prune", dense, tmp_path / "out", "--calibration", tokens, *WINDOWS
    return lambda *flags: run(*command, *flags)


@pytest.fixture
def perplexity(run, tokens):
    """Measures the tokens, or other text."""
    return lambda model, *flags, text=tokens: run("eval", model, "--text", text, "--seq-len", 32,
                                                  *flags)  # fmt: skip


def test_python_dash_m_is_the_command():
    shown = subprocess.run(
        [sys.executable, "-m", "coec", "--version"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert shown.stdout.strip() == f"coec {coec.__version__}"


def test_no_arguments_show_the_help(run):
    status, out, err = run()
    assert "prune" in out + err
    assert status in (0, 2)  # typer's own choice, which has changed
    _, out, _ = run("--help")
    assert "--install-completion" in out
    assert "--show-completion" in out


USAGES = {
    "prune": "MODEL [OUT]", "recover": "DENSE PRUNED [OUT]", "eval": "MODEL",
    "export": "MODEL OUT.gguf", "methods": "",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_has_two_examples_with_flags_of_the_command(command, run):
    whole = "--help-all" if command == "prune" else "-h"
    out, _ = succeeded(run(command, whole, columns=80))
    assert f"Usage: coec {command} [OPTIONS] {USAGES[command]}".strip() in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    for value in (*SELECTIONS, *COMPENSATIONS) if command == "prune" else ():
        assert value in out  # not cut in the middle
    options, examples = out.split("Examples:")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"coec {command}")
        for flag in re.findall(r"--[a-z-]+", line):
            assert f"{flag} " in options


def test_the_first_screen_has_twenty_flags_under_headings_and_another_has_all(run):
    _, first, _ = run("prune", "--help")
    _, whole, _ = run("prune", "--help-all")
    flags = re.findall(r"^│ --([a-z-]+)", first, re.MULTILINE)
    assert len(flags) <= 22  # with --help and --help-all
    assert set(flags) < set(re.findall(r"^│ --([a-z-]+)", whole, re.MULTILINE))
    assert "Options of --compensation coec" in whole
    for heading in ("What to remove", "How to compensate", "Calibration", "Where to run"):
        assert f"─ {heading} ─" in first


@pytest.mark.parametrize(
    ("text", "flag"),
    [("wikitext2", ""), ("hub:a/b", " --text hub:a/b"), ("self", " --text self"),
     ("my text.txt", " --text OTHER.txt")],
)  # fmt: skip
def test_the_command_that_measures_takes_other_text(text, flag):
    assert measuring("m", "o", text) == f"measure it: coec eval o --baseline m{flag}"
    alone = " --text OTHER.txt" if text == "self" else flag  # written by the baseline
    assert measuring("m", "o", text, compared=False) == f"measure it: coec eval o{alone}"


def test_commands_that_are_proposed_name_the_column():
    assert text_flag("hub:a/b", "my words") == " --text hub:a/b --text-column 'my words'"
    assert text_flag("wikitext2", "body") == ""
    assert measuring("m", "o", "hub:a/b", "body").endswith(" --text hub:a/b --text-column body")


def test_what_is_in_the_current_folder_is_named_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named(f"{tmp_path}/a b") == "'a b'"
    assert named("/elsewhere/out") == "/elsewhere/out"
    assert named("owner/model") == "owner/model"


def test_prune_then_eval(dense, tokens, prune, perplexity, tmp_path):
    out, _ = succeeded(prune("--preset", "paper", "--rotation", "left"))
    assert "MLP channels     40 → 28" in out
    assert "stored as        mistral" in out
    assert "loads in         transformers, vLLM, SGLang" in out
    measure, train, mix = out.splitlines()[-3:]
    assert measure == f"measure it: coec eval {tmp_path}/out --baseline {dense} --text OTHER.txt"
    assert train.endswith(
        f"coec recover {dense} {tmp_path}/out {tmp_path}/out-trained --text {tokens}"
    )
    assert mix.endswith(f"--calibration {tokens},OTHER.txt")
    out, _ = succeeded(perplexity(tmp_path / "out", "--baseline", dense))
    assert "same top token" in out


def test_json_is_one_object_on_stdout(prune, perplexity, run, tmp_path):
    out, _ = succeeded(prune(*NONE, "--json"))
    assert json.loads(out)["out"] == str(tmp_path / "out")
    status, out, _ = perplexity(tmp_path / "out", "--json")
    result = json.loads(out)
    assert (status, out.count("\n")) == (0, 1)
    assert {"perplexity", "tokens", "windows", "seq_len", "text_sha256"} <= result.keys()
    assert (result["windows"], result["tokens"], result["seq_len"]) == (24, 24 * 31, 32)
    _, out, _ = run("methods", "--json")
    listing = json.loads(out)
    assert listing["selections"].keys() == SELECTIONS.keys()
    assert listing["compensations"].keys() == COMPENSATIONS.keys()
    assert listing["architectures"].keys() == ARCHITECTURES.keys()
    ridge = listing["options"]["least-squares"]["ridge"]
    assert ridge.startswith("λ relative to the mean diagonal of Gxx, at least 0; `energy`")
    assert ridge.endswith("Default: auto in fast, energy in balanced, else 0.01.")
    assert listing["options"]["rcpu"] == {}


def test_methods_lists_everything_with_its_source(run):
    out, _ = succeeded(run("methods"))
    for name in [*SELECTIONS, *COMPENSATIONS, *ARCHITECTURES]:
        lines = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
        assert lines, name
        assert all(line.endswith("]") and "[]" not in line for line in lines)
    assert out.splitlines().count("    options: ridge") == 2


def test_a_dry_run_needs_only_the_configuration(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tm.raw_config("llama")))
    for target in (tmp_path, tmp_path / "config.json"):
        status, out, _ = run("prune", target, "--dry-run", "--json")
        plan = json.loads(out)
        assert status == 0
        assert plan["widths"]["mlp"] == {"before": 40, "after": 28}
        assert plan["output_model_type"] == "llama"
        assert min(plan["memory_bytes"]["host"], plan["seconds"]) > 0
        assert plan["loads_in"]["transformers"] == "yes"
    out, _ = succeeded(run("prune", tmp_path, "--dry-run", "--sparsity", 0.5))
    assert "memory of the host" in out
    assert "a rough total" in out
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("file", "content"), [
    ("chat_template.jinja", "{{ messages }}"),
    ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
])  # fmt: skip
def test_the_plan_of_a_model_for_chats_names_the_text_to_take(run, tmp_path, file, content):
    tm.tiny("llama").config.save_pretrained(tmp_path)
    hint = "--calibration c4=1,self:prompts.jsonl=1"
    for calibration in ("c4", "prompts.txt"):
        out, _ = succeeded(run("prune", tmp_path, "--dry-run", "--calibration", calibration))
        assert hint not in out
        (tmp_path / file).write_text(content)
    (tmp_path / "prompts.txt").write_text("text")
    for calibration, told in {"c4": True, "prompts.txt": False}.items():
        out, _ = succeeded(run("prune", tmp_path, "--dry-run", "--calibration", calibration))
        assert (hint in " ".join(out.split())) == told


def test_of_several_processes_the_first_prints(run, dense, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert succeeded(run("prune", dense, "--dry-run")) == ("", "")


def test_a_dry_run_shows_the_plan_that_does_not_fit(run, tmp_path, monkeypatch):
    """Whoever plans for a larger machine needs its figures; the refusal comes behind them."""
    little = devices.FreeMemory(None, 1_000_000)
    monkeypatch.setattr(devices.FreeMemory, "of", lambda device: little)
    (tmp_path / "config.json").write_text(json.dumps(tm.raw_config("llama")))
    status, out, err = run("prune", tmp_path, "--dry-run")
    assert (status, "memory of the host" in out) == (1, True)
    assert err.startswith("coec: about ")
    assert "GB of memory are needed" in err


def test_flags_win_over_the_recipe_file(dense, tokens, run, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'preset = "paper"\n'
        f'sparsity = 0.5\nseq-len = 32\nsamples = 24\ncalibration = "{tokens}"\nkappa = 4\n'
        'selection = "flap"\nalpha = 0.8\n'
    )
    out, _ = succeeded(run("prune", dense, tmp_path / "out", "--config", recipe, "--alpha", 0.7,
                           "--json"))  # fmt: skip
    chosen = json.loads(out)["recipe"]
    assert (chosen["sparsity"], chosen["selection"]) == (0.5, "flap")
    assert (chosen["options"]["alpha"], chosen["options"]["kappa"]) == (0.7, 4)


@pytest.mark.parametrize(
    "flags",
    [
        "--selection wanda-sp --rotation left --kappa 4",
        "--selection flap --solver gradient",
        "--selection magnitude --parameterization full --lambda-a 0",
        "--selection random --rescale fixed --seed 7",
        "--compensation ridge-to-slice --ridge 0.1 --dtype bfloat16",
        "--compensation least-squares --ridge 0 --forward-dtype float64",
        "--compensation rcpu --device cpu",
        "--lambda-a 5 --r-p 4 --alpha 1 --multiple-of 4",
        "--calibration self --samples 16 --seq-len 16 --compensation none",
        "--sparsity 0.6 --compensation bias --force",
        "--kappa 4 --sparsity 0.4 --attention-sparsity 0.5",
    ],
)
def test_every_flag_does_something(flags, prune, tmp_path):
    flags = flags.split()
    out, _ = succeeded(prune("--preset", "paper", *flags, "--json"))
    record = json.loads(out)
    flat = {**record["recipe"], **record["recipe"]["options"]}
    for flag, value in zip(flags[::2], flags[1::2]) if len(flags) % 2 == 0 else ():
        recorded = flat.get(flag.removeprefix("--").replace("-", "_"))
        if flag == "--device":
            recorded = record["environment"]["device"]
        assert str(recorded) == value or recorded == float(value), flag
    assert torch.isfinite(tm.logits(tm.load(tmp_path / "out")).float()).all()


def test_a_text_column_can_be_named(dense, run, perplexity, tmp_path):
    text, column = tmp_path / "rows.jsonl", ("--text-column", "story")
    rows = [{"story": "once upon a time there was a cat. " * 4, "text": ""}] * 20
    text.write_text("\n".join(map(json.dumps, rows)))
    succeeded(run("prune", dense, tmp_path / "out", "--calibration", text, "--samples", 8,
                  "--seq-len", 32, *column, *NONE))  # fmt: skip
    flags = (*column, "--device", "cpu", "--dtype", "float32", "--json")
    out, _ = succeeded(perplexity(tmp_path / "out", *flags, text=text))
    assert json.loads(out)["windows"] > 50


def test_eval_on_text_of_the_baseline(dense, run):
    _, out, _ = run("eval", dense, "--text", "self", "--baseline", dense, "--samples", 4,
                    "--seq-len", 16, "--seed", 3, "--json")  # fmt: skip
    result = json.loads(out)
    assert (result["text"], result["kl"], result["ratio"]) == ("self (seed 3)", 0, 1)


@pytest.mark.parametrize(
    "arguments",
    ["prune", "prune model", "prune model out --nonsense", "prune model out --alpha x",
     "prune model out --selection best", "eval", "polish"],
)  # fmt: skip
def test_wrong_usage_is_status_2(arguments, run):
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert "Usage" in err


def test_errors_are_one_line_on_stderr_and_status_1(run, tmp_path):
    check_refused(run("eval", tmp_path / "nowhere"), "coec: no model at")


def test_memory_that_runs_out_is_one_line(dense, run, monkeypatch):
    """torch raises a plain RuntimeError for the CPU's; others are bugs and keep their traceback."""
    cuda = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    bug = RuntimeError("a bug")
    advice = "coec: out of memory: lower --samples or --seq-len"

    for measured, said in (
        (raising(cuda), f"{advice}, or use --device cpu (CUDA out of memory.)\n"),
        (lambda *_, **__: torch.empty(10**15), f"{advice}\n"),
    ):
        monkeypatch.setattr("coec.evaluation.perplexity", measured)
        assert run("eval", dense) == (1, "", said)
    monkeypatch.setattr("coec.evaluation.perplexity", raising(bug))
    with pytest.raises(RuntimeError, match="a bug"):
        run("eval", dense)


def test_a_hub_name_is_found_in_the_hubs_cache(run, tokens, monkeypatch, tmp_path):
    """The real download code, offline: the cache as the hub's client leaves it."""
    repository = tmp_path / "hub" / "models--org--tiny"
    tm.save(tm.tiny("llama", torch.float32), repository / "snapshots" / "0123456789")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    out, _ = succeeded(run("prune", "org/tiny", tmp_path / "out", "--calibration", tokens,
                           *WINDOWS, *NONE, "--json"))  # fmt: skip
    assert json.loads(out)["model"] == "org/tiny"
    assert tm.load(tmp_path / "out").config.intermediate_size == 28


def test_an_interrupted_run_says_that_nothing_was_written(prune, monkeypatch, tmp_path):
    monkeypatch.setattr("coec.pruning.solve", raising(KeyboardInterrupt))
    status, out, err = prune("--preset", "paper")
    assert (status, out) == (130, "")
    assert err.rstrip().endswith("coec: interrupted; nothing half-written is left")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, *END_SIGNALS])
def test_a_signal_ends_a_run_whatever_code_in_c_makes_of_it(number, prune, monkeypatch, tmp_path):
    monkeypatch.setattr("coec.pruning.solve", signalled(number))
    status, out, err = prune("--preset", "paper")
    assert (status, out) == (128 + number, "")
    assert err.rstrip().endswith("coec: interrupted; nothing half-written is left")
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
def test_what_is_finished_all_the_same_is_no_failure(run, monkeypatch):
    """An error that took a signal's place was passed over."""

    def passed_over():
        with contextlib.suppress(ValueError):
            signalled(signal.SIGTERM)()

    monkeypatch.setattr("coec.cli.methods.show", lambda *shown: passed_over())
    assert run("methods")[0] == 0


@pytest.mark.parametrize("content", ["model = 1", "alhpa = 1", "alpha = ", "[coec]\nalpha = 1"])
def test_a_recipe_file_holds_settings_alone(content, dense, run, tmp_path):
    (tmp_path / "r.toml").write_text(content)
    command = ("prune", dense, tmp_path / "out", "--config", tmp_path / "r.toml")
    check_refused(run(*command), "r.toml'")


def test_evaluation_on_the_calibration_text_is_noted(dense, tokens, prune, perplexity, tmp_path):
    other = tm.token_file(tmp_path / "other.npy", rows=12)
    prune(*NONE)
    for text, same in ((tokens, True), (other, False)):
        out, err = succeeded(perplexity(tmp_path / "out", "--json", text=text))
        assert json.loads(out)["same_text_as_calibration"] is same
        assert ("note: evaluated on the text it was calibrated on" in err) is same
    _, out, _ = perplexity(tmp_path / "out")
    assert "same text" not in out
    _, out, err = perplexity(dense, "--json")
    assert json.loads(out)["same_text_as_calibration"] is None
    assert "note" not in err


def test_a_record_that_is_none_is_one_line(dense, prune, perplexity, tmp_path):
    shutil.copytree(dense, tmp_path / "model")
    prune(*NONE)
    whole = json.loads((tmp_path / "out/coec.json").read_text())
    spoiled = [json.dumps(whole | {name: 3.0}) for name in ("calibration", "sites", "recipe")]
    for content in ("{", "[]", '{"calibration": null}', *spoiled):
        (tmp_path / "model" / "coec.json").write_text(content)
        status, _, err = perplexity(tmp_path / "model")
        assert (status, err.count("\n")) == (1, 1)
        assert "coec.json' is not the report of a pruning run" in err


HEAVY = ("torch", "transformers", "datasets", "huggingface_hub", "jaxtyping", "numpy", "lm_eval")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["prune", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    """A test of what is imported, which is what takes seconds, and not of a clock."""
    code = (
        "import sys\nfrom coec.cli import main\n"
        f"sys.argv = ['coec', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as exit_:\n    status = exit_.code\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(status or 0, loaded, file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stderr == "0 []\n"
    assert "Usage: coec" in shown.stdout or arguments == ["--version"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_line_of_help_begins_the_help_of_the_command(command):
    assert command_of(command).help.startswith(COMMANDS[command].help)


def test_code_of_a_tokenizer_is_refused_by_its_flag(dense, run, text, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(dense, tmp_path / "model")
    own = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": [None, "odd.Odd"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    (model / "odd.py").write_text("raise SystemExit('it ran')")
    for line in (
        ["prune", model, tmp_path / "out", "--calibration", text, "--samples", 8],
        ["eval", model, "--text", text],
    ):
        check_refused(run(*line, "--seq-len", 32), "pass --trust-remote-code if you trust it")


def test_a_dry_run_refuses_what_a_run_refuses(dense, run):
    """Sums over tokens overflow in float16, wherever that is found out."""
    command = ("prune", dense, "--preset", "balanced", "--forward-dtype", "float16", "--dry-run")
    status, _, err = run(*command)
    assert (status, "overflow in float16: set --forward-dtype" in err) == (1, True), err


OWN = """
import coec

def largest(weight, gram):
    return weight.square().sum(dim=0)

def scaled(problem, *, factor: float = 0.5):
    return coec.SiteResult(factor * problem.weight[:, problem.kept.indices])
"""


def test_functions_of_a_file_select_and_compensate(run, dense, tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("broken.py").write_text("{}['x']")  # whose KeyError is not that of a missing name
    own = ("--selection", "own.py:largest", "--compensation", "own.py:scaled")
    how = ("--calibration", tokens, "--samples", 24, "--seq-len", 32)
    status, _, err = run("prune", dense, "out", *how, *own)
    assert status == 0, err
    recipe = json.loads(Path("out/coec.json").read_text())["recipe"]
    assert (recipe["selection"], recipe["compensation"]) == ("largest", "scaled")
    config = "selection = 'own.py:largest'\ncompensation = 'own.py:scaled'"
    Path("recipe.toml").write_text(config)
    succeeded(run("prune", dense, "again", *how, "--config", "recipe.toml"))
    assert json.loads(Path("again/coec.json").read_text())["recipe"] == recipe
    Path("recipe.toml").write_text("selection = 'own.py:absent'")
    refused = run("prune", dense, "other", *how, "--config", "recipe.toml")
    check_refused(refused, "'recipe.toml', selection: 'own.py' defines no absent")
    for value, said in {
        "own.py:absent": "defines no absent", "absent.py:x": "cannot be run",
        "magic": "FILE.py:NAME", "broken.py:x": "cannot be run",
    }.items():  # fmt: skip
        status, _, err = run("prune", dense, "other", *how, "--selection", value)
        assert status == 2
        assert said in " ".join(err.replace("│", "").split())
