"""The demo: a bundled model pruned by 30 % and repaired five ways. Run `python -m coec.demo`."""
