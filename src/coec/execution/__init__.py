"""Outputs that appear whole, the journal of a run, and worker processes."""
