"""How close is close, in one place. Relative to the size of the expected answer."""

EXACT = 1e-12
"""The same numbers by another order of operations, float64."""

CLOSED_FORM = 1e-9
"""A closed form by another route: decompositions and solves, float64."""

SOLVER = 1e-2
"""An iterative answer against the best known objective."""
