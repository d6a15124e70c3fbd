"""Selection: how much to keep, and which units."""

from coec.selection.budget import keep_highest, kept_count
from coec.selection.scores import SELECTIONS, Score, column_scores, resolve, unit_scores

__all__ = [
    "SELECTIONS",
    "Score",
    "column_scores",
    "keep_highest",
    "kept_count",
    "resolve",
    "unit_scores",
]
