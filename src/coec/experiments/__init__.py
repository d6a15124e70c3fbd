"""Experiments: grids of prunings, run resumably, and what they show."""
