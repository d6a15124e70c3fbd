"""Spelling of settings: errors name them as Python does, `seq_len=64`; here they become flags.

The package is used from Python too, where nobody can pass a flag. So a message that tells what to
change writes a keyword argument, and this module, alone, makes `--seq-len 64` of it.
"""

import re

from coec.settings import NAMES

FLAGS = NAMES | {
    "baseline", "batch_size", "context", "dtype", "force", "jobs", "limit", "max_windows", "model",
    "new_tokens", "no_tokenizer", "prompt_tokens", "repeats", "restart", "statistics", "tasks",
    "tasks_data", "text", "trust_remote_code", "warmup",
}  # fmt: skip
"""Arguments that are a flag of some command."""

_ARGUMENT = re.compile(
    r"(?P<quoted>(?<!\w)'[^']*')"  # a path, or what the user wrote: left as it is
    r"|(?<![\w.])(?P<name>[a-z][a-z_]*)=(?P<value>\"[^\"]*\"|[\w.:/+-]*[\w/+-])"
)


def spelled(message: str) -> str:
    """Write every argument of Python in a message as a flag: `force=True` is `--force`."""
    return _ARGUMENT.sub(_flag, message)


def flag_of(name: str) -> str:
    """Flag of an argument."""
    return f"--{name.replace('_', '-')}"


def _flag(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if name not in FLAGS:
        return match[0]
    value = value.strip('"')
    return flag_of(name) if value == "True" else f"{flag_of(name)} {value}"
