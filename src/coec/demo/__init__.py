"""The demo: a bundled model pruned by 30 % and compensated five ways. Run `python -m coec.demo`."""
