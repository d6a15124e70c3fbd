"""The cost of widths that quantisers and matrix units do not divide (docs/FORMATS.md)."""

from coec.models.layout import Site

_K_BLOCK = 256
"""Weights of a row that K-quants store together."""
_BLOCK = 32
"""The same for Q5_0 and Q8_0, which stand in for K-quants where they divide the row."""
_PLAIN_BITS = 16.0
"""Bits of F16, which stands in where not even these divide it."""
_Q4_K_M = {
    # Half of the blocks' down_proj are Q6_K instead of Q4_K, and so Q8_0 instead of Q5_0.
    "mlp": ((4.5 + 6.5625) / 2, (5.5 + 8.5) / 2),
    "attention": (4.5, 5.5),
}
"""Bits per weight that llama.cpp's Q4_K_M takes for the consumer of a kind of site: in K-quants,
and in the types that stand in for them."""


def fallbacks(site: Site, units: int, outputs: int, blocks: int) -> str | None:
    """Say how much more a quantised consumer costs than at a full width; None if nothing.

    A dense width that is not full itself is no case: pruning has lost nothing there.

    Args:
        site: the kind of site.
        units: number of units that it keeps.
        outputs: rows of the consumer.
        blocks: number of blocks with such a site.
    """
    columns = units * site.columns_per_unit
    if site.kind not in _Q4_K_M or columns % _K_BLOCK == 0 or site.columns % _K_BLOCK:
        return None
    quantised, stand_in = _Q4_K_M[site.kind]
    bits = stand_in if columns % _BLOCK == 0 else _PLAIN_BITS
    extra = blocks * outputs * columns * (bits - quantised) / 8
    module = site.consumer.rpartition(".")[2]
    stored_as = "Q5_0 and Q8_0" if columns % _BLOCK == 0 else "F16"
    advice = "; multiple_of = 256 rounds up" if site.value is None else ""
    slow = "" if columns % 8 == 0 else ", and matrix units of GPUs want multiples of 8 at least"
    return (
        f"{module} reads {columns:,} columns, no multiple of {_K_BLOCK}: llama.cpp's Q4_K_M stores "
        f"it as {stored_as}, {extra / 1e6:,.1f} MB more{slow}{advice}"
    )
