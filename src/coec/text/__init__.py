"""Calibration and evaluation texts, cut into windows of tokens; nothing here runs a model."""
