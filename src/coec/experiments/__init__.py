"""Experiments: grids of prunings, run resumably, and what they show."""

from pathlib import Path

READY_GRIDS = {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}
"""Grids that come with the package, by name."""
