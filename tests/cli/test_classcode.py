"""Bytecode of the methods of value classes, which is kept from one command to the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import ModuleType
from typing import Any

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import classcode
from pipegrid.cli.classcode import ClassCode, kept_beside

_PROGRAM = """
import sys
compiled = []
def note(event, arguments):
    # Its own classes attrs makes while it is imported.
    if event == "compile" and str(arguments[1]).startswith("<attrs generated") and "pipegrid" in arguments[1]:
        compiled.append(arguments[1])
sys.addaudithook(note)
from pipegrid.cli import classcode
code = classcode.begin()
from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.wire.messages import WriteAnswer
code.keep()
one, other, third = (ChkCap(b"k" * 16, b"u" * 32, 3, 10, size) for size in (99, 99, 98))
assert one == other and len({one, other, LitCap(b"k")}) == 2 and one != third
try: one.size = 5
except AttributeError: pass
else: assert False
print(len(compiled), repr(one), repr(WriteAnswer(True)))
"""


def surroundings(prefix: Path, seed: int) -> dict[str, str]:
    """Return the environment of a process that keeps its bytecode below a directory."""
    found = environment() | {"PYTHONPYCACHEPREFIX": str(prefix), "PYTHONHASHSEED": str(seed)}
    del found["PYTHONDONTWRITEBYTECODE"]
    return found


def run(prefix: Path, seed: int, **more: str) -> tuple[int, str]:
    """Run a program that makes classes; returns how many it compiled, and what it says of them."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=surroundings(prefix, seed) | more,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    count, _, said = done.stdout.partition(" ")
    return int(count), said


class ProcessTests(SynchronousTestCase):
    """Each is a process of its own."""

    def setUp(self) -> None:
        self.prefix = Path(self.mktemp()).absolute()

    @property
    def files(self) -> list[Path]:
        """What was kept, and what is left of writing it."""
        return sorted(self.prefix.rglob("*attrs.*.code*"))

    def test_the_second_compiles_nothing(self) -> None:
        """Its classes are the same, whatever Python's hashes are in it."""
        count, said = run(self.prefix, 1)
        self.assertGreater(count, 10)
        self.assertEqual(len(self.files), 1)
        self.assertEqual(run(self.prefix, 2), (0, said))

    def test_what_is_damaged(self) -> None:
        """It is compiled anew, and kept."""
        count, said = run(self.prefix, 1)
        (file,) = self.files
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for damaged in (b"", whole[:1000], bytes(flipped), b"other Python" + whole):
            file.write_bytes(damaged)
            self.assertEqual(run(self.prefix, 1), (count, said))
            self.assertEqual(self.files, [file])
            self.assertEqual(run(self.prefix, 1), (0, said))

    def test_nothing_is_to_be_written(self) -> None:
        """Nothing is, as Python does it."""
        count, _ = run(self.prefix, 1, PYTHONDONTWRITEBYTECODE="1")
        self.assertGreater(count, 10)
        self.assertEqual(self.files, [])

    def test_nothing_can_be_written(self) -> None:
        """Nobody hears of it."""
        self.prefix.write_bytes(b"no directory")
        self.assertGreater(run(self.prefix, 1)[0], 10)

    def test_a_command(self) -> None:
        """One that reaches for a grid keeps what it has compiled since it began to connect."""
        home = Path(self.mktemp()).absolute()
        home.mkdir()
        file = home / "file"
        file.write_bytes(b"more than fifty-five bytes " * 9)
        subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", "--json", "put", str(file)],
            env=surroundings(self.prefix, 1) | {"HOME": str(home), "XDG_CONFIG_HOME": str(home)},
            capture_output=True,
            check=True,
            timeout=60,
        )
        self.assertEqual(len(self.files), 1)
        alone = Path(self.mktemp()).absolute()
        self.assertLess(run(self.prefix, 2)[0], run(alone, 2)[0])


class ClassCodeTests(SynchronousTestCase):
    """One file."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp()).absolute() / "below" / "file"
        self.patch(sys, "dont_write_bytecode", False)

    def code(self) -> ClassCode:
        """Return what a process begins with."""
        return ClassCode(str(self.path), MAGIC_NUMBER)

    def made(self, code: ClassCode, script: str) -> dict[str, Any]:
        """Return what a text makes."""
        found: dict[str, Any] = {}
        code.execute(script, {}, found, "<attrs generated methods of.Some>")
        return found

    def test_two_processes_at_once(self) -> None:
        """What either has compiled is kept."""
        one, other = self.code(), self.code()
        self.assertEqual(self.made(one, "x = 1"), {"x": 1})
        self.assertEqual(self.made(other, "x = 2"), {"x": 2})
        one.keep()
        other.keep()
        before = self.path.stat()
        third = self.code()
        self.assertEqual([self.made(third, f"x = {n}")["x"] for n in (1, 2)], [1, 2])
        third.keep()
        self.assertEqual(self.path.stat(), before)  # there was nothing new
        self.assertEqual(os.listdir(self.path.parent), ["file"])

    def test_earlier_states(self) -> None:
        """They are forgotten when they are too many."""
        self.patch(classcode, "MOST", 3)
        code = self.code()
        for number in range(3):
            self.made(code, f"x = {number}")
        code.keep()
        later = ClassCode(str(self.path.with_name("other")), MAGIC_NUMBER)
        self.made(later, "x = 9")
        later._path = str(self.path)
        later.keep()
        self.assertEqual(len(self.code()._pieces), 1)

    def test_another_attrs(self) -> None:
        """One that compiles in another way is left alone."""

        def odd(script: str, more: Iterator[str]) -> None:
            """Compile it somehow."""

        module: Any = ModuleType("attr._make")
        kept_beside(module)
        self.assertFalse(hasattr(module, "_compile_and_eval"))
        module._compile_and_eval = odd
        kept_beside(module)
        self.assertIs(module._compile_and_eval, odd)
