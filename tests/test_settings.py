"""The table of settings says what the functions and the recipe do."""

import dataclasses
import inspect
from pathlib import Path
from typing import Literal, get_args, get_origin

from coec import settings
from coec.compensation import COMPENSATIONS, options_of
from coec.recipe import DTYPES, SOLVE_DTYPES, Recipe
from coec.selection import SELECTIONS
from coec.settings import Setting

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/SETTINGS.md"


def argument_texts(method) -> dict[str, str]:
    """Texts of the `Args:` section of a docstring, by argument."""
    texts: dict[str, str] = {}
    name, inside = "", False
    for line in (inspect.getdoc(method) or "").splitlines():
        if not line.startswith(" "):
            inside = line == "Args:" or (inside and not line)
        elif inside and line.startswith("     "):
            texts[name] += " " + line.strip()
        elif inside:
            name, _, text = line.strip().partition(": ")
            texts[name] = text
    return texts


def as_written() -> tuple[Setting, ...]:
    """The options as the functions have them; a shared one is described by its last owner."""
    found: dict[str, Setting] = {}
    for method_name, method in COMPENSATIONS.items():
        texts = argument_texts(method)
        for name, parameter in options_of(method).items():
            kind = parameter.annotation
            kind = get_args(kind) if get_origin(kind) is Literal else kind
            owners = (*found[name].methods, method_name) if name in found else (method_name,)
            text = (
                texts[name][0].upper() + texts[name][1:]
                if texts[name][0].isascii()
                else texts[name]
            )
            found[name] = Setting(name, kind, parameter.default, text, methods=owners)
    return tuple(found.values())


def test_options_are_those_of_the_functions_in_words_and_values():
    listed = {option.name: option for option in settings.OPTIONS}
    for option in as_written():
        assert listed.get(option.name) == option, (
            f"coec.settings.OPTIONS should have this entry: {option!r}"
        )
    assert list(listed) == [option.name for option in as_written()]


def test_settings_are_the_fields_of_a_recipe_with_their_defaults():
    apart = {"options", "trust_remote_code"}  # a flag of its own, and no key of any file
    fields = {f.name: f.default for f in dataclasses.fields(Recipe) if f.name not in apart}
    assert {setting.name: setting.default for setting in settings.RECIPE} == fields


def test_names_are_those_of_the_tables():
    assert tuple(SELECTIONS) == settings.SELECTION_NAMES
    assert tuple(COMPENSATIONS) == settings.COMPENSATION_NAMES
    assert tuple(DTYPES) == settings.DTYPE_NAMES
    assert settings.SOLVE_DTYPE_NAMES == SOLVE_DTYPES


def test_the_document_lists_every_setting():
    assert settings.document() == DOCUMENT.read_text(encoding="utf-8"), (
        "write it anew: python -m coec.settings > docs/SETTINGS.md"
    )
