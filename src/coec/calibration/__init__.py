"""Calibration: token windows, and dense activations streamed one block at a time."""
