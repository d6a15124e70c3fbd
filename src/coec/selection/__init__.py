"""Selection: how much to keep, and which units."""

from coec.selection.budget import keep_highest, kept_count
from coec.selection.scores import SELECTIONS, Score, column_scores, resolve, unit_scores
from coec.selection.worth import error_saved, standardised

__all__ = [
    "SELECTIONS",
    "Score",
    "column_scores",
    "error_saved",
    "keep_highest",
    "kept_count",
    "resolve",
    "standardised",
    "unit_scores",
]
