"""Where tests find what may not be committed."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Third-party models, texts and reference vectors."""
