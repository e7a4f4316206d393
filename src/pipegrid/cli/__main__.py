"""``python -m pipegrid.cli`` runs the same command line as ``pipegrid``."""

from pipegrid.cli import main

main()
