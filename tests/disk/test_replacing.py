"""Small files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.replacing import create_file, replace_file


class DurabilityTests(SynchronousTestCase):
    """What is on the disk when, as the system is asked for it."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "aliases"
        self.steps: list[str] = []

        def noted(name: str) -> None:
            real = getattr(os, name)

            def call(*arguments: object, **options: object) -> object:
                what = (
                    "directory" if name == "fsync" and self.is_directory(arguments[0]) else "file"
                )
                self.steps.append(f"{name} {what}" if name == "fsync" else name)
                return real(*arguments, **options)

            patch = mock.patch.object(os, name, call)
            patch.start()
            self.addCleanup(patch.stop)

        for name in ("fsync", "replace", "link"):
            noted(name)

    def is_directory(self, fd: object) -> bool:
        assert isinstance(fd, int)
        return os.path.isdir(f"/proc/self/fd/{fd}")

    def test_replaced(self) -> None:
        """The bytes, the name, and the directory that has it: a power cut afterwards takes none of them."""
        replace_file(self.path, b"home: URI:DIR2:...")
        self.assertEqual(self.steps, ["fsync file", "replace", "fsync directory"])
        self.assertEqual(self.path.read_bytes(), b"home: URI:DIR2:...")

    def test_created(self) -> None:
        """The same of a file that is made only if there is none; whoever comes second may rely on it, too."""
        create_file(self.path, b"first")
        create_file(self.path, b"second")
        steps = ["fsync file", "link", "fsync directory"]
        self.assertEqual(self.steps, steps + steps)
        self.assertEqual(self.path.read_bytes(), b"first")

    def test_nothing_is_lost_with_it(self) -> None:
        """A cache is replaced at once."""
        replace_file(self.path, b"{}", durable=False)
        self.assertEqual(self.steps, ["replace"])

    def test_a_directory_that_cannot_be_synced(self) -> None:
        """The file is there all the same."""
        with mock.patch.object(os, "O_DIRECTORY", os.O_WRONLY):  # EISDIR
            replace_file(self.path, b"x")
        self.assertEqual(self.steps, ["fsync file", "replace"])
        self.assertEqual(self.path.read_bytes(), b"x")
