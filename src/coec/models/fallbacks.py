"""What a width costs that quantisers and matrix units do not divide (docs/FORMATS.md)."""

from dataclasses import dataclass

from coec.models.layout import Site

K_BLOCK = 256
"""Weights of a row that K-quants store together."""
BLOCK = 32
"""Those of the types that stand in for them, Q5_0 and Q8_0, where they divide the row."""
PLAIN_BITS = 16.0
"""Of F16, which stands in where not even these do."""


@dataclass(frozen=True)
class Quantised:
    """Bits per weight that llama.cpp's Q4_K_M takes for a kind of matrix.

    Attributes:
        bits: as it should be.
        fallback: where only `BLOCK` divides its rows.
    """

    bits: float
    fallback: float


Q4_K_M = {
    # Half of the blocks' down_proj are Q6_K instead of Q4_K, and so Q8_0 instead of Q5_0.
    "mlp": Quantised((4.5 + 6.5625) / 2, (5.5 + 8.5) / 2),
    "attention": Quantised(4.5, 5.5),
}
"""By the kind of site that a matrix is the consumer of."""


def fallbacks(site: Site, units: int, outputs: int, blocks: int) -> str | None:
    """What a consumer costs more when quantised than at a full width; None where that is nothing.

    A dense width that is not full itself is left alone: pruning has lost nothing there.

    Args:
        site: the kind of site.
        units: how many it keeps.
        outputs: rows of the consumer.
        blocks: how many blocks have such a site.
    """
    columns = units * site.columns_per_unit
    quantised = Q4_K_M.get(site.kind)
    if quantised is None or columns % K_BLOCK == 0 or site.columns % K_BLOCK:
        return None
    bits = quantised.fallback if columns % BLOCK == 0 else PLAIN_BITS
    more = blocks * outputs * columns * (bits - quantised.bits) / 8
    module = site.consumer.rpartition(".")[2]
    instead = "Q5_0 and Q8_0" if columns % BLOCK == 0 else "F16"
    advice = "; multiple_of = 256 rounds up" if site.value is None else ""
    slow = "" if columns % 8 == 0 else ", and matrix units of GPUs want multiples of 8 at least"
    return (
        f"{module} reads {columns:,} columns, no multiple of {K_BLOCK}: llama.cpp's Q4_K_M stores "
        f"it as {instead}, {more / 1e6:,.1f} MB more{slow}{advice}"
    )
