"""How the tools here run the real ``pipegrid`` as a process of its own."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
from pathlib import Path

import pipegrid

_COMPILE_CLASSES = """
from importlib import import_module
from pkgutil import walk_packages
import pipegrid
from pipegrid.cli import classcode
code = classcode.begin()
for each in walk_packages(pipegrid.__path__, "pipegrid."):
    if each.name.split(".")[1] in ("core", "flow", "grid", "http11", "transfer", "transport", "tree", "wire"):
        import_module(each.name)
code.keep()
"""
"""Those of commands that store files and fetch them."""


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

    ``environment`` lets no command write any, so that without this each would compile all that it imports,
    and the methods of its classes (``pipegrid.cli.classcode``), which the first command there writes.
    """
    compileall.compile_dir(str(Path(pipegrid.__file__).parent), quiet=2)
    surroundings = environment()
    del surroundings["PYTHONDONTWRITEBYTECODE"]
    subprocess.run([sys.executable, "-c", _COMPILE_CLASSES], env=surroundings, check=True)
