"""`python -m coec` is the command."""

from coec.cli import main

main()
