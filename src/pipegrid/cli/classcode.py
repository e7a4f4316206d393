"""
The methods of value classes as bytecode, kept beside that of the modules.

attrs writes the methods of each class as Python's text, and compiles that whenever the module is imported,
which Python keeps no bytecode of: for the 150 classes of a ``backup`` it was a tenth of all that it computes
before anything is sent. Here the bytecode is kept, in one file in the package's ``__pycache__``.

It is Python's own bargain. The file is where bytecode is, and as good: who may write there may change the
program. Only exactly the text that it was compiled from finds a piece of it, by the same Python. It is
written under the same conditions (``-B``, ``PYTHONDONTWRITEBYTECODE``, a directory that may be
written to; ``PYTHONPYCACHEPREFIX`` says another), whole or not at all. Whatever is wrong with it costs the
time that it would have saved. attrs has no interface for this; where it compiles in another way than known
here, nothing happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
import zlib
from importlib.util import MAGIC_NUMBER, cache_from_source

from pipegrid.disk import atomic_write

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

MOST = 1000
"""Pieces in one file. The package has fewer; what is left of its earlier states goes when there are more."""

_COMPILER = "_compile_and_eval"
_ARGUMENTS = ("script", "globs", "locs", "filename")


class ClassCode:
    """
    What has been compiled, and what is compiled now.

    Args:
        path: of the file, which need not be there.
        mark: what has to stand in front in it: of the Python that it is for.
    """

    def __init__(self, path: str, mark: bytes) -> None:
        self._path = path
        self._mark = mark
        self._pieces = self._read()
        self._new = False

    def execute(self, script: str, globs: Any, locs: Any = None, filename: str = "") -> None:
        """Execute the text of methods, as attrs would."""
        script = _steady(script, filename)
        key = hashlib.sha256(f"{filename}\n{script}".encode()).digest()
        kept = self._pieces.get(key)
        if kept is None:
            code = compile(script, filename, "exec")
            self._pieces[key] = marshal.dumps(code)
            self._new = True
        else:
            code = marshal.loads(kept)
        exec(code, globs, locs)

    def keep(self) -> None:
        """Write down what was compiled, if anything was and that is wanted; if it cannot be, it is not."""
        if not self._new or sys.dont_write_bytecode:
            return
        self._new = False
        pieces = {**self._read(), **self._pieces}  # other processes have met other classes
        body = marshal.dumps(pieces if len(pieces) <= MOST else self._pieces)
        from pathlib import Path  # for this few commands write, none of which waits for it

        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            mode = os.stat(__file__).st_mode & 0o666 | 0o200  # as Python's own bytecode has it
            data = self._mark + _check(body) + body
            atomic_write.replace_file(Path(self._path), data, mode=mode, durable=False)

    def _read(self) -> dict[bytes, bytes]:
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except OSError:
            return {}
        body = data[len(self._mark) + 4 :]
        if not body or data[: -len(body)] != self._mark + _check(body):
            return {}
        found: dict[bytes, bytes] = marshal.loads(body)
        return found


def _steady(script: str, filename: str) -> str:
    """
    Return the text without what is another in each process, and only tells classes apart in hashes.

    It is Python's hash of the class's name, which is random.
    """
    before, found, after = script.partition("hash((\n")
    number, comma, rest = after.partition(",")
    if not comma or not number.strip().removeprefix("-").isdecimal():
        return script
    return f"{before}{found}{zlib.crc32(filename.encode())},{rest}"


def _check(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "big")


def kept_beside(module: ModuleType | None) -> ClassCode:
    """
    Have attrs take bytecode from the file that belongs to this package.

    Args:
        module: ``attr._make``, where classes are made; None: nothing is taken.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = cache_from_source(os.path.join(package, "attrs.py")).removesuffix("pyc") + "code"
    code = ClassCode(path, MAGIC_NUMBER)
    compiler = getattr(module, _COMPILER, None)
    made: CodeType | None = getattr(compiler, "__code__", None)
    if (
        module is not None
        and made is not None
        and made.co_varnames[: made.co_argcount] == _ARGUMENTS
    ):
        setattr(module, _COMPILER, code.execute)
    return code


def begin() -> ClassCode:
    """Have it so in this process, for all classes that are made from now on."""
    try:
        from attr import _make
    except ImportError:  # of another release
        return kept_beside(None)
    return kept_beside(_make)
