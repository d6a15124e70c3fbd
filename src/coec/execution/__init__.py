"""Outputs that appear whole, and the journal of a run."""
