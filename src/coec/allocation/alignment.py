"""Widths made multiples of what reads them in blocks (docs/FORMATS.md).

Quantisers and tensor cores fall back to something larger or slower where the last block is not
full.
"""

import math

from coec.models.layout import Site

MULTIPLES = (256, 128, 64, 32)
"""`multiple_of = auto` chooses from these: blocks of K-quants, tensor cores and Q8_0."""
OF_EXPERTS = 8
"""What divides the channels that experts keep: transformers runs all experts at once, which takes
rows of a multiple of 16 bytes and fails on others."""
MOST_ADDED = 0.02
"""Of the kept channels, that it may add."""


def aligned(site: Site, kept: int, multiple: int | None) -> int:
    """The next multiple, at most all; None chooses it. KV groups stay as they are counted."""
    if site.value is not None or kept == site.units:
        return kept
    if multiple is None:
        fits = (n for n in MULTIPLES if _up(kept, n) <= min(kept * (1 + MOST_ADDED), site.units))
        multiple = next(fits, 1)
    return min(_up(kept, _of_site(site, multiple)), site.units)


def aligned_down(site: Site, count: int, multiple: int | None) -> int:
    """The multiple before, or the number itself; None chooses it."""
    if multiple is None:
        fits = (n for n in MULTIPLES if count // n * n >= count * (1 - MOST_ADDED))
        multiple = next(fits, 1)
    multiple = _of_site(site, multiple)
    return count // multiple * multiple


def _of_site(site: Site, multiple: int) -> int:
    return math.lcm(multiple, OF_EXPERTS) if site.routed else multiple


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
