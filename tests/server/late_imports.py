"""
Run a program with a storage server in it, and write down what it would import once it serves.

    python -m tests.server.late_imports RECORD pipegrid.cli -d DIR serve --port tcp:0

RECORD gets a line for each module that is looked for, with the lines of Python that asked for it; none
is found. And when the server is ready, one for each that a function of our own would import, and that is
missing. What is not imported when a server starts may be gone, or be another version's, when it is needed:
programs are upgraded while they run.
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("core", "disk", "reactor", "server", "storage", "wire")
"""Of ours, what a server is made of; in others' it is the commands that import."""

AT_START = (
    "pipegrid.server.serve._start",
    "pipegrid.server.serve._announce",
    "pipegrid.server.serve._serve_metrics",
    "pipegrid.reactor.tor_control_port._control_factory",
    "pipegrid.core.stream_cipher.pycryptodome",
)
"""Functions that nobody calls later: a server deciphers nothing, and its TLS has brought OpenSSL along."""


class Recorder:
    """Finds no module that is not there, and writes down which were looked for."""

    def __init__(self, record: str) -> None:
        self._file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, name: str, why: str) -> None:
        """Write one line."""
        os.write(self._file, f"{name}: {why}\n".encode())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Take note, and find nothing."""
        lines = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_stack()[:-1]
            if "importlib" not in frame.filename
        ]
        self.write(name, " ".join(lines[-3:]))
        raise ModuleNotFoundError(f"{name} is looked for while the server runs", name=name)


def put_off(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield each function of a module that imports, and what."""
    source = Path(str(module.__file__)).read_text("utf-8")
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for each in ast.walk(function):
            if isinstance(each, ast.Import):
                yield from ((function.name, alias.name) for alias in each.names)
            elif isinstance(each, ast.ImportFrom):
                assert each.module
                assert not each.level
                yield function.name, each.module
                for alias in each.names:
                    name = f"{each.module}.{alias.name}"
                    if name not in sys.modules and _is_module(name):
                        yield function.name, name


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what is before the dot is no package
        return False


def look(recorder: Recorder) -> None:
    """Write down what functions of ours would import and is not there, or only stands for it."""
    for name, module in sorted(sys.modules.items()):
        if type(module).__name__ == "LazyModule":
            recorder.write(name, "a stand-in")
        if name.startswith(tuple(f"pipegrid.{each}." for each in PACKAGES)):
            for function, wanted in put_off(module):
                where = f"{name}.{function}"
                if wanted not in sys.modules and where not in AT_START:
                    recorder.write(wanted, where)


def main() -> None:
    """Do what the command line says."""
    del sys.argv[0]
    recorder = Recorder(sys.argv.pop(0))
    finder: Any = recorder
    from pipegrid.server import systemd

    notify = systemd.notify

    def ready(state: str, surroundings: Mapping[str, str] | None = None) -> bool:
        if state == systemd.READY:
            look(recorder)
            sys.meta_path.insert(0, finder)
        return notify(state, surroundings)

    systemd.notify = ready
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
