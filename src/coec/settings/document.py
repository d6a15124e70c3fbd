"""docs/SETTINGS.md: all settings as Markdown tables."""

from coec.settings import OPTIONS, PARTS, Setting

PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a recipe or grid (`seq-len` or `seq_len`),
and an argument of `coec.prune` (`seq_len`). This file is written by `python -m coec.settings`.
"""
_WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}


def document() -> str:
    """A table for every part of a recipe, and one for every set of compensations with options."""
    groups = {
        part_class.__name__: ((part_class.__doc__ or "").splitlines()[0], part_class.table())
        for part_class in PARTS
    }
    for methods in dict.fromkeys(option.methods for option in OPTIONS):
        names = ", ".join(f"`{name}`" for name in methods)
        fields = tuple(option for option in OPTIONS if option.methods == methods)
        groups[f"Options of {names}"] = "", fields
    sections = [PREFACE]
    for title, (intro, group) in groups.items():
        rows = "\n".join(_row(setting) for setting in group)
        head = f"## {title}\n" + (f"\n{intro}\n" if intro else "")
        sections.append(f"{head}\n| setting | values | default | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(sections)


def _row(item: Setting) -> str:
    type_name = item.kind
    if isinstance(type_name, tuple):
        values = ", ".join(f"`{value}`" for value in type_name)
    else:
        values = _WORDS[type_name] if type_name else "anything"
    default = item.otherwise or f"`{item.default}`"
    if type_name is bool:
        default = "on" if item.default else "off"
    return f"| `{item.name}` | {values} | {default} | {item.help} |"
