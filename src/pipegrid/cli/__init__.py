"""
The ``pipegrid`` command: arguments in, exit status out.

This module is what the shell waits for whatever the command, so it imports next to nothing, and
``--version`` is answered before anything else is loaded. ``app`` has the commands.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line that this process was started with, and exit with its status."""
    if sys.argv[1:] == ["--version"]:
        from pipegrid.version import __version__

        try:
            print(f"pipegrid {__version__}", flush=True)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                print(
                    f"pipegrid: cannot write to standard output: {error.strerror}", file=sys.stderr
                )
            os._exit(1)  # the interpreter's own end would try to flush, and fail, once more
        return
    try:
        from pipegrid.cli.process import run_process

        status = run_process(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the work; what runs has better ways to be stopped
        status = 130
    sys.exit(status)
