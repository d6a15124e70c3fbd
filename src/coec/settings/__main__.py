"""Prints docs/SETTINGS.md: all settings as Markdown tables."""

from coec.settings.document import document

if __name__ == "__main__":
    print(document(), end="")
