"""The model card: the pruning, the command that repeats it, and the measurements."""

import json
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from coec.checkpoint.report import Report
from coec.config.recipe import Recipe
from coec.config.recovery import Recovery
from coec.methods import COMPENSATIONS
from coec.methods.selection import SELECTIONS
from coec.models.files import JsonDict
from coec.models.layout import in_words, split_over
from coec.models.renumbering import VOCABULARY
from coec.planning.kept import IDLE, KEPT
from coec.version import __version__

CARD = "README.md"
LARGEST_CARD = 2**20
"""Bytes of a dense model's card beyond which it is not read."""
TAKEN = ("license", "license_name", "license_link", "language")
"""Entries of a dense model's card that also hold for models made from it."""
_TRAINED_WITH = (
    "text_column", "answer_tokens", "tokens", "lora", "teacher", "predictions", "seq_len", "seed",
    "forward_dtype", "optimizer", "learning_rate", "cross_entropy", "batch_size",
)  # fmt: skip
"""Settings of a training that the card's command gives where they are not the default."""


def origin(name: str, folder: Path) -> tuple[JsonDict, list[str]]:
    """Return fields of a card's front matter: the dense model, and what its card says of licence.

    And a note where the dense card cannot be read.
    """
    fields = {"base_model": public_name(name, folder)}
    path = folder / CARD
    try:
        if not path.is_file():
            return fields, []
        if path.stat().st_size > LARGEST_CARD:
            raise ValueError(f"it is larger than {LARGEST_CARD:,} bytes")
        metadata = metadata_load(path) or {}
    except Exception as error:  # a parser of a file that may hold anything
        reason = " ".join(str(error).split())[:120]
        return fields, [f"the dense model's {CARD} says no licence that can be read: {reason}"]
    return fields | {
        key: metadata[key] for key in TAKEN if key in metadata and _is_text(metadata[key])
    }, []


def public_name(name: str, folder: Path) -> str:
    """Return a model's name on the hub, or the last name of its folder: places are private."""
    return folder.name if Path(name).is_dir() else name


def _is_text(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return all(isinstance(word, str) and len(word) < 500 for word in words)


_TEXT = "text-generation", "CausalLM"
"""The task of a language model, and what transformers loads it by."""


def write_card(report: Report, folder: Path) -> None:
    """Write the model card of a report."""
    (folder / CARD).write_text(card(report.without_places()), encoding="utf-8")


def card(report: Report) -> str:
    """Return the model card. It has no times, so that the same run writes the same card."""
    plan, parameters = report.plan, report.plan["parameters"]
    before, after = parameters["before"], parameters["after"]
    dense = _dense(report)
    name = dense.rpartition("/")[2]
    code = plan.get("code")
    trust = ", trust_remote_code=True" if code else ""
    inside = plan.get("inside")
    task, kind = ("image-text-to-text", "ImageTextToText") if inside else _TEXT
    reader = "AutoProcessor" if inside else "AutoTokenizer"
    evaluation = "coec eval THIS_FOLDER --baseline DENSE"
    if VOCABULARY in plan["widths"]:  # models of other vocabularies are not compared by token
        evaluation = "coec eval THIS_FOLDER"
    notes = "".join(f"\n{note[0].upper()}{note[1:]}.\n" for note in plan["notes"])
    loaders = "\n".join(f"- {loader}: {verdict}" for loader, verdict in plan["loads_in"].items())
    if sizes := plan.get("tensor_parallel"):
        loaders += f"\n- tensor parallel: {split_over(sizes)}"
    widths = "\n".join(
        f"| {_of_what(width)} | {in_words(w['before'])} | {in_words(w['after'])} |"
        for width, w in plan["widths"].items()
    )
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags: [coec, pruned]
{_front_matter(report)}
---

# {name}, {1 - after / before:.1%} of parameters removed

Made from `{name}` by coec {__version__}: training-free
structured pruning of {_units(plan)}.
{notes}
```python
from transformers import AutoModelFor{kind}, {reader}

model = AutoModelFor{kind}.from_pretrained("path/to/this/folder"{trust})
{reader.removeprefix("Auto").lower()} = {reader}.from_pretrained("path/to/this/folder"{trust})
```
{_stored_as(plan)}
| | dense | pruned |
|---|---|---|
| parameters | {before:,} | {after:,} ({after / before:.1%}) |
{widths}

{_errors(report)}

Errors are on the calibration data; they say nothing about other text. Evaluate before use:
`{evaluation}`.
{_measured(report)}
## Recipe

{_recipe(report)}
{_recovered(report)}
## Loads in

{loaders}

The licence of the dense model applies.
"""


def _errors(report: Report) -> str:
    """Return the table of errors."""
    lines = ["| | slice only | compensated |", "|---|---|---|"]
    for site in report.kinds:
        before, after = report.mean_errors(site)
        lines.append(f"| mean relative output error, {site} | {before:.4f} | {after:.4f} |")
    return "\n".join(lines)


def _measured(report: Report) -> str:
    """Return the perplexities that a run measured itself, on its validation windows."""
    facts = report.reconstruction
    if not facts.get("perplexity") or not facts.get("dense"):
        return ""
    windows = f"{report.measured_on} windows of the calibration"
    pruned, dense, seq_len = facts["perplexity"], facts["dense"], report.calibration["seq_len"]
    divergence = "–" if facts.get("kl") is None else f"{facts['kl']:.4f}"
    return f"""
## Measured

| text | perplexity | dense | ratio | KL |
|---|---|---|---|---|
| {windows}, of {seq_len:,} tokens | {pruned:.4g} | {dense:.4g} | ×{pruned / dense:.3f} | \
{divergence} |
"""


def _recovered(report: Report) -> str:
    """Describe every training of the pruned model and its result; "" if there was none."""
    if not report.recoveries:
        return ""
    lines = ["", "## Recovered", "", "The errors above are those before this training.", ""]
    for record in report.recoveries:
        validation = record["held_out"]
        teacher = "the dense model"
        if record["teacher"] is not None:
            teacher = f"`{record['teacher']}`, which taught it,"
        gain = f"KL to {teacher} {validation['before']:.4f}"
        gain += (
            f" → {validation['after']:.4f}" if record["improved"] else ", which no state was below"
        )
        weights = f"additions of rank {record['lora']}" if record["lora"] else "all weights"
        lines.append(
            f"- {weights}, {record['tokens']:,} tokens of `{record['text']['source']}` "
            f"({record['passes']:.2g} passes): {gain} on {validation['windows']} "
            f"validation windows of {record['seq_len']:,} tokens"
        )
    record = report.recoveries[-1]
    usual = {name: Recovery.model_fields[name].default for name in _TRAINED_WITH}
    flags = {name: record.get(name) for name in _TRAINED_WITH}
    chosen = [_flag(name, v) for name, v in flags.items() if v not in (None, usual[name])]
    text = _flag("text", record["text"]["source"].partition(" (seed ")[0])
    command = " \\\n    ".join(["coec recover DENSE PRUNED OUT", text, *chosen])
    return "\n".join([*lines, "", "```sh", command, "```", ""])


def _dense(report: Report) -> str:
    """Return the name of the dense model on the hub, or that of its folder."""
    return str(report.origin.get("base_model") or Path(report.model).name)


def _front_matter(report: Report) -> str:
    """Return the fields that depend on the dense model; JSON is YAML too."""
    fields = {"base_model": _dense(report), **report.origin}
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())


def _stored_as(plan: Mapping[str, Any]) -> str:
    """Return a sentence on a format that is unusual."""
    note = ""
    if relabelled := plan["relabelled"]:
        note = (
            f"\nThe weights are stored as `{plan['output_model_type']}` "
            f"({relabelled}); the function computed is the same.\n"
        )
    if code := plan.get("code"):
        note += (
            f"\nBlocks have widths of their own, which no stock class builds: `{code}` does. "
            "Read it before you trust it.\n"
        )
    return note


def _recipe(report: Report) -> str:
    """Return the recipe, in words and as the command that makes the model again."""
    recipe, calibration = report.recipe, report.calibration
    options = ", ".join(f"{k} = {v}" for k, v in recipe["options"].items()) or "none"
    kept = report.plan.get("kept")
    all_given = kept and kept["sites"] == len(report.sites)
    return "\n".join([
        f"- preset: {recipe['preset']}",
        f"- selection: {'given' if all_given else recipe['selection']}; "
        f"compensation: {recipe['compensation']}",
        f"- options: {options}",
        f"- calibration: {calibration['windows']} windows of {calibration['seq_len']} tokens from",
        f"  `{calibration['source']}`, seed {recipe['seed']}",
        f"- details: `coec.json`; kept units: `{KEPT}`",
        "",
        _command(report),
    ])  # fmt: skip


def _command(report: Report) -> str:
    """Return the command that makes the model again, or why there is none."""
    recipe = report.recipe
    label: dict[str, Collection[str]] = {"selection": SELECTIONS, "compensation": COMPENSATIONS}
    # Functions and tensors from Python have no flag.
    by_hand = [name for name, fields in label.items() if recipe[name] not in fields]
    by_hand += ["calibration"] * (recipe["calibration"] == "tensor")
    if by_hand:
        were = f"{' and '.join(by_hand)} {'were' if len(by_hand) > 1 else 'was'}"
        return f"No command makes it again: {were} given from Python."
    settings = {"preset": recipe["preset"], "sparsity": recipe["sparsity"], **changed(recipe)}
    if any(recipe[name] is not None for name in ("budget", "budget_active")):
        del settings["sparsity"]
    kept = ""
    if recipe["kept"] is not None:
        # This folder names the units of every site, and the blocks that are left out.
        widths = [width["after"] for width in report.plan["widths"].values()]
        differ = any(isinstance(width, list) for width in widths)
        for name in (*IDLE, "drop_blocks", *([] if differ else ["by_block"])):
            settings.pop(name, None)
        settings["kept"] = "THIS_FOLDER"
        kept = f" THIS_FOLDER is this one, whose `{KEPT}` says which units stay."
    flags = [_flag(name, value) for name, value in settings.items()]
    lines = " \\\n    ".join([f"coec prune {shlex.quote(_dense(report))} OUT", *flags])
    return (
        "With the same version, libraries and kind of device this makes the same model again."
        f"{kept}\n\n```sh\n{lines}\n```"
    )


def changed(recipe: Mapping[str, Any]) -> JsonDict:
    """Return the settings of a recorded recipe that differ from its preset's defaults, options
    included.
    """
    # Others' defaults depend on these.
    chosen = {name: recipe[name] for name in ("preset", "by_block", "target")}
    defaults = Recipe(**chosen).record()
    method, options = recipe["compensation"], dict(defaults.pop("options"))
    if method in COMPENSATIONS:
        own = options if method == defaults["compensation"] else {}
        options = COMPENSATIONS[method].defaults | own
    defaults |= {name: Recipe.model_fields[name].default for name in ("by_block", "target")}
    # None is no flag: attention_sparsity is None if attention_units, `groups` too, are given.
    if recipe["attention_sparsity"] is None is not defaults["attention_sparsity"]:
        del defaults["attention_units"]
    differing = {
        name: value
        for name, value in recipe.items()
        if name not in ("preset", "options") and value not in (None, defaults.get(name))
    }
    return differing | {
        name: value for name, value in recipe["options"].items() if value != options.get(name)
    }


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{flag}"
    return f"--{flag} {shlex.quote(str(value))}"


_UNITS = {
    "mlp": "MLP channels", "shared": "MLP channels", "experts": "channels of experts",
    "whole_experts": "experts", "kv_groups": "KV groups", "query_heads": "query heads",
    "vocabulary": "tokens of the vocabulary",
}  # fmt: skip
"""What the card calls the units that a width counts, in its order."""


def _units(plan: Mapping[str, Any]) -> str:
    """Return the units of which some were removed, in words."""
    changed = {name for name, width in plan["widths"].items() if width["before"] != width["after"]}
    if "kv_groups" in changed:  # which take their query heads along
        changed.discard("query_heads")
    if (size := plan["widths"].get(VOCABULARY)) and size["after"] > size["before"]:
        changed.discard(VOCABULARY)  # it is padded
    found = list(dict.fromkeys(words for name, words in _UNITS.items() if name in changed))
    if dropped := plan.get("dropped_blocks"):
        found.append(f"{len(dropped)} of {plan['layers']} blocks")
    found = found or ["no unit"]
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def _of_what(width: str) -> str:
    """Return the name of the units that a width counts."""
    if width == VOCABULARY:
        return width
    return "channels per expert" if width == "experts" else f"{width.replace('_', ' ')} per block"
