"""
Runs a module in a process that ends with its parent process, even if the parent is killed.

    python -m pipegrid.speedtest.end_with_parent MODULE ARGUMENT...

runs ``python -m MODULE ARGUMENT...``, which gets SIGTERM when its standard input ends, and is killed
``STOP_S`` seconds later. So the parent must keep that input open, and write nothing to it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

STOP_S = 15.0
_PIECE_BYTES = 4096


def main() -> None:
    """
    Run the module that the first argument names, with the following arguments, as ``python -m`` would.
    """
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_stdin() -> None:
    while os.read(0, _PIECE_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
