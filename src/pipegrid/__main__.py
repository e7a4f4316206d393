"""``python -m pipegrid`` is ``pipegrid``."""

from pipegrid.cli import main

if __name__ == "__main__":
    main()
