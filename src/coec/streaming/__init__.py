"""Calibration windows through the blocks of one model, or of two side by side."""
