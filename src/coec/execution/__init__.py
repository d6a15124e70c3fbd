"""Where work is done and kept: outputs that appear whole, the journal, worker processes."""
