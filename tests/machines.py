"""A machine whose rates are known."""

from coec.planning.machines import Machine


def small_machine():
    """A machine of round numbers."""
    kinds = ("product", "eigen", "elementwise", "read", "link")
    rates = dict.fromkeys(kinds, ((1.0, 1000000000.0),))
    return Machine("a small machine", "cpu", rates | {"call": ((1.0, 1e5),), "host": ((1.0, 1.0),)})
