"""What happened in a pruning run: one object, written as coec.json and as the model card."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from coec import __version__
from coec.errors import ModelError
from coec.kept import KEPT
from coec.models.files import parse_json, write_json

REPORT = "coec.json"


@dataclass(frozen=True)
class Report:
    """The account of one pruning run; JSON-ready.

    Attributes:
        model: the dense model as it was named.
        model_sha256: of its configuration and weights.
        out: the folder written.
        recipe: resolved options.
        plan: widths, parameters, output format, loaders.
        calibration: where the windows came from, with digests.
        sites: one entry per block and site.
        rebuilding: where the pruned model was run beside the dense one: how well every candidate
            predicts the held-out windows, and which was chosen.
        seconds: wall-clock time by phase.
        environment: versions and device.
    """

    model: str
    model_sha256: str
    out: str
    recipe: dict[str, Any]
    plan: dict[str, Any]
    calibration: dict[str, Any]
    sites: list[dict[str, Any]]
    seconds: dict[str, float]
    environment: dict[str, str]
    rebuilding: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the output folder's place, which the file itself shows."""
        return {
            "coec": __version__,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "recipe": self.recipe,
            "plan": self.plan,
            "calibration": self.calibration,
            "sites": self.sites,
            "rebuilding": self.rebuilding,
            "seconds": self.seconds,
            "environment": self.environment,
        }

    @property
    def events(self) -> dict[str, list[str]]:
        """Every safeguard that fired, and the modules it fired in."""
        modules: dict[str, list[str]] = {}
        for site in self.sites:
            for event in site["events"]:
                modules.setdefault(event, []).append(site["module"])
        return modules

    @property
    def kinds(self) -> list[str]:
        """The kinds of sites that there are, in the order of a block."""
        return list(dict.fromkeys(row["site"] for row in self.sites))

    def mean_errors(self, site: str, *, held_out: bool = False) -> tuple[float, float]:
        """The mean relative error before and after compensation over a site's blocks.

        On the windows fitted on, or on those held out; 0 where no block has any.
        """
        before, after = (f"{'holdout' if held_out else 'error'}_{w}" for w in ("before", "after"))
        rows = [row for row in self.sites if row["site"] == site and row.get(before) is not None]
        if not rows:
            return 0.0, 0.0
        return (
            sum(row[before] for row in rows) / len(rows),
            sum(row[after] for row in rows) / len(rows),
        )

    @classmethod
    def read(cls, folder: str | Path) -> "Report":
        """The report of a folder that `prune` wrote.

        Raises:
            ModelError: its coec.json is no report.
        """
        path = Path(folder) / REPORT
        try:
            record = {"rebuilding": {}, **parse_json(path)}
            own = {name: get_origin(kind) or kind for name, kind in get_type_hints(cls).items()}
            del own["out"]
            for name, kind in own.items():
                if not isinstance(record[name], kind):
                    raise TypeError(f"{name} is no {kind.__name__}")
            return cls(out=str(folder), **{name: record[name] for name in own})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"'{path}' is not the report of a pruning run: restore it, or move it away"
            ) from error

    def write(self, folder: Path) -> None:
        """Writes coec.json and README.md."""
        write_json(folder / REPORT, self.as_dict())
        (folder / "README.md").write_text(self.card(), encoding="utf-8")

    @property
    def _asked(self) -> str:
        """How many units were to go, in words."""
        kept, share = self.plan.get("kept"), self._share
        if kept is None:
            return f"{share} asked for"
        units = f"the units of `{kept['source']}` kept"
        if kept["sites"] == len(self.sites):
            return units
        return f"{units} at {kept['sites']} sites, {share} asked for at the others"

    @property
    def _share(self) -> str:
        """The fraction of units that was to go, or those of both kinds."""
        every, budget = self.recipe["sparsity"], self.recipe.get("budget_parameters")
        how = self.recipe.get("allocation", "uniform")
        shared = "" if how == "uniform" else f", shared among blocks by `{how}`"
        if budget is not None:
            share = f"{budget:.4g} of the parameters" if budget < 1 else f"{budget:,.0f} parameters"
            return f"a rest of at most {share}{shared}"
        own = [self.recipe.get(f"{site}_sparsity") for site in ("mlp", "attention")]
        mlp, attention = (every if share is None else share for share in own)
        align = self.recipe.get("align", "1")
        rounded = "" if align == "1" else f" (channels rounded up, align = {align})"
        if own == [None, None]:
            return f"{every:.4g} of each{rounded}{shared}"
        return f"{mlp:.4g} of channels{rounded} and {attention:.4g} of groups{shared}"

    @property
    def _selection(self) -> str:
        """By which score units were chosen, or who chose them."""
        kept = self.plan.get("kept")
        return "given" if kept and kept["sites"] == len(self.sites) else self.recipe["selection"]

    def card(self) -> str:
        """The model card. Holds no times, so that the same run writes the same card."""
        calibration = self.calibration
        widths, parameters = self.plan["widths"], self.plan["parameters"]
        before, after = parameters["before"], parameters["after"]
        name = Path(self.model).name
        rows = "\n".join(
            f"| {_of_what(what)} | {counted(w['before'])} | {counted(w['after'])} |"
            for what, w in widths.items()
        )
        errors = "\n".join(
            "| mean relative output error, {} | {:.4f} | {:.4f} |".format(
                site, *self.mean_errors(site)
            )
            for site in self.kinds
        )
        loaders = "\n".join(f"- {loader}: {how}" for loader, how in self.plan["loads_in"].items())
        options = ", ".join(f"{k} = {v}" for k, v in self.recipe["options"].items()) or "none"
        added = calibration.get("sampled", 0)
        sampled = f" and, {added} of them, from the dense model itself" if added else ""
        relabelled = self.plan["relabelled"]
        note = (
            f"\nThe weights are stored as `{self.plan['output_model_type']}` "
            f"({relabelled}); the function computed is the same.\n"
            if relabelled
            else ""
        )
        code = self.plan.get("code")
        trust = ", trust_remote_code=True" if code else ""
        if code:
            note += (
                f"\nBlocks have widths of their own, which no stock class builds: `{code}` does. "
                "Read it before you trust it.\n"
            )
        notes = "".join(f"\n{note[0].upper()}{note[1:]}.\n" for note in self.plan["notes"])
        return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [coec, pruned]
---

# {name}, {1 - after / before:.1%} of parameters removed

Made from `{name}` by coec {__version__}: training-free
structured pruning of MLP channels and KV groups, {self._asked}.
{notes}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{trust})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
{note}
| | dense | pruned |
|---|---|---|
| parameters | {before:,} | {after:,} ({after / before:.1%}) |
{rows}

| | slice only | compensated |
|---|---|---|
{errors}

Errors are on the calibration data; they say nothing about other text. Evaluate before use:
`coec eval THIS_FOLDER --baseline DENSE`.

## Recipe

- selection: {self._selection}; compensation: {self.recipe["compensation"]}
- options: {options}
- calibration: {calibration["windows"]} windows of {calibration["seq_len"]} tokens from
  `{calibration["source"]}`{sampled}, seed {self.recipe["seed"]}
- details: `{REPORT}`; kept units: `{KEPT}`

## Loads in

{loaders}

The licence of the dense model applies.
"""


def _of_what(width: str) -> str:
    """What a width counts, in words."""
    return "channels per expert" if width == "experts" else f"{width.replace('_', ' ')} per block"


def counted(width: int | list[int]) -> str:
    """Units per block in words: one number, or the least and the most where blocks differ."""
    return f"{width:,}" if isinstance(width, int) else f"{min(width):,} to {max(width):,}"


def calibration_digest(folder: Path) -> str | None:
    """The SHA-256 of the text that a model was pruned with; None where no coec.json says so.

    Raises:
        ModelError: the coec.json is no report.
    """
    if not (folder / REPORT).is_file():
        return None
    return str(Report.read(folder).calibration.get("text_sha256"))
