"""``python -m pipegrid.cli`` is ``pipegrid``."""

from pipegrid.cli import main

main()
