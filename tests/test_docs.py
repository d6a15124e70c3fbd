"""What the documents say must be what the code does."""

import re
import tomllib
from pathlib import Path

import pytest

import coec
from coec.cli.commands import COMMANDS, command_of
from coec.config import described
from coec.config.recipe import OPTIONS_OF, Recipe
from coec.methods import COMPENSATIONS
from coec.methods.selection import SELECTIONS
from coec.models.architectures import ARCHITECTURES
from tools import tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/GUIDE.md").read_text(encoding="utf-8")
EXTEND = (ROOT / "docs/EXTEND.md").read_text(encoding="utf-8")
METHODS = (ROOT / "docs/METHODS.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
HISTORY = {"CHANGELOG.md", "LOG.md", "RESULTS.md", "SMALL_MODELS.md"}
"""Documents that also name what there was."""


def fenced(language: str, text: str = GUIDE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_every_command_is_in_the_readme_and_has_help():
    assert README.count("\n") <= 150
    for command in COMMANDS:
        assert f"coec {command}" in README


def test_every_flag_named_in_a_document_exists():
    known = {"index-url", "version", "help", "model-impl", "shared", "install-completion"}
    known |= {"nproc-per-node", "nnodes", "rdzv-backend", "rdzv-endpoint"}  # of torchrun
    known |= {"max-restarts"}  # likewise
    known |= {"use", "fsdp", "num"}  # before a _ in flags of `accelerate launch`
    known |= {"model-path", "tp", "tensor-parallel-size"}  # of SGLang and vLLM
    for command in map(command_of, COMMANDS):
        known |= {option.name.replace("_", "-") for option in command.params}
    switches = [one.name for one in described(Recipe) if bool in one.kinds]
    known |= {f"no-{name.replace('_', '-')}" for name in switches}
    known |= {"tasks", "batch", "num"}  # of lm_eval, before a _
    known |= {"input-len", "output-len", "max-model-len"}  # of vLLM
    known |= {"local-dir", "exclude"}  # of hf
    known |= {"no-mtp"}  # of llama.cpp's converter
    known |= {"no-index", "find-links", "extra-index-url"}  # of pip, as is index-url
    known |= {"apply"}  # of lm_eval, before a _
    for script in [*(ROOT / "benchmarks").glob("*.py"), ROOT / "experiments/paper.py"]:
        known |= set(re.findall(r'"--([a-z-]+)"', script.read_text(encoding="utf-8")))
    for document in (path for path in DOCUMENTS if path.name not in HISTORY):
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", document.read_text(encoding="utf-8")))
        assert named <= known, document.name


@pytest.mark.parametrize("toml", fenced("toml"))
def test_the_recipe_in_the_guide_is_one(toml):
    Recipe(**tomllib.loads(toml))


def test_the_functions_and_the_mathematics_of_extend_run():
    blocks = [block for block in fenced("python", EXTEND) if "coec.prune" not in block]
    names: dict = {}
    for block in blocks:
        exec(block, names)
    found = names["result"].diagnostics
    assert found["error_after"] < found["error_before"]


def test_the_family_in_extend_is_one_of_the_package():
    models = ROOT / "src/coec/models"
    tables = "".join((models / f"{n}.toml").read_text() for n in ("architectures", "blocks"))
    shown = re.findall(r"^```\n(\[.*?)^```", EXTEND, flags=re.DOTALL | re.MULTILINE)
    parts = [part.strip() for block in shown for part in block.split("\n\n")]
    assert len(parts) == 3
    assert all(part in tables for part in parts)


def test_no_document_installs_from_an_index_that_has_no_coec():
    for document in (path for path in DOCUMENTS if path.name not in HISTORY):
        text = document.read_text(encoding="utf-8")
        assert not re.search(r"pip install [^\n]*(?<![\w/])coec\b", text), document.name


def test_the_table_of_loaders_is_made_of_the_findings():
    assert tables.loaders() in (ROOT / "docs/FORMATS.md").read_text(encoding="utf-8")


def test_every_method_is_described():
    for name in [*SELECTIONS, *COMPENSATIONS]:
        assert f"`{name}`" in METHODS
    for options in OPTIONS_OF.values():
        for option in described(options):
            assert f"`{option.name}`" in METHODS, option


def test_every_architecture_has_a_format():
    for architecture in ARCHITECTURES.values():
        assert set(architecture.written_as) <= set(ARCHITECTURES)
        assert architecture.written_as[0] == architecture.model_type


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_changelog_names_the_version():
    assert f"## {coec.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
