"""Pages of the documentation that are made of other files, as hooks of mkdocs.

The README becomes the first page; the architecture, the changes and how to contribute come from the
root of the repository, and every picture that a page shows. The command reference is made of the
commands, the page on Python of the package's public names, the notebook's page of its cells.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md"} | {
    name: name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
}
"""Files at the root, and the pages that they become."""
NOTEBOOK = "examples/quickstart.ipynb"
_PICTURE = re.compile(r"\]\((?:\.\./)*(benchmarks/results/[\w-]+\.png)\)")
_ABOVE = re.compile(r"\]\(\.\./([\w./#-]+)\)")
_BELOW = re.compile(r"\]\(docs/([\w./#-]+)\)")
_NAMED = re.compile(r"\[(?:docs/|lab/)*(\w+\.md)\]\(")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and the pictures of all pages."""
    texts = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in PAGES.items()}
    texts |= {"commands.md": commands(), "python.md": python(), "notebook.md": notebook()}
    documents = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    shown = "".join([*texts.values(), *documents])
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    for copied in {*_PICTURE.findall(shown), NOTEBOOK}:
        files.append(File.generated(config, copied, abs_src_path=str(ROOT / copied)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **unused: Any) -> str:
    """Make links to other folders links within the site, which name a page by its title."""
    titles = {
        Path(path).name: title
        for section in config.nav
        for pages in section.values()
        for entry in pages
        for title, path in entry.items()
    }
    markdown = _NAMED.sub(lambda link: f"[{titles.get(link[1], link[1])}](", markdown)
    if page.file.src_uri.startswith("lab/"):
        return markdown.replace("](../../", "](../").replace("](../README.md", "](../index.md")
    if page.file.src_uri != "notebook.md":
        markdown = re.sub(rf"\]\((?:\.\./)?{NOTEBOOK}\)", "](notebook.md)", markdown)
    within = _BELOW.sub(r"](\1)", _ABOVE.sub(r"](\1)", markdown))
    return within.replace("](README.md", "](index.md")


def commands() -> str:
    """Return the command reference: what a command does, its arguments, its flags by heading."""
    from coec.cli.commands import COMMANDS, command_of

    said = "What `coec COMMAND --help` says (`--help-all` for prune)."
    parts = [f"# Commands\n\n{said}\n"]
    for name, command in ((name, command_of(name)) for name in COMMANDS):
        parts.append(f"## coec {name}\n\n{_paragraphs(command.help)}\n")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        parts += [f"- `{p.metavar or p.name.upper()}`: {_escaped(p.help or '')}" for p in arguments]
        headings: dict[str, list[str]] = {}
        for option in command.params:
            if option.param_type_name == "option":
                heading = getattr(option, "rich_help_panel", None) or "Options"
                flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
                row = f"| {flags} | {_escaped(option.help or '')} |"
                headings.setdefault(heading, []).append(row)
        for heading, rows in headings.items():
            parts.append(
                f"\n**{heading}**\n\n| flag | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
            )
        parts.append(f"```sh\n{_examples(command.epilog)}\n```\n")
    return "\n".join(parts)


def python() -> str:
    """Return the page on the package: its functions and then its types, each with its docstring."""
    import coec

    names = sorted(coec.__all__, key=lambda name: (not name[0].islower(), name))
    parts = ["# Python\n\nThe public names of the package `coec`.\n"]
    for name in names:
        module = coec._LAZY.get(name, "coec.errors")
        option = f"    options:\n      heading: coec.{name}\n      toc_label: {name}\n"
        parts.append(f"::: {module}.{name}\n{option}")
    return "\n".join(parts)


def notebook() -> str:
    """Return the notebook as a page: its text, and its code in blocks."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    parts = [
        source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for cell in cells
        for source in ["".join(cell["source"])]
    ]
    parts.insert(1, f"[Download the notebook]({NOTEBOOK}).")
    return "\n\n".join(parts) + "\n"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _examples(epilog: str) -> str:
    return "\n".join(line for line in epilog.splitlines() if line.startswith("coec "))
