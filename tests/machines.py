"""A machine whose rates are known."""

from coec.planning.machines import Machine


def small_machine():
    """A machine of round numbers."""
    kinds = ("product", "attention", "eigh", "svd", "cholesky", "triangular", "elementwise")
    rates = dict.fromkeys((*kinds, "reduce", "digest", "link"), ((1.0, 1000000000.0),))
    rates |= {"call": ((1.0, 1e5),), "tokenise": ((1.0, 1e6),), "import": ((1.0, 0.2),)}
    return Machine("a small machine", "cpu", rates)
