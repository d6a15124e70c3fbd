"""The stages of a pruning, and the story that runs them."""
