"""SFTP: bounds of sessions, order, clients that do not read, bytes that make no sense, and accounts."""

from __future__ import annotations

import contextlib
import os
import random
import struct
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.gateway.sftp import sftp_session
from pipegrid.gateway.sftp.accounts import Accounts
from pipegrid.gateway.sftp.sftp_messages import (
    MAX_MESSAGE_BYTES,
    Fields,
    FileAttributes,
    MalformedRequest,
    ReplyKind,
    RequestBuffer,
    RequestKind,
    Status,
    packed_string,
)
from pipegrid.gateway.sftp.sftp_tree import names_of_path
from tests.gateway.sftp_world import WINDOW_BYTES, SftpFailure, SftpTestCase
from tests.transfer.world import content


class BoundsTests(SftpTestCase):
    """What one client can have."""

    def test_handles(self) -> None:
        """A thousand, then a sentence; each that is closed is free again."""
        self.client.put("/f", b"x")
        handles = [self.client.open("/f") for _ in range(sftp_session.MOST_HANDLES)]
        self.fails(Status.FAILURE, "1024 files", self.client.open, "/f")
        self.fails(Status.FAILURE, "1024 files", self.client.list)
        self.client.close(handles.pop())
        self.client.open("/f")
        self.another().open("/f")

    def test_requests_that_arrive_at_once(self) -> None:
        """As many run as is allowed; the window is given back when they are done."""
        self.client.put("/f", content(300_000))
        handle = self.client.open("/f")
        given = self.client.channel.given_back
        fields = packed_string(handle) + struct.pack(">QL", 0, 100_000)
        numbers = [self.client.ask(RequestKind.READ, fields) for _ in range(500)]
        most = WINDOW_BYTES // 2
        self.assertLessEqual(self.client.session._running_bytes, most + MAX_MESSAGE_BYTES)
        self.assertLess(self.client.channel.given_back - given, 200 * len(fields))
        for number in numbers:
            self.client.answer(number)
        self.assertEqual(self.client.channel.given_back - given, 500 * (len(fields) + 9))
        self.assertEqual(self.client.session._running_bytes, 0)

    def test_a_client_that_does_not_read(self) -> None:
        """Nothing more is begun for it, and nothing is lost when it reads again."""
        channel = self.client.channel
        self.client.put("/f", content(300_000))
        handle = self.client.open("/f")
        channel.is_blocked = True
        fields = packed_string(handle) + struct.pack(">QL", 0, 30_000)
        numbers = [self.client.ask(RequestKind.READ, fields) for _ in range(100)]
        for _ in range(50):
            self.world.run(self.client.tick())
        self.assertEqual(channel.replies, {})
        self.another().put("/g", b"others are not affected")
        channel.is_blocked = False
        self.client.session.resume()
        for number in numbers:
            self.client.answer(number)

    def test_the_end(self) -> None:
        """A client that asks for nothing more gets all answers before the channel is closed."""
        number = self.client.ask(RequestKind.STAT, packed_string(b"/"))
        self.client.session.ended()
        self.client.answer(number)
        self.world.run(self.client.tick())
        self.assertTrue(self.client.channel.lost)

    def test_long_requests(self) -> None:
        """One byte more than a request may have ends the session; nothing is waited for."""
        self.client.raw(struct.pack(">L", MAX_MESSAGE_BYTES + 1))
        self.assertTrue(self.client.channel.lost)
        self.client.raw(b"x" * 1000)
        self.assertEqual(len(self.client.session._buffer), 0)

    def test_a_byte_at_a_time(self) -> None:
        """Is as good as all at once."""
        fields = packed_string(b"/a")
        data = struct.pack(">LBL", 5 + len(fields), RequestKind.STAT, 7) + fields
        for byte in data:
            self.client.raw(bytes([byte]))
        self.assertEqual(self.client.answer(7).kind, ReplyKind.STATUS)

    def test_malformed(self) -> None:
        """A request whose fields are wrong fails alone; one that is none ends the session."""
        for kind in (*RequestKind, 99, 255):
            if kind == RequestKind.INIT:
                continue
            for fields in (b"", b"\xff" * 3, b"\xff" * 40, packed_string(b"x" * 300), bytes(4)):
                with contextlib.suppress(SftpFailure):
                    self.client.do(kind, fields)
        self.client.list()
        self.client.raw(struct.pack(">LB", 3, RequestKind.STAT) + b"xx")
        self.assertTrue(self.client.channel.lost)

    def test_random_bytes(self) -> None:
        """Of clients that have logged in: they harm no others."""
        source = random.Random(5)
        for _ in range(40):
            client = self.another()
            for _ in range(30):
                kind = source.choice([*RequestKind, 200, 7])
                fields = source.choice(
                    (
                        source.randbytes(source.randrange(60)),
                        packed_string(source.randbytes(source.randrange(20))) + bytes(12),
                        packed_string(b"/" + source.randbytes(3)) + source.randbytes(16),
                    )
                )
                client.ask(kind, fields)
            client.raw(source.randbytes(100))
            self.world.run(client.tick())
            client.leave()
        self.assertEqual(self.flushLoggedErrors(), [])
        self.client.put("/f", b"x")
        self.assertEqual(self.client.get("/f"), b"x")

    def test_handles_of_other_kinds(self) -> None:
        """Are refused by what they are."""
        self.client.put("/f", b"x")
        file = self.client.open("/f")
        directory = Fields(self.client.path(RequestKind.OPENDIR, "/")).string(100)
        do = self.client.do
        read = struct.pack(">QL", 0, 10)
        self.fails(
            Status.FAILURE, "of a directory", do, RequestKind.READ, packed_string(directory) + read
        )
        self.fails(
            Status.FAILURE, "that of a directory", do, RequestKind.READDIR, packed_string(file)
        )
        write = packed_string(file) + bytes(8) + packed_string(b"x")
        self.fails(Status.PERMISSION_DENIED, "not open for writing", do, RequestKind.WRITE, write)
        self.fails(Status.FAILURE, "no such handle", do, RequestKind.CLOSE, packed_string(b"no"))

    def test_a_session_that_has_not_begun(self) -> None:
        """Gets nothing."""
        self.client.session._begun = False
        self.fails(Status.OP_UNSUPPORTED, "not begun", self.client.stat, "/")


class MessageTests(SftpTestCase):
    """The messages alone."""

    def test_attributes(self) -> None:
        """All fields come back; extended ones are skipped, and bounded."""
        every = FileAttributes(1 << 40, (1, 2), 0o100644, (3, 4))
        for each in (every, FileAttributes(), FileAttributes(mode=5)):
            self.assertEqual(Fields(each.packed()).attributes(), each)
        extended = struct.pack(">2L", 1 << 31, 1) + packed_string(b"a") + packed_string(b"b")
        self.assertEqual(Fields(extended).attributes(), FileAttributes())
        many = struct.pack(">2L", 1 << 31, 1 << 30)
        self.assertRaises(MalformedRequest, Fields(many).attributes)

    def test_buffer(self) -> None:
        """It finds requests wherever pieces end, and does not copy all for each."""
        one = struct.pack(">LB", 4, 7) + b"abc"
        buffer, found = RequestBuffer(), []
        data = one * 100
        for at in range(0, len(data), 13):
            buffer.add(data[at : at + 13])
            while (each := buffer.next()) is not None:
                found.append(each)
        self.assertEqual(found, [(7, b"abc", 8)] * 100)
        self.assertEqual(len(buffer), 0)

    def test_names(self) -> None:
        """A path never leads above where it begins."""
        self.assertEqual(names_of_path(b"/../../a/./b/../c/"), ("a", "c"))


class AccountFileTests(SynchronousTestCase):
    """The file of accounts."""

    def test_named_pipe(self) -> None:
        """Nobody writes into it, so it is refused; accounts that were read before stay."""
        path = Path(self.mktemp())
        path.write_text("alice secret URI:DIR2-LIT:\n")
        accounts = Accounts(path)
        path.unlink()
        os.mkfifo(path)
        self.assertIsNotNone(accounts.with_password("alice", b"secret"))
        with self.assertRaises(UsageError) as caught:
            Accounts(path)
        self.assertIn("it is a named pipe", str(caught.exception))
