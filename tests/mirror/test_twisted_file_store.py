"""What is received in pieces is stored, or leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from typing import Any, cast

from twisted.internet.defer import Deferred, execute
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.twisted_file_store import STREAM_BYTES, ArchiveSink, FileReceiver


class LateWorkers:
    """A thread that does nothing until ``work``."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Deferred[Any], Callable[[], Any]]] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
        """Keep a call."""
        done: Deferred[Any] = Deferred()
        self._jobs.append((done, lambda: function(*arguments)))
        return done

    def work(self) -> None:
        """Do all that was asked for, in order."""
        while self._jobs:
            done, job = self._jobs.pop(0)
            execute(job).chainDeferred(done)


class DroppedFileTests(SynchronousTestCase):
    """Another mirror was faster, or the connection was lost."""

    def setUp(self) -> None:
        """A destination whose thread is busy."""
        self.root = self.mktemp()
        os.mkdir(self.root)
        destination = Destination(self.root)
        self.addCleanup(destination.close)
        self.workers = LateWorkers()
        self.problems: list[Exception] = []
        self.sink = ArchiveSink(
            destination, cast("Any", self.workers), "none", lambda full: None, self.problems.append
        )
        self.data = bytes(2 * STREAM_BYTES)
        wanted = ArchiveFile("pool/a", len(self.data), "sha256", sha256(self.data).digest())
        self.file = FileReceiver(self.sink, wanted)

    def left(self) -> list[str]:
        """Return the files below the destination."""
        return [name for _, _, names in os.walk(self.root) for name in names if name != "lock"]

    def test_dropped_before_a_part_is_written(self) -> None:
        """The file is opened by the part that waited, and removed after it."""
        before = self.left()
        self.file.write(self.data[:STREAM_BYTES])
        self.file.discard()
        self.workers.work()
        self.assertEqual((self.left(), self.sink.held_bytes, self.problems), (before, 0, []))

    def test_stored_in_parts(self) -> None:
        """A file of several parts has all of them."""
        ends: list[str | None] = []
        self.file.write(self.data[:STREAM_BYTES])
        self.file.write(self.data[STREAM_BYTES:])
        self.file.finish(ends.append)
        self.workers.work()
        with open(os.path.join(self.root, "pool/a"), "rb") as file:
            self.assertEqual(file.read(), self.data)
        self.assertEqual((ends, self.sink.held_bytes, self.problems), ([None], 0, []))
