"""A pruned folder and the dense model it was made from, checked to belong together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coec.allocation.kept import KEPT
from coec.errors import ModelError, OptionError
from coec.models.dense import Dense
from coec.models.description import Description, find_model, read_config
from coec.models.files import read_tensors
from coec.models.layout import Layout, Rows, Site
from coec.models.shape import Shape
from coec.pipeline.report import REPORT
from coec.types import KeptSet


@dataclass(frozen=True, eq=False)
class Pair:
    """Two models and the kept units between them.

    Attributes:
        dense, pruned: the models, whole and finite.
        units: the kept units of every site, by `layers.<i>.<site>`.
        fitted: whether producers were fitted as well (`reconstruct`), and are no copies any more.
    """

    dense: Dense
    pruned: Dense
    units: dict[str, KeptSet]
    fitted: bool

    @classmethod
    def open(cls, dense: str | Path | Dense | None, pruned: str | Path | Dense) -> "Pair":
        """Opens both, unless they are open; every weight is read once, and nothing is computed.

        Args:
            dense: folder or hub name; None for the model that `coec.json` names, if it is here.
            pruned: a folder that `coec.prune` wrote.

        Raises:
            ModelError: a folder is damaged or was not written by coec, or the two do not belong
                together.
        """
        folder = pruned.folder if isinstance(pruned, Dense) else find_model(pruned)
        report = _read_report(folder)
        before = Dense.open(_named_model(folder, report) if dense is None else dense)
        after = Dense.open(pruned if isinstance(pruned, Dense) else folder)
        # What does not belong together is said before what is damaged.
        _check_sizes(folder, _unchanged(before), _unchanged(after))
        units = _read_units(folder, before.layout, after.layout)
        pair = cls(before, after, units, _fitted(report))
        for model in (before, after):
            model.check_values()
        pair._check_kinship()
        return pair

    @property
    def before(self) -> Shape:
        """The dense model's sizes."""
        return self.dense.shape

    @property
    def after(self) -> Shape:
        """The pruned model's sizes."""
        return self.pruned.shape

    @property
    def positions(self) -> int:
        """The most tokens that both can take."""
        return self.dense.positions

    @property
    def vocabulary(self) -> int:
        """Token ids of both."""
        return self.dense.vocabulary

    def kept(self, site: Site) -> KeptSet:
        """The units that a site keeps."""
        return self.units[site.key]

    def reads_the_same(self, site: Site) -> bool:
        """Whether the kept rows of all that the consumer reads at once are still copies."""
        return not self.fitted or all(
            self._copied(site, rows) for rows in site.fitted if rows.tensor in self.pruned.files
        )

    def _copied(self, site: Site, rows: Rows) -> bool:
        """Whether the rows of a producer that a site keeps are those of the dense model."""
        smaller = next(s for s in self.pruned.layout.sites if s.key == site.key)
        # The pruned model may have more of them: biases that its format demands.
        known = {one.tensor for one in site.producers}
        written = [one for one in smaller.producers if one.tensor in known]
        after = written[site.producers.index(rows)]
        old = self.dense.tensor(rows.tensor)[rows.of(self.kept(site))]
        new = self.pruned.tensor(after.tensor)[after.start : after.stop]
        return torch.equal(old.to(new.dtype), new)

    def _check_kinship(self) -> None:
        """Raises ModelError where what pruning copies is another model's.

        That is the embedding, and of the first site of every kind the kept rows of its producers;
        of those that were fitted nothing can be asked.
        """
        name = self.dense.layout.embedding
        old, new = self.dense.tensor(name), self.pruned.tensor(name)
        if not torch.equal(old.to(new.dtype), new):
            raise self._stranger(f"the rows of {name} are others")
        for site in self.dense.layout.kinds:
            for rows in site.producers:
                held = not (self.fitted and rows in site.fitted)
                if held and not self._copied(site, rows):
                    raise self._stranger(f"the rows that {rows.tensor} keeps are others")

    def _stranger(self, why: str) -> ModelError:
        return ModelError(
            f"'{self.pruned.folder}' was not pruned from '{self.dense.folder}': {why}; give the "
            "dense model it was made from"
        )


def _read_report(folder: Path) -> dict[str, Any]:
    missing = [name for name in (KEPT, REPORT) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"no {missing[0]} in '{folder}': PRUNED must be a folder that `coec prune` wrote"
        )
    return read_config(folder / REPORT)


def _fitted(report: dict[str, Any]) -> bool:
    recipe = report.get("recipe")
    return isinstance(recipe, dict) and bool(recipe.get("reconstruct"))


def _named_model(folder: Path, report: dict[str, Any]) -> Path:
    """The dense model that the report names, if it is here or beside the pruned one."""
    named = Path(str(report.get("model")))
    for place in (named, folder.absolute().parent / named):
        if place.is_dir():
            return place
    raise ModelError(
        f"'{folder}' was made from '{named}', which is no folder here or beside it: "
        "name the dense model, coec analyze DENSE PRUNED"
    )


def _unchanged(model: Description) -> dict[str, int]:
    """The sizes that pruning leaves as they are."""
    shape = model.shape
    return {
        "vocabulary": model.vocabulary,
        "blocks": shape.layers,
        "hidden size": shape.hidden,
        "head size": shape.head_dim,
        "query heads per KV group": shape.group,
    }


def _check_sizes(folder: Path, dense: dict[str, int], pruned: dict[str, int]) -> None:
    for what, size in dense.items():
        if pruned[what] != size:
            raise ModelError(
                f"the two models do not belong together: {what} {size} in DENSE, {pruned[what]} in "
                f"PRUNED; give the dense model that '{folder / REPORT}' names"
            )


def _read_units(folder: Path, before: Layout, after: Layout) -> dict[str, KeptSet]:
    """The kept set of every site, checked against both layouts."""
    stored = read_tensors(folder / KEPT)
    units = {}
    for site, smaller in zip(before.sites, after.sites, strict=True):
        key = site.key
        if key not in stored:
            raise ModelError(f"'{folder / KEPT}' lacks {key}: it is of another model")
        try:
            units[key] = KeptSet(stored[key], site.units)
        except OptionError as error:
            raise ModelError(
                f"{key} in '{folder / KEPT}' does not fit the dense model: {error}"
            ) from error
        if len(units[key].indices) != smaller.units:
            raise ModelError(
                f"{key} in '{folder / KEPT}' keeps {len(units[key].indices)} units, the pruned "
                f"model has {smaller.units}: the files are of different runs"
            )
    return units
