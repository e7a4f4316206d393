"""Runs the command line for ``python -m pipegrid``."""

from pipegrid.cli import main

if __name__ == "__main__":
    main()
