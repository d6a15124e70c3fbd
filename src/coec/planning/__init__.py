"""The plan: what a run does and takes, decided before any weight is read."""
