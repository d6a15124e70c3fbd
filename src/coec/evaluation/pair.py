"""A pruned model and the dense model that it was made from, checked to belong together."""

from dataclasses import dataclass
from pathlib import Path

import torch

from coec.allocation.kept import KEPT
from coec.errors import ModelError, OptionError
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict, read_tensors
from coec.models.folder import find_model, read_config
from coec.models.layout import Layout, Rows, Shape, Site
from coec.pipeline.report import REPORT
from coec.types import KeptSet


@dataclass(frozen=True, eq=False)
class ModelPair:
    """A dense model, a pruned one, and the kept units.

    Attributes:
        dense, pruned: the models; their weights are finite.
        units: the kept units of every site, by `layers.<i>.<site>`.
        fitted: whether producers were fitted too (`reconstruct`), and are no copies any more.
    """

    dense: Dense
    pruned: Dense
    units: dict[str, KeptSet]
    fitted: bool

    @classmethod
    def open(cls, dense: str | Path | Dense | None, pruned: str | Path | Dense) -> "ModelPair":
        """Open both models; every weight is read once, and nothing is computed.

        Args:
            dense: folder or hub name; None for the model that `coec.json` names, if it is here.
            pruned: a folder that `coec.prune` wrote.

        Raises:
            ModelError: a folder is damaged or was not written by coec, or the two do not belong
                together.
        """
        folder = pruned.folder if isinstance(pruned, Dense) else find_model(pruned)
        report = _read_report(folder)
        before = Dense.open(_dense_model(folder, report) if dense is None else dense)
        after = Dense.open(pruned if isinstance(pruned, Dense) else folder)
        # A mismatch is reported before damaged weights.
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
        """The largest number of tokens that both can take."""
        return self.dense.positions

    @property
    def vocabulary(self) -> int:
        """Number of token ids of both."""
        return self.dense.vocabulary

    def kept(self, site: Site) -> KeptSet:
        """The units that a site keeps."""
        return self.units[site.key]

    def reads_the_same(self, site: Site) -> bool:
        """True if all direct inputs of the consumer are still copied rows of the dense model."""
        return not self.fitted or all(
            self._copied(site, rows) for rows in site.fitted if rows.tensor in self.pruned.files
        )

    def _copied(self, site: Site, rows: Rows) -> bool:
        """True if the kept rows of a producer are those of the dense model."""
        smaller = next(s for s in self.pruned.layout.sites if s.key == site.key)
        # The pruned model may have further producers: biases that its format demands.
        names = {producer.tensor for producer in site.producers}
        written = [producer for producer in smaller.producers if producer.tensor in names]
        after = written[site.producers.index(rows)]
        old = self.dense.tensor(rows.tensor)[rows.of(self.kept(site))]
        new = self.pruned.tensor(after.tensor)[after.start : after.stop]
        return torch.equal(old.to(new.dtype), new)

    def _check_kinship(self) -> None:
        """Raise ModelError if the weights that pruning copies are another model's.

        These are the embedding, and the kept rows of the producers at the first site of every kind,
        except for fitted rows.
        """
        name = self.dense.layout.embedding
        old, new = self.dense.tensor(name), self.pruned.tensor(name)
        if not torch.equal(old.to(new.dtype), new):
            raise self._stranger(f"the rows of {name} are others")
        for site in self.dense.layout.kinds:
            for rows in site.producers:
                fitted = self.fitted and rows in site.fitted
                if not fitted and not self._copied(site, rows):
                    raise self._stranger(f"the rows that {rows.tensor} keeps are others")

    def _stranger(self, reason: str) -> ModelError:
        return ModelError(
            f"'{self.pruned.folder}' was not pruned from '{self.dense.folder}': {reason}; give the "
            "dense model it was made from"
        )


def _read_report(folder: Path) -> JsonDict:
    missing = [name for name in (KEPT, REPORT) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"no {missing[0]} in '{folder}': PRUNED must be a folder that `coec prune` wrote"
        )
    return read_config(folder / REPORT)


def _fitted(report: JsonDict) -> bool:
    recipe = report.get("recipe")
    return isinstance(recipe, dict) and bool(recipe.get("reconstruct"))


def _dense_model(folder: Path, report: JsonDict) -> Path:
    """Find the dense model that the report names, here or beside the pruned one."""
    path = Path(str(report.get("model")))
    for place in (path, folder.absolute().parent / path):
        if place.is_dir():
            return place
    raise ModelError(
        f"'{folder}' was made from '{path}', which is no folder here or beside it: "
        "name the dense model, coec analyze DENSE PRUNED"
    )


def _unchanged(model: Description) -> dict[str, int]:
    """The sizes that pruning does not change."""
    shape = model.shape
    return {
        "vocabulary": model.vocabulary,
        "blocks": shape.layers,
        "hidden size": shape.hidden,
        "head size": shape.head_dim,
        "query heads per KV group": shape.group,
    }


def _check_sizes(folder: Path, dense: dict[str, int], pruned: dict[str, int]) -> None:
    for name, size in dense.items():
        if pruned[name] != size:
            raise ModelError(
                f"the two models do not belong together: {name} {size} in DENSE, {pruned[name]} in "
                f"PRUNED; give the dense model that '{folder / REPORT}' names"
            )


def _read_units(folder: Path, before: Layout, after: Layout) -> dict[str, KeptSet]:
    """Read the kept set of every site, and check it against both layouts."""
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
