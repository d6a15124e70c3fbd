"""The plan: the steps and costs of a run, decided before any weight is read."""
