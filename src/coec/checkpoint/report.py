"""Report of a pruning run, written as coec.json."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_origin, get_type_hints

from coec.errors import ModelError
from coec.events import as_html
from coec.models.files import JsonDict, parse_json, write_json
from coec.models.folder import REPORT
from coec.text.sources import mixture
from coec.version import __version__

QUOTED = re.compile(r"(['`])(?:file://)?/[^'`]*/([^'`/]+)\1")
"""An absolute path in a sentence, and its last name."""


@dataclass(frozen=True, repr=False)
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
        reconstruction: if the pruned model was run together with the dense model: its perplexity on
            validation windows, the dense model's, the KL, and the windows' kind and count.
        seconds: wall-clock time by phase.
        environment: versions and device.
        origin: the name of the dense model, and the licence and language in its card.
        recoveries: every training of the pruned model, and its result.
    """

    model: str
    model_sha256: str
    out: str
    recipe: JsonDict
    plan: JsonDict
    calibration: JsonDict
    sites: list[JsonDict]
    seconds: dict[str, float]
    environment: dict[str, str]
    reconstruction: JsonDict = field(default_factory=dict)
    origin: JsonDict = field(default_factory=dict)
    recoveries: list[JsonDict] = field(default_factory=list)

    @property
    def measured_on(self) -> str:
        """Windows on which trainings of blocks were measured, in words: validation, or fitted."""
        return "validation" if self.reconstruction.get("windows") == "held out" else "fitted"

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._summary()[1:])
        return f"<Report of {self.out}: {facts}>"

    def _repr_html_(self) -> str:
        """Return the summary as a table, for notebooks."""
        return as_html(self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        """Return names and values of what matters most."""
        before, after = (self.plan["parameters"][when] for when in ("before", "after"))
        rows = [("folder", self.out), ("parameters", f"{before:,} → {after:,}")]
        for kind in self.kinds:
            sliced, compensated = self.mean_errors(kind)
            rows.append((f"{kind} error", f"{sliced:.4f} → {compensated:.4f}"))
        for recovery in self.recoveries:
            kl = recovery["held_out"]
            rows.append(("KL after training", f"{kl['before']:.4f} → {kl['after']:.4f}"))
        return rows

    def as_dict(self) -> JsonDict:
        """Return the report without places: no output folder, and no folders of the inputs."""
        record = {name: value for name, value in vars(self).items() if name != "out"}
        return {"coec": __version__, **public(record)}

    @property
    def events(self) -> dict[str, list[str]]:
        """Modules in which each safeguard fired, by its event."""
        modules: dict[str, list[str]] = {}
        for site in self.sites:
            for event in site["events"]:
                modules.setdefault(event, []).append(site["module"])
        return modules

    @property
    def kinds(self) -> list[str]:
        """The kinds of sites that there are, in the order of a block."""
        return list(dict.fromkeys(row["site"] for row in self.sites))

    def mean_errors(self, site: str) -> tuple[float, float]:
        """Return the mean relative error before and after compensation over a site's blocks, on the
        windows fitted on; 0 if no block has any.
        """
        # Rows without an error kept everything, or had no tokens.
        rows = [row for row in self.sites if row["site"] == site]
        before, after = (
            [row[key] for row in rows if row.get(key) is not None]
            for key in ("error_before", "error_after")
        )
        return fmean(before or [0.0]), fmean(after or [0.0])

    @classmethod
    def read(cls, folder: str | Path) -> "Report":
        """Return the report of a folder that `prune` wrote; raises ModelError where it is none."""
        path = Path(folder) / REPORT
        try:
            record = {"reconstruction": {}, "origin": {}, "recoveries": [], **parse_json(path)}
            # Every field must be there, and of the kind that its annotation names.
            hints = get_type_hints(cls)
            del hints["out"]
            for name, hint in hints.items():
                if not isinstance(record[name], get_origin(hint) or hint):
                    raise TypeError(f"{name} is no {hint}")
            return cls(out=str(folder), **{name: record[name] for name in hints})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"'{path}' is not the report of a pruning run: restore it, or move it away"
            ) from error

    def write(self, folder: Path) -> None:
        """Write coec.json."""
        write_json(folder / REPORT, self.as_dict())

    def without_places(self) -> "Report":
        """Return the report as its file has it."""
        record = self.as_dict()
        return replace(self, **{name: record[name] for name in record if name != "coec"})


def public(value: Any) -> Any:
    """Return a record in which absolute paths are their last name: where files lay is private."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if isinstance(value, str):
        # A mixture names several texts, any of which may be a path.
        pieces = value.split(",") if len(mixture(value)) > 1 else [value]
        bare = (Path(p).name if p.strip().startswith(("/", "file://")) else p for p in pieces)
        return QUOTED.sub(r"\1\2\1", ",".join(bare))
    return value


def calibration_digest(folder: Path) -> str | None:
    """Return the SHA-256 of the text that a model was pruned with; None without a coec.json.

    Raises:
        ModelError: the coec.json is no report.
    """
    if not (folder / REPORT).is_file():
        return None
    return str(Report.read(folder).calibration.get("text_sha256"))
