"""Stages of a pruning run, and the functions that run them in order."""
