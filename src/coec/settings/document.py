"""docs/SETTINGS.md: all settings as Markdown tables."""

from coec.settings import OPTIONS, PARTS, Setting

PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a recipe or grid (`seq-len` or `seq_len`),
and an argument of `coec.prune` (`seq_len`). This file is written by `python -m coec.settings`.
"""
WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}


def document() -> str:
    """A table for every part of a recipe, and one for every set of compensations with options."""
    groups = {part.__name__: ((part.__doc__ or "").splitlines()[0], part.table()) for part in PARTS}
    for methods in dict.fromkeys(option.methods for option in OPTIONS):
        names = ", ".join(f"`{name}`" for name in methods)
        own = tuple(option for option in OPTIONS if option.methods == methods)
        groups[f"Options of {names}"] = "", own
    parts = [PREFACE]
    for title, (intro, group) in groups.items():
        rows = "\n".join(_row(setting) for setting in group)
        head = f"## {title}\n" + (f"\n{intro}\n" if intro else "")
        parts.append(f"{head}\n| setting | values | default | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(one: Setting) -> str:
    kind = one.kind
    if isinstance(kind, tuple):
        values = ", ".join(f"`{value}`" for value in kind)
    else:
        values = WORDS[kind] if kind else "anything"
    default = one.otherwise or f"`{one.default}`"
    if kind is bool:
        default = "on" if one.default else "off"
    return f"| `{one.name}` | {values} | {default} | {one.help} |"
