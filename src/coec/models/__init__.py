"""Models: which modules are pruned, how checkpoints are read, cut and written."""
