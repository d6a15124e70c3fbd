"""Flags that are made of fields of settings, and files that hold settings."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import typer
from pydantic import NonNegativeFloat
from typer.testing import CliRunner

from coec.cli import flags
from coec.config import Settings, setting
from coec.errors import OptionError


class Toy(Settings):
    sparsity: float = setting(0.3, gt=0, lt=1, heading="What")
    """Fraction removed."""
    samples: int | None = setting(None, ge=1, otherwise="all")
    """Windows."""
    ridge: NonNegativeFloat | Literal["auto"] = setting(0.01)
    """Ridge."""
    train: bool = setting(True)
    """Train."""
    score: Literal["obs", "flap"] | Callable[..., Any] = setting("obs", heading="More: score")
    """Score."""
    tokens: int | str = setting("10M")
    """Tokens."""
    text: Any = setting("wikitext2")
    """Text."""


OF_TOY = {f.name: f for f in (*flags.flags_of(Toy), flags.Flag("seq_len", int, "Length."))}


def run(*words):
    """The exit status, what the command was given, and what was printed."""
    seen = {}

    @flags.with_flags(*flags.flags_of(Toy, "text"), flags.switch("force", "Replace."))
    def command(model: str, **values):
        seen.update(flags.given(values, values))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, seen, " ".join(result.output.replace("│", " ").split())


def test_every_kind_of_field_is_a_flag():
    words = "m --sparsity 1 --samples 2 --ridge auto --no-train --score flap --tokens 3M --force"
    status, seen, _ = run(*words.split())
    assert status == 0
    assert seen == {
        "sparsity": 1.0, "samples": 2, "ridge": "auto", "train": False, "score": "flap",
        "tokens": "3M", "force": True,
    }  # fmt: skip
    assert run("m", "--ridge", "2")[1] == {"ridge": 2.0, "force": False}


@pytest.mark.parametrize(
    "words", [("--ridge", "best"), ("--samples", "x"), ("--score", "x"), ("--text", "a")]
)
def test_wrong_usage_names_the_flag(words):
    status, _, output = run("m", *words)
    assert status == 2
    assert words[0] in output


def test_help_says_what_a_field_is_and_its_default():
    _, _, output = run("--help")
    assert "Fraction removed. Default: 0.3." in output
    assert "Windows. Default: all." in output
    assert "Score. One of obs, flap. Default: obs." in output
    assert output.index("What") < output.index("--sparsity") < output.index("More: score")


def test_a_file_holds_settings(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text("score = 'obs'\nseq-len = 3\n")
    assert flags.read_config(file, OF_TOY) == {"score": "obs", "seq_len": 3}


def test_a_setting_stands_once_in_a_file(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text("seq_len = 4\nseq-len = 3\n")
    with pytest.raises(OptionError, match="holds a setting twice"):
        flags.read_config(file, OF_TOY)


@pytest.mark.parametrize("text", ["sparsty = 1", "a = [", "\0", None])
def test_a_bad_file_is_refused_in_one_line_that_names_it(text, tmp_path):
    file = tmp_path / "recipe.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=r"recipe\.toml") as error:
        flags.read_config(file, OF_TOY)
    assert len(str(error.value).splitlines()) == 1


def test_messages_are_spelled_as_flags():
    run("m")
    assert (
        flags.spelled("samples must be at least 1, got 0") == "--samples must be at least 1, got 0"
    )
    assert flags.spelled("set samples=3, or force=True") == "set --samples 3, or --force"
    assert flags.spelled("'samples=3' is no file, other=3") == "'samples=3' is no file, other=3"
