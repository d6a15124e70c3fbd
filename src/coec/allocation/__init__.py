"""How many units every site keeps (METHODS §10)."""

from coec.allocation.by_importance import Importances, by_importance
from coec.allocation.rules import ALLOCATIONS, Rule
from coec.allocation.uniform import shares_for, uniform, whole_attention
from coec.allocation.widths import OF_EXPERTS, Widths, parameters

__all__ = [
    "ALLOCATIONS",
    "OF_EXPERTS",
    "Importances",
    "Rule",
    "Widths",
    "by_importance",
    "parameters",
    "shares_for",
    "uniform",
    "whole_attention",
]
