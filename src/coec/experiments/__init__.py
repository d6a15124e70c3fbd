"""Sweeps over settings, and the report of what they measured."""
