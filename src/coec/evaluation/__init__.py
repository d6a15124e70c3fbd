"""Evaluation of a checkpoint, dense or pruned."""
