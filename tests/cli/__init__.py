"""Tests of the command line; those in this process draw on a terminal that can."""

import os

os.environ["TERM"] = "linux"
