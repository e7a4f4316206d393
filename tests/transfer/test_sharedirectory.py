"""The share files of an encoding, when it is killed, or its disk fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import SinkError
from pipegrid.transfer.offline_encoding import encode_file

DATA = bytes(range(256)) * 3


class ShareDirectoryTests(SynchronousTestCase):
    """What is in the directory."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def encode(self, data: bytes, force: bool = False) -> None:
        """Encode some bytes into it."""
        encode_file(data, str(self.directory), Params(), b"", force=force)

    def contents(self) -> dict[str, bytes]:
        """Return all that is in it."""
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}

    def test_what_was_left_by_a_kill(self) -> None:
        """The hidden file of each share has a name of its own, which the next run uses, and empties."""
        self.encode(DATA)
        expected = self.contents()
        for number in map(str, range(10)):
            (self.directory / number).unlink()
            (self.directory / f".{number}.pipegrid-part").write_bytes(b"x" * 10_000)
        self.encode(DATA)
        self.assertEqual(self.contents(), expected)

    def test_none_before_all_are_on_the_disk(self) -> None:
        """Each is synced; if the disk fails to at the last one, what was there stays, and that alone."""
        self.encode(DATA)
        before, synced = self.contents(), list[int]()

        def fsync(fd: int) -> None:
            synced.append(os.fstat(fd).st_size)
            if len(synced) == 10:
                raise OSError(errno.ENOSPC, "No space left on device")

        self.patch(os, "fsync", fsync)
        with self.assertRaises(SinkError) as caught:
            self.encode(DATA * 2, force=True)
        self.assertIn("cannot write shares to", str(caught.exception))
        self.assertEqual(self.contents(), before)

    def test_a_link_in_the_place_of_a_share(self) -> None:
        """It is replaced, and what it leads to stays."""
        self.directory.mkdir()
        victim = self.directory / "victim"
        victim.write_bytes(b"precious")
        (self.directory / "3").symlink_to(victim)
        self.encode(DATA, force=True)
        self.assertEqual(victim.read_bytes(), b"precious")
        self.assertFalse((self.directory / "3").is_symlink())
