"""Selection: how much to keep, and which units."""

from coec.selection.elimination import removal_path
from coec.selection.importance import error_saved, standardised
from coec.selection.scores import (
    SELECTIONS,
    Score,
    column_scores,
    expert_scores,
    keep_highest,
    kept_count,
    unit_scores,
)

__all__ = [
    "SELECTIONS",
    "Score",
    "column_scores",
    "error_saved",
    "expert_scores",
    "keep_highest",
    "kept_count",
    "removal_path",
    "standardised",
    "unit_scores",
]
