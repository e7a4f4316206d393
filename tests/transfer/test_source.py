"""Where plaintext comes from."""

from __future__ import annotations

import errno
import gzip
import io
import os
import tempfile
import threading
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SourceError
from pipegrid.transfer.put import source as module
from pipegrid.transfer.put.source import Source, open_source
from tests.transfer.world import content

DATA = content(3_000_000)


class SourceTests(SynchronousTestCase):
    """Whatever the caller gives, it is read by position and twice."""

    def assert_reads(self, source: Source, data: bytes) -> None:
        self.assertEqual(source.size, len(data))
        for _ in range(2):
            self.assertEqual(source.read_at(0, len(data)), data)
        middle = len(data) // 2
        self.assertEqual(source.read_at(middle, len(data) - middle), data[middle:])
        self.assertEqual(source.read_at(0, 0), b"")
        source.close()

    def path(self, data: bytes = DATA) -> str:
        path = str(self.mktemp())
        Path(path).write_bytes(data)
        return path

    def test_bytes(self) -> None:
        """In memory already; a bytearray may change afterwards."""
        for kind in (bytes, bytearray, memoryview):
            self.assert_reads(open_source(kind(DATA)), DATA)
        changing = bytearray(b"before")
        source = open_source(changing)
        changing[:] = b"after!"
        self.assert_reads(source, b"before")
        self.assertEqual(source.name, "the data")

    def test_paths(self) -> None:
        """As text or path object; the name is the path."""
        path = self.path()
        self.assertEqual(open_source(path).name, path)
        self.assert_reads(open_source(path), DATA)
        self.assert_reads(open_source(Path(path)), DATA)
        self.assert_reads(open_source(self.path(b"")), b"")

    def test_open_files(self) -> None:
        """From the beginning whatever the position, which stays as it is; they stay open."""
        for buffering in (-1, 0):
            with open(self.path(), "rb", buffering=buffering) as file:
                file.seek(1000)
                source = open_source(file)
                self.assert_reads(source, DATA)
                self.assertFalse(file.closed)
                self.assertEqual(file.tell(), 1000)

    def test_unwritten_buffers(self) -> None:
        """What was written to the object belongs to the file, also if it is still in a buffer."""
        with open(self.path(b""), "w+b") as file:
            file.write(b"short")
            self.assert_reads(open_source(file), b"short")
        with tempfile.NamedTemporaryFile() as temporary:
            temporary.write(b"short")
            self.assert_reads(open_source(temporary), b"short")

    def test_objects_in_memory(self) -> None:
        """From their position to their end, copied."""
        file = io.BytesIO(DATA)
        file.seek(1000)
        self.assert_reads(open_source(file), DATA[1000:])
        self.assertFalse(file.closed)

    def test_decompressors(self) -> None:
        """What an object gives counts, not the file that it has underneath."""
        path = self.mktemp()
        with gzip.open(path, "wb") as packed:
            packed.write(DATA)
        with gzip.open(path, "rb") as file:
            self.assert_reads(open_source(file), DATA)

    def test_pipes(self) -> None:
        """Read to their end."""
        read, write = os.pipe()

        def feed() -> None:
            with open(write, "wb") as end:
                end.write(DATA)

        feeder = threading.Thread(target=feed)
        feeder.start()
        with open(read, "rb") as file:
            self.assert_reads(open_source(file, "standard input"), DATA)
        feeder.join()

    def test_a_path_that_is_a_pipe(self) -> None:
        """A named one is as good."""
        path = self.mktemp()
        os.mkfifo(path)

        def feed() -> None:
            with open(path, "wb") as end:
                end.write(DATA)

        feeder = threading.Thread(target=feed)
        feeder.start()
        self.assert_reads(open_source(path), DATA)
        feeder.join()

    def test_what_cannot_be_opened(self) -> None:
        """Each is one sentence with the path and the reason."""
        missing = self.mktemp()
        directory = self.mktemp()
        os.mkdir(directory)
        for path, reason in (
            (missing, "No such file"),
            (directory, "Is a directory"),
            ("a\0b", "not a path"),
        ):
            with self.assertRaises(SourceError) as caught:
                open_source(path)
            self.assertIn(reason, str(caught.exception))

    def test_what_does_not_wait(self) -> None:
        """A pipe with nothing in it at the moment has not come to its end."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, writing)
        os.set_blocking(reading, False)
        with os.fdopen(reading, "rb") as file, self.assertRaises(SourceError) as caught:
            open_source(file)
        self.assertIn("does not wait", str(caught.exception))

    def test_what_cannot_be_copied(self) -> None:
        """Text, closed files, and pipes while there is no room for the copy."""
        closed = io.BytesIO(b"x")
        closed.close()
        for wrong, why in ((io.StringIO("text"), "binary mode"), (closed, "it is closed")):
            with self.assertRaises(SourceError) as caught:
                open_source(wrong)  # type: ignore[arg-type]
            self.assertIn(why, str(caught.exception))
        full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115  (closed by the source)
        self.patch(tempfile, "TemporaryFile", lambda **_: full)
        with self.assertRaises(SourceError) as caught:
            open_source(io.BytesIO(DATA))
        self.assertIn("TMPDIR", str(caught.exception))

    def test_no_temporary_space(self) -> None:
        """As where all is read only, and nothing is mounted on /tmp."""
        nowhere = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
        self.patch(tempfile, "TemporaryFile", mock.Mock(side_effect=nowhere))
        with self.assertRaises(SourceError) as caught:
            open_source(io.BytesIO(DATA), "standard input")
        self.assertIn(
            "cannot copy standard input to temporary space: No usable", str(caught.exception)
        )
        self.assertIn("TMPDIR", str(caught.exception))

    def test_no_room_for_what_a_buffer_holds(self) -> None:
        """It is told of in the same words, though the buffer tries once more when it is closed."""

        class Full(io.RawIOBase):
            def readable(self) -> bool:
                return True

            def writable(self) -> bool:
                return True

            def seekable(self) -> bool:
                return True

            def seek(self, offset: int, whence: int = 0, /) -> int:
                return 0

            def write(self, data: object, /) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        spool = io.BufferedRandom(Full())
        with (
            mock.patch.object(module, "open_spool", return_value=spool),
            self.assertRaises(SourceError) as caught,
        ):
            open_source(io.BytesIO(b"less than the buffer"))
        self.assertIn("TMPDIR", str(caught.exception))

    def test_what_cannot_be_read(self) -> None:
        """It is no fault of the temporary space."""
        broken = mock.Mock(spec=io.BytesIO)
        broken.read.side_effect = OSError(5, "Input/output error")
        with self.assertRaises(SourceError) as caught:
            open_source(broken, "the tape")
        self.assertEqual(str(caught.exception), "cannot read the tape: Input/output error")

    def test_a_file_that_says_it_is_empty(self) -> None:
        """What the kernel makes up has content and no size, as on some mounts: it is read."""
        content = Path("/proc/version").read_bytes()
        self.assert_reads(open_source("/proc/version"), content)
        with open("/proc/version", "rb") as file:
            self.assert_reads(open_source(file), content)

    def test_short_reads(self) -> None:
        """The system may give less than asked: the rest is read as well."""
        pread = os.pread
        self.patch(os, "pread", lambda fd, length, offset: pread(fd, min(length, 1000), offset))
        self.assert_reads(open_source(self.path(DATA[:5000])), DATA[:5000])

    def test_a_file_that_shrinks(self) -> None:
        """Noticed when it is read."""
        path = self.path()
        source = open_source(path)
        os.truncate(path, 1000)
        with self.assertRaises(SourceError) as caught:
            source.read_at(0, 2000)
        self.assertIn("shorter", str(caught.exception))
        source.close()

    def test_a_disk_that_fails(self) -> None:
        """The error has the path and the reason."""
        source = open_source(self.path())
        self.patch(os, "pread", mock.Mock(side_effect=OSError(5, "Input/output error")))
        with self.assertRaises(SourceError) as caught:
            source.read_at(0, 10)
        self.assertIn("Input/output error", str(caught.exception))
        source.close()

    def test_changes(self) -> None:
        """Content, size and time stamps: whatever differs is a change."""
        for change in (
            lambda path: Path(path).write_bytes(b"other"),
            lambda path: os.truncate(path, 10),
            lambda path: os.utime(path, (0, 0)),
        ):
            path = self.path()
            source = open_source(path)
            change(path)
            self.assertRaises(SourceError, source.check_unchanged)
            source.close()

    def test_a_file_without_a_name(self) -> None:
        """Nobody else changes it, so it need not be read again though it was just written."""
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 100)
            source = open_source(file)
            self.assertTrue(source.check_unchanged())
            file.write(b"y")
            file.flush()
            self.assertRaises(SourceError, source.check_unchanged)

    def test_a_file_that_was_just_written(self) -> None:
        """Time stamps cannot tell whether it changed again in the same moment: they say so."""
        path = self.path()
        now = os.stat(path).st_ctime
        for age_s, proven in ((0.0, False), (1.9, False), (2.1, True), (-1.0, False)):
            self.patch(module.time, "time", lambda age_s=age_s: now + age_s)  # type: ignore[attr-defined]
            source = open_source(path)
            self.assertEqual(source.check_unchanged(), proven, f"{age_s} s")
            source.close()
