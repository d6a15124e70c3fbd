"""Reconstruction: a part of a model fitted to given outputs by local least squares (METHODS §8)."""

from coec.reconstruction.attention import AttentionProducts, HeldAttention
from coec.reconstruction.gated import GatedMlp, GatedProducts
from coec.reconstruction.gauss_newton import Fitted, Step, fit
from coec.reconstruction.least_squares import (
    Ask,
    Batch,
    DifferentiatedProducts,
    LeastSquares,
    Products,
)

__all__ = [
    "Ask", "AttentionProducts", "Batch", "DifferentiatedProducts", "Fitted", "GatedMlp",
    "GatedProducts", "HeldAttention", "LeastSquares", "Products", "Step", "fit",
]  # fmt: skip
