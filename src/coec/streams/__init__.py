"""Calibration windows through the blocks of the dense and the pruned model."""
