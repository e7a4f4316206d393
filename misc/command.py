"""How the tools here run the real ``pipegrid`` as a process of its own."""

from __future__ import annotations

import compileall
import os
import sys
from pathlib import Path

import pipegrid


def command(directory: Path | str, *arguments: str) -> list[str]:
    """Return the command line that runs ``pipegrid`` with a client's directory."""
    return [sys.executable, "-m", "pipegrid.cli", "-d", str(directory), *arguments]


def environment() -> dict[str, str]:
    """Return the environment in which it runs: with this very package, installed or not."""
    source = str(Path(pipegrid.__file__).resolve().parent.parent)
    return os.environ | {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}


def compile_package() -> None:
    """
    Have the bytecode of the package on the disk, as an installed one has it.

    ``environment`` lets no command write any, so that without this each would compile all that it imports.
    """
    compileall.compile_dir(str(Path(pipegrid.__file__).parent), quiet=2)
