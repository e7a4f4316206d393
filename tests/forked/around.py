"""
Runs a command in whose environment ``$TAHOE`` forks: ``python tests/forked/around.py PROGRAM COMMAND…``.

A process of Tahoe-LAFS takes more than a second of a processor to import what it stands on, and the tests
begin some fifty of them. Here a server (``server``, run by the interpreter beside the program) has imported
that once, and ``$TAHOE`` is a program that asks it; ``$TAHOE_AFRESH`` is the program itself. What is
Tahoe-LAFS's own each process imports itself, and ``make interop`` begins each afresh.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""What ``misc.command.environment`` gives commands of ours, and another program need not get."""

SCRIPT = """#!/bin/sh
unset {ours}
exec {asking} "$@"
"""


def surroundings() -> dict[str, str]:
    """Return the environment of the server: in the program's own there is nothing of ours."""
    return {name: value for name, value in os.environ.items() if name not in OURS}


def script(asking: Sequence[str]) -> str:
    """Return the script that stands for the program, and asks the server for it."""
    return SCRIPT.format(ours=" ".join(OURS), asking=shlex.join(asking))


def main() -> int:
    """Begin the server, run the command, end the server; returns the command's status."""
    program, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="pg") as directory:
        path = Path(directory, "of-socket", "socket")  # the server removes its directory
        path.parent.mkdir()
        server = subprocess.Popen(
            [str(Path(program).parent / "python"), str(HERE / "server.py"), str(path), program],
            env=surroundings(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        try:
            if server.stdout.readline() != b"ready\n":
                raise AssertionError(f"the server of forks ended with status {server.wait()}")
            stand_in = Path(directory, "program")
            asking = [sys.executable, "-IS", str(HERE / "program.py"), str(path), program]
            stand_in.write_text(script(asking), "utf-8")
            stand_in.chmod(0o755)
            afresh = str(Path(program).absolute())
            settings = os.environ | {"TAHOE": str(stand_in), "TAHOE_AFRESH": afresh}
            return subprocess.run(command, env=settings, check=False).returncode
        finally:
            server.communicate()


if __name__ == "__main__":
    sys.exit(main())
