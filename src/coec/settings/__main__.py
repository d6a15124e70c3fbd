"""Print docs/SETTINGS.md: all settings as Markdown tables."""

from coec.settings import OPTIONS, PARTS, Setting

_PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a recipe or grid (`seq-len` or `seq_len`),
and an argument of `coec.prune` (`seq_len`). This file is written by `python -m coec.settings`.
"""
_WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}


def document() -> str:
    """A table for every part of a recipe, and one for every set of compensations with options."""
    groups = {part.__name__: ((part.__doc__ or "").splitlines()[0], part.table()) for part in PARTS}
    for methods in dict.fromkeys(option.methods for option in OPTIONS):
        names = ", ".join(f"`{name}`" for name in methods)
        fields = tuple(option for option in OPTIONS if option.methods == methods)
        groups[f"Options of {names}"] = "", fields
    sections = [_PREFACE]
    for title, (intro, group) in groups.items():
        rows = "\n".join(map(_row, group))
        head = f"## {title}\n" + (f"\n{intro}\n" if intro else "")
        sections.append(f"{head}\n| setting | values | default | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(sections)


def _row(item: Setting) -> str:
    if isinstance(item.kind, tuple):
        values = ", ".join(f"`{value}`" for value in item.kind)
    else:
        values = _WORDS[item.kind] if item.kind else "anything"
    default = item.otherwise or f"`{item.default}`"
    if item.kind is bool:
        default = "on" if item.default else "off"
    return f"| `{item.name}` | {values} | {default} | {item.help} |"


if __name__ == "__main__":
    print(document(), end="")
