"""Reconstruction: a block trained towards given outputs (METHODS §8)."""
