"""Reconstruction: a part of a model fitted to given outputs by local least squares (METHODS §8)."""

from coec.reconstruction.gauss_newton import Fitted, Step, fit
from coec.reconstruction.least_squares import Ask, Batch, LeastSquares, Products

__all__ = ["Ask", "Batch", "Fitted", "LeastSquares", "Products", "Step", "fit"]
