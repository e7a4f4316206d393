"""Files over SFTP: what a client writes, changes, replaces and reads."""

from __future__ import annotations

import errno
import struct
from typing import Any
from unittest import mock

from pipegrid.core.caps import ChkCap
from pipegrid.gateway.sftp import file_writer
from pipegrid.gateway.sftp.sftp_messages import (
    Fields,
    FileAttributes,
    OpenFlag,
    RequestKind,
    Status,
    packed_string,
)
from pipegrid.tree import read_ahead
from tests.gateway.sftp_world import NEW, READ, WRITE, SftpTestCase
from tests.transfer.world import content


class WritingTests(SftpTestCase):
    """A close stores the file as a whole."""

    def test_sizes(self) -> None:
        """Files of all sizes come back, also from another gateway."""
        for size in (0, 1, 55, 56, 20_000, 300_000, 3_000_000):
            data = content(size)
            self.client.put(f"/{size}", data)
            self.assertEqual(self.client.stat(f"/{size}").size, size)
            self.assertEqual(self.elsewhere().get(f"/{size}", 200_000), data)
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))

    def test_nothing_is_stored_before_the_close(self) -> None:
        """Other sessions of this gateway see the file being written, other clients do not."""
        handle = self.client.open("/f", NEW)
        self.client.write(handle, 0, b"half")
        self.assertEqual(self.elsewhere().list(), {})
        self.assertEqual(self.another().stat("/f").size, 4)
        self.assertEqual(list(self.another().list()), ["f"])
        self.client.close(handle)
        self.assertEqual(self.elsewhere().get("/f"), b"half")

    def test_a_lost_connection_stores_nothing(self) -> None:
        """No half file, and the space is given back; what was there before stays."""
        self.client.put("/old", b"before")
        lost = self.another()
        for path in ("/old", "/new"):
            handle = lost.open(path, NEW)
            lost.write(handle, 0, content(100_000))
        lost.leave()
        self.assertEqual(self.client.get("/old"), b"before")
        self.assertEqual(list(self.client.list()), ["old"])
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))

    def test_a_close_that_has_arrived_is_done(self) -> None:
        """Some clients close without waiting for the answer, and leave."""
        handle = self.client.open("/f", NEW)
        for offset in range(0, 200_000, 20_000):
            fields = packed_string(handle) + struct.pack(">Q", offset)
            self.client.ask(RequestKind.WRITE, fields + packed_string(b"x" * 20_000))
        self.client.ask(RequestKind.CLOSE, packed_string(handle))
        self.client.leave()
        self.world.run(self.files.stored())
        self.assertEqual(self.another().get("/f"), b"x" * 200_000)
        self.assertFalse(self.client.channel.lost)

    def test_append_and_any_offset(self) -> None:
        """Existing content is fetched once, changed and stored again."""
        self.client.put("/f", b"0123456789" * 10_000)
        handle = self.client.open("/f", WRITE | OpenFlag.APPEND)
        self.client.write(handle, 0, b"end")
        self.client.close(handle)
        handle = self.client.open("/f", WRITE | READ)
        self.client.write(handle, 5, b"XY")
        self.client.write(handle, 100_010, b"far")
        self.assertEqual(self.client.read(handle, 3, 6), b"34XY78"[:6])
        self.client.close(handle)
        wanted = bytearray(b"0123456789" * 10_000 + b"end" + bytes(7) + b"far")
        wanted[5:7] = b"XY"
        self.assertEqual(self.elsewhere().get("/f"), bytes(wanted))

    def test_truncate(self) -> None:
        """By path and by handle, shorter and longer; to nothing without a fetch."""
        self.client.put("/f", content(100_000))
        self.client.set("/f", size=70_000)
        self.assertEqual(self.elsewhere().get("/f"), content(100_000)[:70_000])
        handle = self.client.open("/f", WRITE)
        self.client.do(
            RequestKind.FSETSTAT, packed_string(handle) + FileAttributes(size=70_003).packed()
        )
        self.client.close(handle)
        self.assertEqual(self.client.get("/f"), content(100_000)[:70_000] + bytes(3))
        cap = self.run_now(self.views.view(self.root)).entries["f"].cap
        assert isinstance(cap, ChkCap)
        self.delete_shares(cap)
        self.client.set("/f", size=0)
        self.assertEqual(self.client.get("/f"), b"")

    def test_exclusive(self) -> None:
        """A name that exists, here or in another session, is refused; and at the close, elsewhere."""
        exclusive = NEW | OpenFlag.EXCLUSIVE
        handle = self.client.open("/f", exclusive)
        self.fails(Status.FAILURE, "exists", self.another().open, "/f", exclusive)
        self.elsewhere().put("/f", b"theirs")
        self.client.write(handle, 0, b"ours")
        self.fails(Status.FAILURE, "another client", self.client.close, handle)
        self.now += 10
        self.world.clock.advance(10)
        self.assertEqual(self.client.get("/f"), b"theirs")

    def test_the_last_close_counts(self) -> None:
        """Two sessions that write the same file do not mix their content."""
        one, two = self.client.open("/f", NEW), self.another()
        other = two.open("/f", NEW)
        self.client.write(one, 0, b"1" * 50_000)
        two.write(other, 0, b"22")
        self.client.close(one)
        two.close(other)
        self.assertEqual(self.elsewhere().get("/f"), b"22")

    def test_each_close_stores(self) -> None:
        """Also while other handles of the file are open, which read it, or write on."""
        one, two = self.client.open("/f", NEW), self.client.open("/f", WRITE)
        three = self.client.open("/f")
        self.client.write(one, 0, b"one")
        self.client.close(one)
        self.assertEqual(self.elsewhere().get("/f"), b"one")
        self.client.write(two, 3, b", two")
        self.client.close(two)
        self.assertEqual(self.elsewhere().get("/f"), b"one, two")
        self.assertEqual(self.client.read(three, 0, 100), b"one, two")
        self.client.set("/f", mode=0o600)
        self.assertEqual(self.elsewhere().stat("/f").mode, 0o100600)
        self.client.close(three)
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))

    def test_a_writer_that_has_gone(self) -> None:
        """A file of which only readers are left shows nothing of what was not stored."""
        self.client.put("/old", b"old")
        other = self.another()
        handles = []
        for path in ("/old", "/new"):
            writer = other.open(path, NEW)
            other.write(writer, 0, b"unfinished")
            handles.append(self.client.open(path))
        other.leave()
        self.assertEqual(list(self.client.list()), ["old"])
        self.assertEqual(self.client.get("/old"), b"old")
        for handle in handles:
            self.assertEqual(self.client.read(handle, 0, 100), b"unfinished")
            self.client.close(handle)
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))

    def test_sync(self) -> None:
        """What was written is stored, and the file stays open."""
        handle = self.client.open("/f", NEW)
        self.client.write(handle, 0, b"first")
        self.client.extended("fsync@openssh.com", packed_string(handle))
        self.assertEqual(self.elsewhere().get("/f"), b"first")
        self.client.write(handle, 5, b", second")
        self.client.close(handle)
        self.assertEqual(self.elsewhere().get("/f"), b"first, second")

    def test_mutable_files_keep_their_cap(self) -> None:
        """They are written in place."""
        made = self.world.run(self.grid.create_mutable(b"first content"))
        root = self.make_directory(m=made.cap)
        client = self.another(root)
        self.assertEqual(client.stat("/m").size, 13)
        self.assertEqual(client.list()["m"].size, 13)
        self.assertEqual(client.get("/m"), b"first content")
        handle = client.open("/m", WRITE)
        client.write(handle, 0, b"FIRST")
        client.close(handle)
        self.assertEqual(client.get("/m"), b"FIRST content")
        self.assertEqual(self.world.run(self.grid.read(made.cap)), b"FIRST content")
        client.put("/m", b"x" * 70)
        self.assertEqual(self.world.run(self.grid.read(made.cap)), b"x" * 70)
        self.assertEqual(client.stat("/m").size, 70)

    def test_failed_closes_are_reported(self) -> None:
        """By the close, in a sentence; nothing is left behind."""
        handle = self.client.open("/f", NEW)
        self.client.write(handle, 0, content(100_000))
        for server in self.world.servers:
            server.host.crash()
        self.fails(Status.FAILURE, "", self.client.close, handle)
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))

    def test_temporary_space_is_bounded(self) -> None:
        """In bytes and in files, all together."""
        handle = self.client.open("/f", NEW)
        self.fails(
            Status.FAILURE, "temporary space", self.client.write, handle, 50_000_000, b"more"
        )
        self.client.write(handle, 40_000_000, b"far")
        self.assertLess(self.space.used_bytes, 50_000_000)
        other = self.another()
        self.fails(Status.FAILURE, "temporary space", other.put, "/g", b"x" * 10_000_000)
        other.leave()
        self.fails(Status.FAILURE, "at most", self.client.write, handle, 1 << 63, b"x")
        self.client.leave()
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))
        self.patch(file_writer, "MOST_FILES", 2)
        client = self.another()
        client.open("/a", NEW)
        client.open("/b", NEW)
        self.fails(Status.FAILURE, "2 files", client.open, "/c", NEW)

    def test_disk_full(self) -> None:
        """The write that fails says it, and so does the close: a file with a hole is not stored."""
        handle = self.client.open("/f", NEW)

        def full(*arguments: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with mock.patch("os.pwrite", full):
            self.fails(
                Status.FAILURE, "disk for temporary", self.client.write, handle, 0, b"x" * 20_000
            )
        self.client.write(handle, 20_000, b"x")
        self.fails(Status.FAILURE, "a write to it has failed", self.client.close, handle)
        self.assertEqual(self.client.list(), {})
        self.assertEqual((self.space.used_bytes, self.space.files), (0, 0))


class ReadingTests(SftpTestCase):
    """Ranges come from one download that is ahead of the client, or one by one."""

    def test_here_and_there(self) -> None:
        """Ranges in any order are right."""
        data = content(2_000_000)
        self.client.put("/f", data)
        handle = self.client.open("/f")
        for offset, length in (
            (1_500_000, 100),
            (0, 32768),
            (32768, 32768),
            (10, 20),
            (1_999_990, 100),
            (400_000, 200_000),
            (5_000_000, 10),
        ):
            found = self.client.read(handle, offset, length)
            self.assertEqual(found, data[offset : offset + length], offset)
        self.client.close(handle)
        self.assertEqual(self.read_space.streams, 0)

    def test_many_requests_at_once(self) -> None:
        """As OpenSSH's client reads: 64 requests, answered as they were asked."""
        data = content(3_000_000)
        self.client.put("/f", data)
        handle = self.client.open("/f")
        numbers = [
            self.client.ask(
                RequestKind.READ, packed_string(handle) + struct.pack(">QL", at, 50_000)
            )
            for at in range(0, len(data), 50_000)
        ]
        found = [Fields(self.client.answer(each).fields).string(1 << 20) for each in numbers]
        self.assertEqual(b"".join(found), data)

    def test_one_download(self) -> None:
        """A file that is read in order is fetched by one download, as fast as without SFTP."""
        data = content(3_000_000)
        self.client.put("/f", data)
        calls: list[Any] = []
        real = self.grid.get

        def get(*arguments: Any, **options: Any) -> Any:
            calls.append(options)
            return real(*arguments, **options)

        self.patch(self.grid, "get", get)
        self.assertEqual(self.client.get("/f"), data)
        self.assertEqual(calls, [{"start": 0}])

    def test_a_client_that_reads_no_further(self) -> None:
        """Holds a bounded number of bytes, and after a while none."""
        self.client.put("/f", content(10_000_000))
        handle = self.client.open("/f")
        self.client.read(handle, 0, 1000)
        self.world.clock.advance(1)
        reader = self.client.session._handles[handle].reader  # type: ignore[union-attr]
        stream = reader._streams[0]
        for _ in range(200):
            self.world.run(self.client.tick())
        self.assertLess(stream.end - stream.start, 2_000_000)
        self.world.clock.advance(read_ahead.IDLE_S)
        self.world.clock.advance(read_ahead.IDLE_S)
        self.assertEqual(self.read_space.streams, 0)
        self.assertEqual(
            self.client.read(handle, 5_000_000, 5), content(10_000_000)[5_000_000:][:5]
        )

    def test_many_readers(self) -> None:
        """Few downloads run; one that is not used gives way, and its reader goes on where it was."""
        data = content(1_000_000)
        self.client.put("/f", data)
        handles = [self.client.open("/f") for _ in range(2 * read_ahead.MOST_STREAMS)]
        for step in range(3):
            for handle in handles:
                found = self.client.read(handle, step * 50_000, 50_000)
                self.assertEqual(found, data[step * 50_000 :][:50_000])
                self.assertLessEqual(self.read_space.streams, read_ahead.MOST_STREAMS)
            self.world.clock.advance(read_ahead.UNUSED_S)
        for handle in handles:
            self.client.close(handle)
        self.assertEqual(self.read_space.streams, 0)

    def test_the_file_that_was_opened(self) -> None:
        """A file that is replaced or removed meanwhile stays readable by its handle."""
        self.client.put("/f", b"old" * 100)
        handle = self.client.open("/f")
        self.client.put("/f", b"new" * 100)
        self.assertEqual(self.client.read(handle, 0, 3), b"old")
        self.client.path(RequestKind.REMOVE, "/f")
        self.assertEqual(self.client.read(handle, 297, 300), b"old")

    def test_unrecoverable(self) -> None:
        """A file without enough shares fails with a sentence, and others are not affected."""
        self.client.put("/f", content(500_000))
        cap = self.run_now(self.views.view(self.root)).entries["f"].cap
        assert cap is not None
        self.delete_shares(cap, keep=2)
        handle = self.client.open("/f")
        self.fails(Status.FAILURE, "shares", self.client.read, handle, 0, 10)
